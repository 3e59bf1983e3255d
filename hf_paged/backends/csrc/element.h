// Float, bfloat16 and half in memory, fp32 in registers.
//
// A *strip* is 2 * W consecutive elements in two vectors. Which element sits in which lane is the
// dtype's own business ("strip order"): bfloat16 takes the even elements first, because one shift
// and one mask then convert a whole register. Everything that is loaded as strips and stored as
// strips comes out in order, and a dot product does not care.
#pragma once

#include "simd.h"

namespace hfp {

constexpr int STRIP = 2 * W;

struct Strip {
  vf a, b;
};

struct bfloat16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

HFP_INLINE Strip load_strip(const float* p) { return {load(p), load(p + W)}; }

HFP_INLINE Strip split_bfloat16(vu x) { return {(vf)(x << 16), (vf)(x & 0xffff0000u)}; }

HFP_INLINE Strip load_strip(const bfloat16* p) {
  vu x;
  std::memcpy(&x, p, sizeof x);
  return split_bfloat16(x);
}

typedef uint16_t vh __attribute__((vector_size(2 * W)));

HFP_INLINE vf half_to_float(vh x) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)x);
#else
  const vu bits = __builtin_convertvector(x, vu);
  // The exponent moves from bias 15 to bias 127 by a multiplication, right for subnormals as well.
  const vf size = (vf)((bits & 0x7fffu) << 13) * 0x1p112f;
  const vu infinite = (vu)(size >= broadcast(65536.0f)) & 0x7f800000u;
  return (vf)((vu)size | infinite | ((bits & 0x8000u) << 16));
#endif
}

HFP_INLINE Strip load_strip(const half* p) {
  vh x, y;
  std::memcpy(&x, p, sizeof x);
  std::memcpy(&y, p + W, sizeof y);
  return {half_to_float(x), half_to_float(y)};
}

// AddressSanitizer does not look at masked loads.
#if defined(__AVX512BW__) && !defined(__SANITIZE_ADDRESS__)
#define HFP_MASKED_LOADS 1
#else
#define HFP_MASKED_LOADS 0
#endif

// Copies the first n of a strip (0 < n < STRIP), zeros after them; reads nothing behind them.
template <class T>
HFP_INLINE void copy_part(const T* p, int64_t n, T* strip) {
#if HFP_MASKED_LOADS
  if constexpr (sizeof(T) == 2) {
    _mm512_store_si512(strip, _mm512_maskz_loadu_epi16((uint32_t{1} << n) - 1, p));
    return;
  }
#endif
  std::memset(strip, 0, STRIP * sizeof(T));
  // A copy of known size is one instruction, and head dims are multiples of 8 nearly always.
  if (n == 8 && STRIP > 8)
    std::memcpy(strip, p, (STRIP > 8 ? 8 : 1) * sizeof(T));
  else
    std::memcpy(strip, p, n * sizeof(T));
}

// A strip of which only the first n are there.
template <class T>
HFP_INLINE Strip load_strip(const T* p, int64_t n) {
#if HFP_MASKED_LOADS
  if constexpr (sizeof(T) == 4) {
    const uint32_t mask = (uint32_t{1} << n) - 1;
    return {(vf)_mm512_maskz_loadu_ps((__mmask16)mask, p),
            (vf)_mm512_maskz_loadu_ps((__mmask16)(mask >> W), p + W)};
  }
#endif
  alignas(64) T strip[STRIP];
  copy_part(p, n, strip);
  return load_strip(strip);
}

HFP_INLINE void store_strip(float* p, Strip x) {
  store(p, x.a);
  store(p + W, x.b);
}

// Round to nearest even; NaN stays NaN.
HFP_INLINE vu round_to_bfloat16(vf x) {
  const vu bits = (vu)x;
  const vu rounded = bits + (((bits >> 16) & 1u) + 0x7fffu);
  const vi is_nan = x != x;
  return (rounded & ~(vu)is_nan) | (0x7fc00000u & (vu)is_nan);
}

HFP_INLINE void store_strip(bfloat16* p, Strip x) {
  const vu packed = (round_to_bfloat16(x.a) >> 16) | (round_to_bfloat16(x.b) & 0xffff0000u);
  std::memcpy(p, &packed, sizeof packed);
}

HFP_INLINE vh float_to_half(vf x) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__) && defined(__F16C__)
  return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vu bits = (vu)x, sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  // Normal: rebias the exponent, round to even. Subnormal: let the FPU align and round by adding
  // 0.5, whose last bit is worth the smallest half.
  const vu normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  const vu subnormal = (vu)((vf)size + 0.5f) - 0x3f000000u;
  const vu small = (vu)(size < 0x38800000u), large = (vu)(size >= 0x47800000u);
  const vu nan = (vu)(size > 0x7f800000u);
  vu half = (subnormal & small) | (normal & ~small);
  half = (half & ~large) | (0x7c00u & large);
  half = (half & ~nan) | (0x7e00u & nan);
  return __builtin_convertvector(half | sign, vh);
#endif
}

HFP_INLINE void store_strip(half* p, Strip x) {
  const vh a = float_to_half(x.a), b = float_to_half(x.b);
  std::memcpy(p, &a, sizeof a);
  std::memcpy(p + W, &b, sizeof b);
}

// Stores the first n of a strip; writes nothing behind them.
template <class T>
HFP_INLINE void store_strip(T* p, Strip x, int64_t n) {
  if (n >= STRIP) return store_strip(p, x);
  alignas(64) T buffer[STRIP];
  store_strip(buffer, x);
  std::memcpy(p, buffer, n * sizeof(T));
}

// Elements of a row of n in whole strips.
HFP_INLINE int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Converts a row of n elements to fp32 in strip order, zeros up to the last strip's end.
template <class T>
HFP_INLINE void load_row(const T* p, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + STRIP <= n; i += STRIP) store_strip(out + i, load_strip(p + i));
  if (i < n) store_strip(out + i, load_strip(p + i, n - i));
}

// The inverse, with a factor.
template <class T>
HFP_INLINE void store_row(const float* row, float factor, int64_t n, T* p) {
  for (int64_t i = 0; i < n; i += STRIP) {
    const Strip x = load_strip(row + i);
    store_strip(p + i, {x.a * factor, x.b * factor}, n - i);
  }
}

}  // namespace hfp
