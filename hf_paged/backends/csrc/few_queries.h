// Attention of a few query rows over a tile: decoding, and the verification of drafts.
//
// Memory-bound: each K and V element is loaded and converted once for (up to four) query rows,
// while the rows that come next are prefetched, a strip for each strip. Physical blocks are in no
// order that a hardware prefetcher could follow.
//
// A query row is one head of one new token; the M rows that share a K head are computed together.
#pragma once

#include <cmath>

#include "element.h"
#include "tile.h"

namespace hfp {

// Rows that will be read next, to be prefetched beside those that are read now.
template <class T>
struct Upcoming {
  const T* const* rows;  // null: nothing
  int64_t offset;

  HFP_INLINE const T* row(int64_t token) const { return rows ? rows[token] + offset : nullptr; }
};

template <class T>
HFP_INLINE void prefetch_strip(const T* p) {
#pragma GCC unroll 2
  for (size_t byte = 0; byte < STRIP * sizeof(T); byte += 64)
    prefetch(reinterpret_cast<const char*>(p) + byte);
}

// sums[m][j] = query[m] * keys[j], lane by lane, for M query rows and TOKENS tokens.
template <class T, int M, int TOKENS>
HFP_INLINE void multiply_rows(const T* const* keys, int64_t offset, int64_t head_dim,
                              const float* query, int64_t query_stride, vf (&sums)[M][W],
                              int first, Upcoming<T> upcoming, int64_t token) {
  const T *key[TOKENS], *next[TOKENS];
#pragma GCC unroll 2
  for (int j = 0; j < TOKENS; j++) {
    key[j] = keys[j] + offset;
    next[j] = upcoming.row(token + j);
  }
  vf sum[M][TOKENS] = {};
  const auto add = [&](const float* q, const Strip* x) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const vf a = in_register(load(q + m * query_stride));
      const vf b = in_register(load(q + m * query_stride + W));
#pragma GCC unroll 2
      for (int j = 0; j < TOKENS; j++) sum[m][j] += a * x[j].a;
#pragma GCC unroll 2
      for (int j = 0; j < TOKENS; j++) sum[m][j] += b * x[j].b;
    }
  };
  Strip x[TOKENS];
  int64_t d = 0;
  for (; d + STRIP <= head_dim; d += STRIP) {
#pragma GCC unroll 2
    for (int j = 0; j < TOKENS; j++) {
      if (upcoming.rows) prefetch_strip(next[j] + d);
      x[j] = load_strip(key[j] + d);
    }
    add(query + d, x);
  }
  if (d < head_dim) {
    for (int j = 0; j < TOKENS; j++) x[j] = load_strip(key[j] + d, head_dim - d);
    add(query + d, x);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int j = 0; j < TOKENS; j++) sums[m][first + j] = sum[m][j];
}

// scores[m][t] = dot(query[m], keys[t]) for M query rows.
template <class T, int M>
inline void dot_rows(const T* const* keys, int64_t offset, int64_t size, int64_t head_dim,
                     const float* query, int64_t query_stride, float* scores, int64_t score_stride,
                     Upcoming<T> upcoming) {
  for (int64_t t = 0; t < size; t += W) {
    vf sums[M][W];
    const int count = static_cast<int>(std::min<int64_t>(W, size - t));
    int j = 0;
    for (; j + 2 <= count; j += 2)
      multiply_rows<T, M, 2>(keys + t + j, offset, head_dim, query, query_stride, sums, j, upcoming,
                             t + j);
    for (; j < count; j++)
      multiply_rows<T, M, 1>(keys + t + j, offset, head_dim, query, query_stride, sums, j, upcoming,
                             t + j);
    for (; j < W; j++)
      for (int m = 0; m < M; m++) sums[m][j] = vf{};
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) store(scores + m * score_stride + t, sum_each(sums[m]));
  }
}

