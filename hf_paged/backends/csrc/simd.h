// Vectors of W floats, W = 4, 8 or 16 by what the compiler may use.
//
// GCC's and clang's vector extensions give one source for SSE2, AVX2, AVX-512 and NEON; intrinsics
// stand only where a compiler would not find the instruction by itself.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#define HFP_INLINE inline __attribute__((always_inline))

namespace hfp {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));

HFP_INLINE vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
HFP_INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }
HFP_INLINE void store(uint32_t* p, vu x) { std::memcpy(p, &x, sizeof x); }
// x - 0 is x for every x, so this folds to a broadcast (0 + x would turn -0 into +0).
HFP_INLINE vf broadcast(float x) { return x - vf{}; }
HFP_INLINE vi broadcast(int32_t x) { return x - vi{}; }
HFP_INLINE vi load(const int32_t* p) {
  vi x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

HFP_INLINE vf select(vi mask, vf yes, vf no) {
  return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

HFP_INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
  return select(a > b, a, b);
#endif
}

// Lane i of the result is lane `index[i]` of a and b end to end.
template <int... Index>
HFP_INLINE vf shuffle(vf a, vf b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index...);
#else
  return __builtin_shuffle(a, b, vi{Index...});
#endif
}

namespace detail {
template <int S, int... I>
HFP_INLINE vf blend(vf a, vf b, std::integer_sequence<int, I...>) {
  return shuffle<((I & S) ? I + W : I)...>(a, b);
}
template <int S, int... I>
HFP_INLINE vf swap(vf a, std::integer_sequence<int, I...>) {
  return shuffle<(I ^ S)...>(a, a);
}
using Lanes = std::make_integer_sequence<int, W>;
}  // namespace detail

// Lanes whose index has bit S come from b, the others from a.
template <int S>
HFP_INLINE vf blend(vf a, vf b) {
  return detail::blend<S>(a, b, detail::Lanes{});
}
// Lane i becomes lane i ^ S.
template <int S>
HFP_INLINE vf swap(vf a) {
  return detail::swap<S>(a, detail::Lanes{});
}

// Lane i of the result is the sum of x[i]: a transpose folded into the additions.
template <int S = 1>
HFP_INLINE vf sum_each(vf* x) {
  if constexpr (S == W) {
    return x[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < W / S / 2; i++) {
      const vf a = x[2 * i], b = x[2 * i + 1];
      x[i] = blend<S>(a, b) + swap<S>(blend<S>(b, a));
    }
    return sum_each<2 * S>(x);
  }
}

namespace detail {
template <int S, int... I>
HFP_INLINE void exchange(vf& a, vf& b, std::integer_sequence<int, I...>) {
  const vf first = shuffle<((I & S) ? (I ^ S) + W : I)...>(a, b);
  b = shuffle<((I & S) ? I + W : (I ^ S))...>(a, b);
  a = first;
}
}  // namespace detail

// Lane j of x[i] becomes lane i of x[j].
template <int S = 1>
HFP_INLINE void transpose(vf* x) {
  if constexpr (S < W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
      if (!(i & S)) detail::exchange<S>(x[i], x[i | S], detail::Lanes{});
    transpose<2 * S>(x);
  }
}

template <int S = W / 2>
HFP_INLINE float max_lane(vf x) {
  if constexpr (S == 0)
    return x[0];
  else
    return max_lane<S / 2>(max(x, swap<S>(x)));
}
template <int S = W / 2>
HFP_INLINE float sum_lanes(vf x) {
  if constexpr (S == 0)
    return x[0];
  else
    return sum_lanes<S / 2>(x + swap<S>(x));
}

// exp(x) for x <= 0 (and a little above), 0 below -87, NaN of NaN; 2 ulp. After Cephes' expf.
HFP_INLINE vf exp(vf x) {
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const vf shifted = x * 1.44269504f + round;
  const vf n = shifted - round;
  const vf f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + (f + 1.0f);
  const vf y = (vf)((vu)p + ((vu)shifted << 23));
  return (vf)((vi)y & ~(x <= broadcast(-87.0f)));
}
HFP_INLINE float exp(float x) { return exp(broadcast(x))[0]; }

// After Cephes' tanhf: a polynomial near 0, where 1 - 2 / (exp(2 x) + 1) would cancel.
HFP_INLINE vf tanh(vf x) {
  const vi sign = (vi)x & INT32_MIN;
  const vf size = (vf)((vi)x & INT32_MAX);
  const vf z = x * x;
  vf p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const vf near = p * z * x + x;
  const vf e = exp(size * -2.0f);
  const vf far = (1.0f - e) / (1.0f + e);
  return select(size < broadcast(0.625f), near, (vf)((vi)far | sign));
}

// Hides from the compiler where x came from: it is loaded once, instead of by each instruction that
// may take it from memory, and a product is rounded, instead of fused with what follows.
HFP_INLINE vf in_register(vf x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

HFP_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace hfp
