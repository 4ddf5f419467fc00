// Norms, rotary embedding, SwiGLU and residual additions, forward and backward: fp32 arithmetic, one rounding an op.
#include "common.h"

namespace {
constexpr int LANES = 16;

// Declared order of a row reduction: element i joins lane i mod 16, ascending; then a tree over the lanes.
struct LaneSum {
  float lane[LANES] = {};
  void add(int64_t i, float x) { lane[i % LANES] = lane[i % LANES] + x; }
  float total() const {
    float t[LANES];
    for (int i = 0; i < LANES; i++) t[i] = lane[i];
    for (int w = 1; w < LANES; w *= 2)
      for (int i = 0; i < LANES; i += 2 * w) t[i] = t[i] + t[i + w];
    return t[0];
  }
};

inline float sigmoid(float g) { return 1.0f / (1.0f + exp_f32(-g)); }
}  // namespace

// y = (x * rstd) * w; rstd = 1 / sqrt(mean(x^2) + eps) is kept for the backward pass.
extern "C" void rlk_rmsnorm(const bf16* x, const bf16* w, bf16* y, float* rstd, float eps, int64_t R, int64_t N) {
  for (int64_t r = 0; r < R; r++, x += N, y += N) {
    LaneSum s;
    for (int64_t i = 0; i < N; i++) s.add(i, widen(x[i]) * widen(x[i]));
    float inv = 1.0f / std::sqrt(s.total() / float(N) + eps);
    rstd[r] = inv;
    for (int64_t i = 0; i < N; i++) y[i] = round_bf16((widen(x[i]) * inv) * widen(w[i]));
  }
}

// dx = rstd * (g - xhat * mean(g * xhat)), g = dy * w, xhat = x * rstd. A residual gradient, where given, is joined
// before the one rounding.
extern "C" void rlk_rmsnorm_backward(const bf16* dy, const bf16* x, const bf16* w, const float* rstd, const bf16* residual,
                                     bf16* dx, int64_t R, int64_t N) {
  for (int64_t r = 0; r < R; r++, dy += N, x += N, dx += N) {
    LaneSum s;
    for (int64_t i = 0; i < N; i++) s.add(i, (widen(dy[i]) * widen(w[i])) * (widen(x[i]) * rstd[r]));
    float mean = s.total() / float(N);
    for (int64_t i = 0; i < N; i++) {
      float g = widen(dy[i]) * widen(w[i]);
      float d = rstd[r] * (g - (widen(x[i]) * rstd[r]) * mean);
      if (residual) d = widen(residual[r * N + i]) + d;
      dx[i] = round_bf16(d);
    }
  }
}

// One leaf of a norm gain's gradient: a chain over the rows, in order.
// Continues the chain of one row after the other.
static void gain_rows(const bf16* dy, const bf16* x, const float* rstd, float* out, int64_t R, int64_t N) {
  for (int64_t r = 0; r < R; r++, dy += N, x += N)
    for (int64_t i = 0; i < N; i++) out[i] = out[i] + widen(dy[i]) * (widen(x[i]) * rstd[r]);
}

extern "C" void rlk_rmsnorm_gain(const bf16* dy, const bf16* x, const float* rstd, float* out, int64_t R, int64_t N) {
  for (int64_t i = 0; i < N; i++) out[i] = 0.0f;
  gain_rows(dy, x, rstd, out, R, N);
}

// One leaf a range of tokens and group: dy and x [tokens, groups, heads, N], out [ranges, groups, N].
extern "C" void rlk_rmsnorm_gains(const bf16* dy, const bf16* x, const float* rstd, float* out, const int64_t* range,
                                  int64_t count, int64_t groups, int64_t heads, int64_t N) {
  for (int64_t i = 0; i < count * groups * N; i++) out[i] = 0.0f;
  for (int64_t i = 0; i < count; i++, range += 2)
    for (int64_t g = 0; g < groups; g++, out += N)
      for (int64_t t = range[0]; t < range[1]; t++) {
        const int64_t row = (t * groups + g) * heads;
        gain_rows(dy + row * N, x + row * N, rstd + row, out, heads, N);
      }
}

extern "C" void rlk_add(const bf16* a, const bf16* b, bf16* out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = round_bf16(widen(a[i]) + widen(b[i]));
}

// Rotates the halves of each head by the angle of its position; sign = -1 is the transpose, for the backward pass.
extern "C" void rlk_rope(const bf16* x, const float* cos, const float* sin, const int64_t* position, bf16* y, float sign,
                         int64_t T, int64_t H, int64_t D) {
  int64_t half = D / 2;
  for (int64_t t = 0; t < T; t++) {
    const float* c = cos + position[t] * half;
    const float* s = sin + position[t] * half;
    for (int64_t h = 0; h < H; h++, x += D, y += D)
      for (int64_t i = 0; i < half; i++) {
        float a = widen(x[i]), b = widen(x[half + i]), si = sign * s[i];
        y[i] = round_bf16(a * c[i] - b * si);
        y[half + i] = round_bf16(b * c[i] + a * si);
      }
  }
}

// silu(gate) * up. gate and up are columns of one matrix whose row is [gate | up] for each virtual shard.
extern "C" void rlk_swiglu(const bf16* gate_up, bf16* y, int64_t groups, int64_t F) {
  for (int64_t r = 0; r < groups; r++, gate_up += 2 * F, y += F)
    for (int64_t i = 0; i < F; i++) {
      float g = widen(gate_up[i]);
      y[i] = round_bf16((g * sigmoid(g)) * widen(gate_up[F + i]));
    }
}

extern "C" void rlk_swiglu_backward(const bf16* dy, const bf16* gate_up, bf16* d, int64_t groups, int64_t F) {
  for (int64_t r = 0; r < groups; r++, gate_up += 2 * F, d += 2 * F, dy += F)
    for (int64_t i = 0; i < F; i++) {
      float g = widen(gate_up[i]), u = widen(gate_up[F + i]), s = sigmoid(g), e = widen(dy[i]);
      d[i] = round_bf16((e * u) * (s + (g * s) * (1.0f - s)));
      d[F + i] = round_bf16(e * (g * s));
    }
}

// One leaf of an embedding's gradient: rows of dx are added to the rows of their tokens, in token order.
extern "C" void rlk_embedding_leaf(const bf16* dx, const int64_t* row, float* out, int64_t T, int64_t N, int64_t rows) {
  for (int64_t t = 0; t < T; t++) {
    if (row[t] < 0 || row[t] >= rows) continue;
    float* o = out + row[t] * N;
    for (int64_t i = 0; i < N; i++) o[i] = o[i] + widen(dx[t * N + i]);
  }
}
