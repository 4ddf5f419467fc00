// Log-probability, support, sampling and the gradient of the log-probability, over exact integer masses.
//
// w_i = int64(exp((x_i - max) / T) * 2^40). Sums of w are int64, hence exact and associative: no order exists that could differ.
#include <algorithm>
#include <numeric>
#include <vector>

#include "common.h"

namespace {
constexpr double SCALE = 1099511627776.0;  // 2^40

struct Setting { float temperature; int64_t top_k; double top_p; };

// One row's masses; `keep` is empty when nothing is truncated. Scratch space is reused between rows.
struct Row {
  std::vector<float> d;
  std::vector<int64_t> w;
  std::vector<uint8_t> keep;
  std::vector<int32_t> order;
  int64_t kept_mass = 0;
  bool finite = true;

  void load(const bf16* x, int64_t V, const Setting& s) {
    d.resize(V), w.resize(V);
    float top = -INFINITY;
    finite = true;
    for (int64_t i = 0; i < V; i++) {
      d[i] = widen(x[i]) + 0.0f;
      finite = finite && std::isfinite(d[i]);
      top = std::max(top, d[i]);
    }
    if (!finite) return;
    for (int64_t i = 0; i < V; i++) {
      d[i] = (d[i] - top) / s.temperature;
      w[i] = int64_t(double(exp_f32(d[i])) * SCALE);
    }
    keep.clear();
    if (s.top_k < V || s.top_p < 1.0) truncate(x, V, s);
    kept_mass = 0;
    for (int64_t i = 0; i < V; i++) kept_mass += kept(i) ? w[i] : 0;
  }

  // Rank order: logit descending, then id ascending. Exactly k tokens; then those whose preceding mass is below the threshold.
  void truncate(const bf16* x, int64_t V, const Setting& s) {
    order.resize(V);
    std::iota(order.begin(), order.end(), 0);
    auto before = [x](int32_t a, int32_t b) {
      float xa = widen(x[a]) + 0.0f, xb = widen(x[b]) + 0.0f;
      return xa > xb || (xa == xb && a < b);
    };
    int64_t k = std::min(s.top_k, V);
    std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
    int64_t mass = 0, preceding = 0;
    for (int64_t r = 0; r < k; r++) mass += w[order[r]];
    int64_t threshold = int64_t(s.top_p * double(mass));
    keep.assign(V, 0);
    for (int64_t r = 0; r < k; r++) {
      if (r > 0 && s.top_p < 1.0 && preceding >= threshold) break;
      keep[order[r]] = 1;
      preceding += w[order[r]];
    }
  }

  bool kept(int64_t i) const { return keep.empty() || keep[i]; }

  float logprob(int64_t token) const {
    return float((double(d[token]) - std::log(double(kept_mass) / SCALE)) + 0.0);
  }
};

// Philox4x32-10 (Salmon et al., SC 2011): the first two words of one counter's output.
uint64_t philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1), c3 = uint32_t(p0), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return (uint64_t(c0) << 32) | c1;
}

int64_t draw(const Row& row, int64_t V, uint64_t bits) {
  int64_t u = int64_t((unsigned __int128)(bits) * uint64_t(row.kept_mass) >> 64), prefix = 0;
  for (int64_t i = 0; i < V; i++) {
    if (row.kept(i)) prefix += row.w[i];
    if (prefix > u) return i;
  }
  return -1;
}

int64_t lowest_maximum(const Row& row, int64_t V) {
  for (int64_t i = 0; i < V; i++)
    if (row.d[i] == 0.0f) return i;
  return -1;
}
}  // namespace

// Every entry returns the first row that holds a non-finite logit, or -1.
extern "C" int64_t rlk_sample(const bf16* logits, int64_t R, int64_t V, const float* temperature, const int64_t* top_k, const double* top_p,
                              const uint8_t* greedy, const int64_t* seed, const int64_t* sample_id, const int64_t* position, int64_t* token,
                              float* logprob) {
  Row row;
  for (int64_t r = 0; r < R; r++) {
    row.load(logits + r * V, V, {temperature[r], top_k[r], top_p[r]});
    if (!row.finite) return r;
    uint64_t id = uint64_t(sample_id[r]);
    token[r] = greedy[r] ? lowest_maximum(row, V)
                         : draw(row, V, philox(uint64_t(seed[r]), uint32_t(position[r]), uint32_t(id), uint32_t(id >> 32), 0));
    logprob[r] = row.logprob(token[r]);
  }
  return -1;
}

extern "C" int64_t rlk_score(const bf16* logits, int64_t R, int64_t V, const float* temperature, const int64_t* top_k, const double* top_p,
                             const int64_t* token, float* logprob, uint8_t* inside, int64_t* kept_mass) {
  Row row;
  for (int64_t r = 0; r < R; r++) {
    row.load(logits + r * V, V, {temperature[r], top_k[r], top_p[r]});
    if (!row.finite) return r;
    logprob[r] = row.logprob(token[r]);
    inside[r] = row.kept(token[r]);
    kept_mass[r] = row.kept_mass;
  }
  return -1;
}

// d(coefficient * logprob[token]) / d logit_i = coefficient * ([i = token] - w_i / Z) / T over the support, 0 outside. bf16.
extern "C" int64_t rlk_score_backward(const bf16* logits, int64_t R, int64_t V, const float* temperature, const int64_t* top_k,
                                      const double* top_p, const int64_t* token, const float* coefficient, bf16* grad) {
  Row row;
  for (int64_t r = 0; r < R; r++) {
    row.load(logits + r * V, V, {temperature[r], top_k[r], top_p[r]});
    if (!row.finite) return r;
    for (int64_t i = 0; i < V; i++) {
      float share = row.kept(i) ? float(double(row.w[i]) / double(row.kept_mass)) : 0.0f;
      float g = i == token[r] ? 1.0f - share : 0.0f - share;
      grad[r * V + i] = round_bf16((coefficient[r] * g) / temperature[r]);
    }
  }
  return -1;
}
