// Attention of many query rows: prompts, fresh or behind a cached prefix.
//
// Bound by arithmetic: K and V of a tile are brought into the form that the products want once, then
// two small matrix products run from cache around a softmax over columns:
//
//     scores[t][m] = K[t][d] * Q^T[d][m]        one column a query row, one row a token
//     out[m][d]    = weights[t][m]^T * V[t][d]
//
// Columns of scores are query rows, so that maximum and sum need no horizontal operation.
#pragma once

#include "state.h"

namespace hfp {

// What the softmax knows of W query rows, one a lane; tokens count from the first of the scores.
struct ColumnBounds {
  vi low, high;  // the tokens that a query sees
  bool everywhere;  // all of them
  vf slope, distance;  // ALiBi: the slope, and the first token less the query's position
  bool has_slope;
};

// Turns W columns of scores into weights, as softmax_row does with a row.
//
// keep(t, first, second) takes the weights of tokens t and t + 1 (zeros past the last), and returns
// the sum of what it took: it may round.
template <class Keep>
inline void softmax_columns(float* scores, int64_t stride, int64_t size, const ColumnBounds& bounds,
                            float scale, float softcap, float* column_max, float* column_sum,
                            float* decay, Keep keep) {
  const vf old_max = load(column_max);
  vf top = old_max, factor = broadcast(scale);
  if (bounds.everywhere && softcap == 0 && !bounds.has_slope) {
    for (int64_t t = 0; t < size; t++) top = max(top, load(scores + t * stride) * factor);
  } else {
    for (int64_t t = 0; t < size; t++) {
      vf x = load(scores + t * stride) * factor;
      if (softcap != 0) x = tanh(x * (1.0f / softcap)) * softcap;
      if (bounds.has_slope) x += bounds.slope * (bounds.distance + static_cast<float>(t));
      const vi at = broadcast(static_cast<int32_t>(t));
      x = select((at >= bounds.low) & (at < bounds.high), x, broadcast(-INFINITY));
      store(scores + t * stride, x);
      top = max(top, x);
    }
    factor = broadcast(1.0f);
  }
  const vf shift = select(top == broadcast(-INFINITY), vf{}, top);
  const vf change = exp(old_max - shift);
  vf sum = {};
  // The product is rounded as it was for the maximum: fused with the difference, the largest score
  // would not give 1 but, if it is in the billions, anything.
  const auto weight = [&](int64_t t) __attribute__((always_inline)) {
    return exp(in_register(load(scores + t * stride) * factor) - shift);
  };
  for (int64_t t = 0; t < size; t += 2)
    sum += keep(t, weight(t), t + 1 < size ? weight(t + 1) : vf{});
  store(column_max, top);
  store(column_sum, load(column_sum) * change + sum);
  store(decay, change);
}

template <class Products>
int64_t many_scratch(const Plan& plan, const hfp_attention& args, const Task& task) {
  const int64_t columns = padded_rows(plan, task);
  return Products::scratch_size(args, columns) + 5 * columns + plan.state_size(task);
}

// Computes a task of many query rows of one K head.
//
// Products does the arithmetic, for a panel of at most PANEL query rows at a time. Tokens `begin` to
// `end` count within the tile:
//
//     set_queries(column, rows)                  W query rows, null: zeros
//     set_tile(tile, head)
//     score(begin, end, column, width)           returns the products, [end - begin, PANEL]; `begin`
//                                                is a multiple of TOKEN_STEP
//     keep_weights(t, m, first, second)          see softmax_columns; m counts within the panel
//     add_values(begin, end, column, width, decay)   times what was kept
//     finish()                                   then state.out holds the sums
template <class Products, class T>
void attend_many(const hfp_attention& args, const Plan& plan, const Row& row, const Task& task,
                 float* scratch, State state) {
  const int64_t group = plan.group_size(), num_rows = task.num_queries() * group;
  const int64_t columns = padded_rows(plan, task), head = task.head_begin;
  float* decay = scratch;
  float* slope = decay + columns;
  float* position = slope + columns;
  int32_t* low = reinterpret_cast<int32_t*>(position + columns);
  int32_t* high = low + columns;
  state.clear_softmax();
  Products products(args, columns, state, scratch + 5 * columns);

  const int64_t first_position = row.num_past() + task.query_begin;
  const auto position_of = [&](int64_t m) { return first_position + m / group; };
  const T* queries[W];
  for (int64_t m = 0; m < columns; m++) {
    queries[m % W] =
        m < num_rows
            ? static_cast<const T*>(args.query.data) +
                  (row.first_query + task.query_begin + m / group) * args.query.token_stride +
                  (head * group + m % group) * args.query.head_stride
            : nullptr;
    if (m % W == W - 1) products.set_queries(m - m % W, queries);
    const int64_t at = position_of(std::min(m, num_rows - 1));
    position[m] = static_cast<float>(at - task.token_begin);
    low[m] = static_cast<int32_t>(first_visible(args, at) - task.token_begin);
    high[m] = static_cast<int32_t>(at + 1 - task.token_begin);
    slope[m] = args.alibi_slopes ? args.alibi_slopes[head * group + m % group] : 0.0f;
  }

  Tile<T> tile;
  for (int64_t first = task.token_begin; first < task.token_end; first = tile.end()) {
    tile.resolve(args, row, first, task.token_end, MAX_TILE);
    products.set_tile(tile, head);
    for (int64_t column = 0; column < columns; column += Products::PANEL) {
      const int64_t width = std::min(Products::PANEL, columns - column);
      const int64_t last = std::min(column + width, num_rows) - 1;
      // What some query of the panel sees.
      const int64_t visible =
          std::max<int64_t>(0, first_visible(args, position_of(column)) - first);
      const int64_t begin = visible / Products::TOKEN_STEP * Products::TOKEN_STEP;
      const int64_t end = std::min(tile.size, position_of(last) + 1 - first);
      if (visible >= end) continue;
      float* scores = products.score(begin, end, column, width);
      const auto shift = static_cast<int32_t>(first + begin - task.token_begin);
      for (int64_t m = column; m < column + width; m += W) {
        ColumnBounds bounds;
        bounds.low = load(low + m) - broadcast(shift);
        bounds.high = load(high + m) - broadcast(shift);
        bounds.everywhere = high[m] - shift >= end - begin && low[m + W - 1] - shift <= 0;
        bounds.slope = load(slope + m);
        bounds.distance = broadcast(static_cast<float>(shift)) - load(position + m);
        bounds.has_slope = args.alibi_slopes != nullptr;
        softmax_columns(scores + (m - column), Products::PANEL, end - begin, bounds, args.scale,
                        args.softcap, state.max + m, state.sum + m, decay + m,
                        [&](int64_t t, vf x, vf y) __attribute__((always_inline)) {
                          return products.keep_weights(t, m - column, x, y);
                        });
      }
      products.add_values(begin, end, column, width, decay + column);
    }
  }
  products.finish();
}

}  // namespace hfp
