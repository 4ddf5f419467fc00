// Scalars and the two transcendental functions that every CPU kernel shares.
//
// Built with -ffp-contract=off and without -ffast-math: every operation below is one IEEE operation in the order
// written, so a result can depend neither on the vector width nor on where an element lies in memory.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;

static inline float bits_to_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
static inline float widen(bf16 x) { return bits_to_float(uint32_t(x) << 16); }

// Round to nearest even. A zero comes out positive, also one that a tiny negative rounds to: its sign could depend on
// the instruction used.
static inline bf16 round_bf16(float x) {
  uint32_t u = float_to_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16((u >> 16) | 0x40u);  // a NaN stays a NaN
  uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return bf16((r & 0x7fffu) ? r : 0u);
}

// exp(r) for |r| <= ln2/2: Taylor series of degree 11 in double, remainder below 1e-14.
static inline double exp_reduced(double r) {
  double p = 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  return p * r + 1.0;
}

static inline double scale_by_power(double x, double n) {
  int64_t e = int64_t(n) + 1023;
  uint64_t u = uint64_t(e) << 52;
  double s;
  std::memcpy(&s, &u, 8);
  return x * s;
}

// Adding and subtracting 1.5 * 2^52 rounds to the nearest integer without a library call, so loops vectorize.
static inline double nearest(double x) { return (x + 6755399441055744.0) - 6755399441055744.0; }

// e^x in fp32, half an ulp and a little: computed in double, rounded once. -inf gives 0, large x gives inf.
static inline float exp_f32(float x) {
  double d = x < -110.0f ? -110.0 : (x > 90.0f ? 90.0 : double(x));
  double n = nearest(d * 1.4426950408889634);
  double r = (d - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  return float(scale_by_power(exp_reduced(r), n));
}

// 2^x in fp32 for x <= 0 (attention scores below their maximum), likewise.
static inline float exp2_f32(float x) {
  double d = x < -160.0f ? -160.0 : (x > 128.0f ? 128.0 : double(x));
  double n = nearest(d);
  return float(scale_by_power(exp_reduced((d - n) * 0.693147180559945309417), n));
}
