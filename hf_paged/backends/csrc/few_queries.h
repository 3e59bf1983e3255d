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
#include "state.h"
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

// Tokens a tile: K and V of one head take half of a first-level cache of 32 KB.
template <class T>
inline int64_t few_tile(const hfp_attention& args) {
  const int64_t bytes = (args.head_dim + args.value_dim) * sizeof(T);
  return std::clamp<int64_t>(16384 / bytes / 16 * 16, 16, MAX_TILE);
}

inline int64_t few_scratch(const Plan& plan, const hfp_attention& args, const Task& task) {
  const int64_t rows = padded_rows(plan, task);
  return rows * round_up(args.head_dim, STRIP) + rows * MAX_TILE + round_up(MAX_FEW, W) +
         plan.state_size(task);
}

template <class T>
void attend_few(const hfp_attention& args, const Plan& plan, const Row& row, const Task& task,
                float* scratch, State state) {
  const int64_t group = plan.group_size(), rows_per_head = task.num_queries() * group;
  const int64_t num_rows = padded_rows(plan, task);
  const int64_t query_stride = round_up(args.head_dim, STRIP), out_stride = plan.value_stride();
  float* query = scratch;
  float* scores = query + num_rows * query_stride;
  float* decay = scores + num_rows * MAX_TILE;

  for (int64_t head = 0; head < task.num_heads(); head++)
    for (int64_t m = 0; m < rows_per_head; m++) {
      const T* source =
          static_cast<const T*>(args.query.data) +
          (row.first_query + task.query_begin + m / group) * args.query.token_stride +
          ((task.head_begin + head) * group + m % group) * args.query.head_stride;
      float* target = query + (head * rows_per_head + m) * query_stride;
      load_row(source, args.head_dim, target);
      for (int64_t d = 0; d < query_stride; d += W) store(target + d, load(target + d) * args.scale);
    }
  state.clear_out();
  state.clear_softmax();

  const int64_t limit = few_tile<T>(args);
  Tile<T> tiles[2];
  Tile<T>*tile = &tiles[0], *next = &tiles[1];
  tile->resolve(args, row, task.token_begin, task.token_end, limit);
  for (bool more = true; more; std::swap(tile, next)) {
    more = tile->end() < task.token_end;
    if (more) {
      next->resolve(args, row, tile->end(), task.token_end, limit);
      // A prefetch needs an address.
      for (int64_t t = next->size; t < tile->size; t++) next->keys[t] = next->keys[0];
    }
    for (int64_t head = 0; head < task.num_heads(); head++) {
      const int64_t kv_head = task.head_begin + head;
      const int64_t key_offset = kv_head * tile->key_head_stride;
      const int64_t value_offset = kv_head * tile->value_head_stride;
      // While scores are computed the tile's values come in, while those are summed the next keys.
      const Upcoming<T> values{tile->values, value_offset};
      Upcoming<T> next_keys{nullptr, 0};
      if (head + 1 < task.num_heads())
        next_keys = {tile->keys, key_offset + tile->key_head_stride};
      else if (more)
        next_keys = {next->keys, task.head_begin * next->key_head_stride};
      const float* head_query = query + head * rows_per_head * query_stride;
      const int64_t first_row = head * rows_per_head;
      for_row_blocks(rows_per_head, [&](auto count, int64_t m) __attribute__((always_inline)) {
        dot_rows<T, count.value>(tile->keys, key_offset, tile->size, args.head_dim,
                                 head_query + m * query_stride, query_stride,
                                 scores + m * MAX_TILE, MAX_TILE,
                                 m == 0 ? values : Upcoming<T>{nullptr, 0});
      });
      for (int64_t m = 0; m < rows_per_head; m++) {
        const int64_t position = row.num_past() + task.query_begin + m / group;
        const float slope =
            args.alibi_slopes ? args.alibi_slopes[kv_head * group + m % group] : 0.0f;
        decay[m] = softmax_row(scores + m * MAX_TILE, tile->size,
                               first_visible(args, position) - tile->first,
                               position + 1 - tile->first, args.softcap, slope,
                               tile->first - position, state.max[first_row + m],
                               state.sum[first_row + m]);
      }
      for_row_blocks(rows_per_head, [&](auto count, int64_t m) __attribute__((always_inline)) {
        add_rows<T, count.value>(tile->values, value_offset, tile->size, args.value_dim,
                                 scores + m * MAX_TILE, MAX_TILE, decay + m,
                                 state.out + (first_row + m) * out_stride, out_stride,
                                 m == 0 ? next_keys : Upcoming<T>{nullptr, 0});
      });
    }
  }
}

}  // namespace hfp
