// Causal grouped-query attention, forward (packed or paged) and backward. One query row is one program: it never
// depends on its neighbours, on the batch, on how a prompt was cut into chunks, or on where keys lie in memory.
#include <algorithm>
#include <vector>

#include "common.h"

namespace {
constexpr int BLOCK = 64;  // keys per block of the online softmax, counted from position 0: part of the numeric program

// Where the keys and values of one sequence lie: element offset of each position, and the stride between heads.
struct Layout {
  const bf16 *k, *v;
  const int64_t* offset;
  int64_t head_stride;
};

// K transposed per block ([block][d][64]) and V widened, for one KV head: lanes then run across keys, never across d.
struct Staged {
  std::vector<float> kt, v;
  int64_t n = 0, D = 0;
  void load(const Layout& in, int64_t head, int64_t keys, int64_t dim) {
    n = keys, D = dim;
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    kt.assign(blocks * BLOCK * D, 0.0f);
    v.assign(n * D, 0.0f);
    for (int64_t j = 0; j < n; j++) {
      const bf16* k = in.k + in.offset[j] + head * in.head_stride;
      const bf16* w = in.v + in.offset[j] + head * in.head_stride;
      for (int64_t d = 0; d < D; d++) kt[(j / BLOCK) * BLOCK * D + d * BLOCK + j % BLOCK] = widen(k[d]), v[j * D + d] = widen(w[d]);
    }
  }
  // s[j] = chain over d of x[d] * k[j][d] for one block of keys
  void scores(const float* x, int64_t block, float* s) const {
    const float* k = kt.data() + block * BLOCK * D;
    for (int j = 0; j < BLOCK; j++) s[j] = 0.0f;
    for (int64_t d = 0; d < D; d++)
      for (int j = 0; j < BLOCK; j++) s[j] = s[j] + x[d] * k[d * BLOCK + j];
  }
};

void widen_row(const bf16* x, float* y, int64_t D) { for (int64_t d = 0; d < D; d++) y[d] = widen(x[d]); }

void attend_row(const Staged& kv, const bf16* q, int64_t keys, float scale, bf16* out, float* lse, std::vector<float>& work) {
  int64_t D = kv.D;
  work.assign(2 * D, 0.0f);
  float *x = work.data(), *acc = x + D, s[BLOCK];
  widen_row(q, x, D);
  float m = -INFINITY, l = 0.0f;
  for (int64_t b = 0; b * BLOCK < keys; b++) {
    int live = int(std::min<int64_t>(BLOCK, keys - b * BLOCK));
    kv.scores(x, b, s);
    float top = m;
    for (int j = 0; j < BLOCK; j++) s[j] = s[j] * scale;
    for (int j = 0; j < live; j++) top = std::max(top, s[j]);
    for (int j = 0; j < BLOCK; j++) s[j] = exp2_f32(s[j] - top);
    float a = exp2_f32(m - top), sum = 0.0f;
    for (int j = 0; j < live; j++) sum = sum + s[j];
    l = l * a + sum;
    for (int64_t d = 0; d < D; d++) acc[d] = acc[d] * a;
    for (int j = 0; j < live; j++) {
      float p = widen(round_bf16(s[j]));
      const float* v = kv.v.data() + (b * BLOCK + j) * D;
      for (int64_t d = 0; d < D; d++) acc[d] = acc[d] + p * v[d];
    }
    m = top;
  }
  for (int64_t d = 0; d < D; d++) out[d] = round_bf16(acc[d] / l);
  if (lse) *lse = m + float(std::log2(double(l)));
}
}  // namespace

// q [T, H, D]; rows first[s]..first[s+1] belong to sequence s and see keys 0..position. lse [T, H] may be null.
extern "C" void rlk_attention(const bf16* q, const bf16* k, const bf16* v, const int64_t* offsets, const int64_t* key_first,
                              const int64_t* first, const int64_t* position, bf16* out, float* lse, float scale,
                              int64_t sequences, int64_t H, int64_t HK, int64_t D, int64_t head_stride) {
  Staged kv;
  std::vector<float> work;
  int64_t group = H / HK;
  for (int64_t s = 0; s < sequences; s++) {
    if (first[s] == first[s + 1]) continue;
    Layout in{k, v, offsets + key_first[s], head_stride};
    int64_t keys = 1 + *std::max_element(position + first[s], position + first[s + 1]);
    for (int64_t h = 0; h < HK; h++) {
      kv.load(in, h, keys, D);
      for (int64_t t = first[s]; t < first[s + 1]; t++)
        for (int64_t g = 0; g < group; g++) {
          int64_t row = t * H + h * group + g;
          attend_row(kv, q + row * D, position[t] + 1, scale, out + row * D, lse ? lse + row : nullptr, work);
        }
    }
  }
}

// One virtual slice of one sequence: dq of its query rows (chain over keys, ascending), and its leaves of dk and dv, [keys, HK, D] fp32,
// each a chain over (query head within the group, query row), ascending. dk still lacks the softmax scale.
extern "C" void rlk_attention_backward(const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const bf16* out, const float* lse,
                                       const int64_t* offsets, const int64_t* position, bf16* dq, float* dk, float* dv, float scale_log2,
                                       float scale, int64_t rows, int64_t keys, int64_t H, int64_t HK, int64_t D, int64_t head_stride) {
  Layout in{k, v, offsets, head_stride}, flipped{v, k, offsets, head_stride};
  Staged kv, vk;  // the second holds V where the first holds K, so that dP runs through the same chain
  std::vector<float> x(D), e(D), acc(D);
  int64_t group = H / HK;
  float s[BLOCK], dp[BLOCK];
  for (int64_t h = 0; h < HK; h++) {
    kv.load(in, h, keys, D);
    vk.load(flipped, h, keys, D);
    for (int64_t g = 0; g < group; g++)
      for (int64_t t = 0; t < rows; t++) {
        int64_t row = t * H + h * group + g, live_keys = position[t] + 1;
        widen_row(q + row * D, x.data(), D);
        widen_row(dout + row * D, e.data(), D);
        float delta = 0.0f;
        for (int64_t d = 0; d < D; d++) delta = delta + e[d] * widen(out[row * D + d]), acc[d] = 0.0f;
        for (int64_t b = 0; b * BLOCK < live_keys; b++) {
          int live = int(std::min<int64_t>(BLOCK, live_keys - b * BLOCK));
          kv.scores(x.data(), b, s);
          vk.scores(e.data(), b, dp);
          for (int j = 0; j < live; j++) {
            float p = exp2_f32(s[j] * scale_log2 - lse[row]);
            float ds = widen(round_bf16(p * (dp[j] - delta))), pb = widen(round_bf16(p));
            int64_t key = b * BLOCK + j;
            const float* kj = vk.v.data() + key * D;
            float *dkj = dk + (key * HK + h) * D, *dvj = dv + (key * HK + h) * D;
            for (int64_t d = 0; d < D; d++) {
              acc[d] = acc[d] + ds * kj[d];
              dkj[d] = dkj[d] + ds * x[d];
              dvj[d] = dvj[d] + pb * e[d];
            }
          }
        }
        for (int64_t d = 0; d < D; d++) dq[row * D + d] = round_bf16(acc[d] * scale);
      }
  }
}
