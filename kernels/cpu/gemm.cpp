// C[m,n] (+)= sum over k, ascending, of A(m,k) * B[k,n], in fp32: one accumulator chain per element.
//
// Vector lanes run across n only and tiles across m and n only, so no element's chain depends on M, N, its
// neighbours or the tile it falls in. Products of two bf16 are exact in fp32, so multiply-add equals FMA.
#include <algorithm>

#include "common.h"

namespace {
constexpr int LANES = 16;
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));

inline vec load_widened(const bf16* p) {
  hvec h;
  std::memcpy(&h, p, sizeof h);
  uvec u = __builtin_convertvector(h, uvec) << 16;
  vec f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

struct Problem {
  const bf16* a; int64_t a_m, a_k;
  const bf16* b; int64_t b_k;
  float* c; int64_t c_m;
  int64_t K;
  bool accumulate;
};

// A tile of MR rows by NV vectors. More independent chains hide the latency of the additions.
template <int MR, int NV>
void tile(const Problem& p, int64_t m, int64_t n) {
  vec acc[MR][NV];
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++) {
      if (p.accumulate) std::memcpy(&acc[i][j], p.c + (m + i) * p.c_m + n + j * LANES, sizeof(vec));
      else acc[i][j] = vec{};
    }
  for (int64_t k = 0; k < p.K; k++) {
    vec b[NV];
    for (int j = 0; j < NV; j++) b[j] = load_widened(p.b + k * p.b_k + n + j * LANES);
    for (int i = 0; i < MR; i++) {
      float a = widen(p.a[(m + i) * p.a_m + k * p.a_k]);
      for (int j = 0; j < NV; j++) acc[i][j] = acc[i][j] + a * b[j];
    }
  }
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++) std::memcpy(p.c + (m + i) * p.c_m + n + j * LANES, &acc[i][j], sizeof(vec));
}

// The columns that do not fill a vector: the same chain, one element at a time.
void scalar_columns(const Problem& p, int64_t M, int64_t n, int64_t N) {
  for (int64_t m = 0; m < M; m++)
    for (int64_t j = n; j < N; j++) {
      float acc = p.accumulate ? p.c[m * p.c_m + j] : 0.0f;
      for (int64_t k = 0; k < p.K; k++) acc = acc + widen(p.a[m * p.a_m + k * p.a_k]) * widen(p.b[k * p.b_k + j]);
      p.c[m * p.c_m + j] = acc;
    }
}

template <int NV>
void panel(const Problem& p, int64_t M, int64_t n) {
  int64_t m = 0;
  for (; m + 6 <= M; m += 6) tile<6, NV>(p, m, n);
  for (; m < M; m++) tile<1, NV>(p, m, n);
}

void product(const Problem& p, int64_t M, int64_t N) {
  int64_t n = 0;
  for (; n + 4 * LANES <= N; n += 4 * LANES) panel<4>(p, M, n);
  for (; n + LANES <= N; n += LANES) panel<1>(p, M, n);
  if (n < N) scalar_columns(p, M, n, N);
}
}  // namespace

extern "C" void rlk_gemm(const bf16* a, int64_t a_m, int64_t a_k, const bf16* b, int64_t b_k, float* c, int64_t c_m,
                         int64_t M, int64_t N, int64_t K, int64_t accumulate) {
  product({a, a_m, a_k, b, b_k, c, c_m, K, accumulate != 0}, M, N);
}

// One product a range of k, each from zero: c[i] = sum over k in [range[2i], range[2i + 1]) of A(m,k) * B[k,n].
extern "C" void rlk_gemm_ranges(const bf16* a, int64_t a_m, int64_t a_k, const bf16* b, int64_t b_k, float* c,
                                const int64_t* range, int64_t count, int64_t M, int64_t N) {
  for (int64_t i = 0; i < count; i++, range += 2, c += M * N)
    product({a + range[0] * a_k, a_m, a_k, b + range[0] * b_k, b_k, c, N, range[1] - range[0], false}, M, N);
}

extern "C" void rlk_round_bf16(const float* x, bf16* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = round_bf16(x[i]);
}
