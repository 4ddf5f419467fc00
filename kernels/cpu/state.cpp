// Optimizer, gradient norm and fingerprints: what is done to whole tensors, one element at a time.
#include "common.h"

// AdamW (Loshchilov and Hutter, 2019) on fp32 masters. keep = 1 - lr * decay, step = lr / (1 - b1^t) and
// correction = sqrt(1 - b2^t) come from float64 on the host, rounded once.
extern "C" void rlk_adamw(float* p, float* m, float* v, const float* grad, float clip, float keep, float b1, float c1, float b2, float c2,
                          float step, float correction, float eps, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    float g = grad[i] * clip;
    float w = p[i] * keep;
    m[i] = b1 * m[i] + c1 * g;
    v[i] = b2 * v[i] + c2 * (g * g);
    p[i] = w - step * (m[i] / (std::sqrt(v[i]) / correction + eps));
  }
}

// Sum of squares of one atom, float64, in index order.
extern "C" double rlk_sum_squares(const float* x, int64_t n) {
  double s = 0.0;
  for (int64_t i = 0; i < n; i++) s = s + double(x[i]) * double(x[i]);
  return s;
}

// Two independent 64-bit mixes (splitmix64's finalizer, Steele et al., OOPSLA 2014) of (element index, element bits), summed modulo 2^64:
// a sum does not depend on how the elements are spread over ranks.
static inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

template <class T>
static void fingerprint(const T* x, int64_t rows, int64_t cols, int64_t stride, int64_t row0, int64_t col0, int64_t width, uint64_t* out) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < cols; c++) {
      uint64_t index = uint64_t((row0 + r) * width + col0 + c), bits = uint64_t(x[r * stride + c]);
      out[0] += mix(mix(index * 0x9E3779B97F4A7C15ull + 1) ^ bits);
      out[1] += mix(mix(index * 0xD1B54A32D192ED03ull + 2) + bits * 0x8CB92BA72F3D8DD7ull);
    }
}

extern "C" void rlk_fingerprint_16(const uint16_t* x, int64_t rows, int64_t cols, int64_t stride, int64_t row0, int64_t col0, int64_t width,
                                   uint64_t* out) {
  fingerprint(x, rows, cols, stride, row0, col0, width, out);
}
extern "C" void rlk_fingerprint_32(const uint32_t* x, int64_t rows, int64_t cols, int64_t stride, int64_t row0, int64_t col0, int64_t width,
                                   uint64_t* out) {
  fingerprint(x, rows, cols, stride, row0, col0, width, out);
}

// The same mix, one sum a row and virtual shard. Row r holds `shards` runs of `cols` elements; the index of an element is its place in the
// whole row of 8 shards, so that neither rows nor shards enter by where they are held.
template <class T>
static void row_fingerprints(const T* x, int64_t rows, int64_t shards, int64_t cols, int64_t shard0, uint64_t* out) {
  for (int64_t s = 0; s < shards; s++)
    for (int64_t c = 0; c < cols; c++) {
      uint64_t key = mix(uint64_t((shard0 + s) * cols + c) * 0x9E3779B97F4A7C15ull + 1);
      for (int64_t r = 0; r < rows; r++) out[r * shards + s] += mix(key ^ uint64_t(x[(r * shards + s) * cols + c]));
    }
}

extern "C" void rlk_row_fingerprints_16(const uint16_t* x, int64_t rows, int64_t shards, int64_t cols, int64_t shard0, uint64_t* out) {
  row_fingerprints(x, rows, shards, cols, shard0, out);
}
extern "C" void rlk_row_fingerprints_32(const uint32_t* x, int64_t rows, int64_t shards, int64_t cols, int64_t shard0, uint64_t* out) {
  row_fingerprints(x, rows, shards, cols, shard0, out);
}