// out[m] = out[m] * decay[m] + sum over t of weights[m][t] * values[t], for S strips of M rows.
// The tile is summed by itself first: short sums of short sums lose fewer bits than one long one.
template <class T, int M, int S, bool WHOLE>
HFP_INLINE void add_strips(const T* const* values, int64_t offset, int64_t size, int64_t rest,
                           const float* weights, int64_t weight_stride, const float* decay,
                           float* out, int64_t out_stride, Upcoming<T> upcoming) {
  vf sum[M][S][2] = {};
  for (int64_t t = 0; t < size; t++) {
    const T* value = values[t] + offset;
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) {
      if (upcoming.rows) prefetch_strip(upcoming.row(t) + s * STRIP);
      const Strip x = WHOLE ? load_strip(value + s * STRIP) : load_strip(value, rest);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const vf weight = broadcast(weights[m * weight_stride + t]);
        sum[m][s][0] += weight * x.a;
        sum[m][s][1] += weight * x.b;
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) {
      float* p = out + m * out_stride + s * STRIP;
      store(p, load(p) * decay[m] + sum[m][s][0]);
      store(p + W, load(p + W) * decay[m] + sum[m][s][1]);
    }
}

// The same for whole rows of `dim` elements. Enough strips at once to hide the latency of an FMA,
// no more than fit in 16 registers.
template <class T, int M>
inline void add_rows(const T* const* values, int64_t offset, int64_t size, int64_t dim,
                     const float* weights, int64_t weight_stride, const float* decay, float* out,
                     int64_t out_stride, Upcoming<T> upcoming) {
  constexpr int S = M == 1 ? 4 : M == 2 ? 2 : 1;
  int64_t d = 0;
  const auto at = [&](int64_t element) {
    return Upcoming<T>{upcoming.rows, upcoming.offset + element};
  };
  for (; d + S * STRIP <= dim; d += S * STRIP)
    add_strips<T, M, S, true>(values, offset + d, size, 0, weights, weight_stride, decay, out + d,
                              out_stride, at(d));
  for (; d + STRIP <= dim; d += STRIP)
    add_strips<T, M, 1, true>(values, offset + d, size, 0, weights, weight_stride, decay, out + d,
                              out_stride, at(d));
  if (d < dim)
    add_strips<T, M, 1, false>(values, offset + d, size, dim - d, weights, weight_stride, decay,
                               out + d, out_stride, Upcoming<T>{nullptr, 0});
}

// Calls f(constant M, first row) for blocks of up to four rows.
template <class F>
HFP_INLINE void for_row_blocks(int64_t num_rows, F f) {
  int64_t m = 0;
  for (; m + 4 <= num_rows; m += 4) f(std::integral_constant<int, 4>{}, m);
  switch (num_rows - m) {
    case 3:
      return f(std::integral_constant<int, 3>{}, m);
    case 2:
      return f(std::integral_constant<int, 2>{}, m);
    case 1:
      return f(std::integral_constant<int, 1>{}, m);
  }
}

// Turns scores[0 .. size) of one query row into weights, and returns the decay of earlier sums.
//
// `low` and `high` bound the tokens of the tile that the query sees. `bias` is the ALiBi slope,
// `distance` the tile's first token less the query's position.
inline float softmax_row(float* scores, int64_t size, int64_t low, int64_t high, float softcap,
                         float slope, int64_t distance, float& row_max, float& row_sum) {
  const int64_t padded = round_up(size, W);
  if (softcap != 0)
    for (int64_t t = 0; t < padded; t += W)
      store(scores + t, tanh(load(scores + t) * (1.0f / softcap)) * softcap);
  if (slope != 0)
    for (int64_t t = 0; t < size; t++) scores[t] += slope * static_cast<float>(distance + t);
  for (int64_t t = 0; t < std::min(low, size); t++) scores[t] = -INFINITY;
  for (int64_t t = std::clamp<int64_t>(high, 0, size); t < padded; t++) scores[t] = -INFINITY;
  vf top = load(scores);
  for (int64_t t = W; t < padded; t += W) top = max(top, load(scores + t));
  const float new_max = std::max(row_max, max_lane(top));
  const float shift = new_max == -INFINITY ? 0.0f : new_max;  // nothing seen yet: weights are 0
  const float decay = row_max == new_max ? 1.0f : exp(row_max - shift);
  vf sum = {};
  for (int64_t t = 0; t < padded; t += W) {
    const vf weight = exp(load(scores + t) - shift);
    sum += weight;
    store(scores + t, weight);
  }
  row_max = new_max;
  row_sum = row_sum * decay + sum_lanes(sum);
  return decay;
}

}  // namespace hfp
