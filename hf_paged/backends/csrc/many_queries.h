// Attention of many query rows over a tile: prompts, fresh or behind a cached prefix.
//
// Compute-bound: K and V of the tile are converted to fp32 once, then two small matrix products
// run from cache around a softmax over columns:
//
//     scores[t][m] = K[t][d] * Q^T[d][m]        one column a query row, one row a token
//     out[m][d]    = weights[t][m]^T * V[t][d]
//
// Columns of scores are query rows, so that maximum and sum need no horizontal operation.
#pragma once

#include <cmath>

#include "element.h"

namespace hfp {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int GEMM_COLUMNS = 4;  // vectors; with GEMM_ROWS and a few more they fill 32 registers
#else
constexpr int GEMM_COLUMNS = 2;  // or 16
#endif
constexpr int GEMM_ROWS = 6;
constexpr int64_t PANEL = 48;  // query rows whose scores are in the first-level cache

// c[i][j] = c[i][j] * decay[i] + sum over p of a(i, p) * b[p][j], or without c if decay is null.
// a(i, p) is a[i * a_stride + p], or a[p * a_stride + i] if transposed.
template <int ROWS, int COLUMNS, bool TRANSPOSED>
inline void multiply_block(int64_t depth, const float* a, int64_t a_stride, const float* b,
                           int64_t b_stride, const float* decay, float* c, int64_t c_stride) {
  vf sum[ROWS][COLUMNS] = {};
  for (int64_t p = 0; p < depth; p++) {
    vf right[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; j++) right[j] = load(b + p * b_stride + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const vf left = broadcast(TRANSPOSED ? a[p * a_stride + i] : a[i * a_stride + p]);
#pragma GCC unroll 8
      for (int j = 0; j < COLUMNS; j++) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; j++) {
      float* p = c + i * c_stride + j * W;
      store(p, decay ? load(p) * decay[i] + sum[i][j] : sum[i][j]);
    }
}

// multiply_block for up to GEMM_ROWS rows.
template <int ROWS, int COLUMNS, bool TRANSPOSED>
inline void multiply_rows(int64_t rows, int64_t depth, const float* a, int64_t a_stride,
                          const float* b, int64_t b_stride, const float* decay, float* c,
                          int64_t c_stride) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS)
      return multiply_rows<ROWS - 1, COLUMNS, TRANSPOSED>(rows, depth, a, a_stride, b, b_stride,
                                                          decay, c, c_stride);
  }
  multiply_block<ROWS, COLUMNS, TRANSPOSED>(depth, a, a_stride, b, b_stride, decay, c, c_stride);
}

template <int COLUMNS, bool TRANSPOSED>
inline void multiply_columns(int64_t rows, int64_t columns, int64_t depth, const float* a,
                             int64_t a_stride, const float* b, int64_t b_stride,
                             const float* decay, float* c, int64_t c_stride) {
  for (; columns >= COLUMNS * W; columns -= COLUMNS * W, b += COLUMNS * W, c += COLUMNS * W)
    for (int64_t i = 0; i < rows; i += GEMM_ROWS)
      multiply_rows<GEMM_ROWS, COLUMNS, TRANSPOSED>(
          std::min<int64_t>(GEMM_ROWS, rows - i), depth, a + (TRANSPOSED ? i : i * a_stride),
          a_stride, b, b_stride, decay ? decay + i : nullptr, c + i * c_stride, c_stride);
  if constexpr (COLUMNS > 1)
    if (columns > 0)
      multiply_columns<COLUMNS - 1, TRANSPOSED>(rows, columns, depth, a, a_stride, b, b_stride,
                                                decay, c, c_stride);
}

// multiply_block for any number of rows and any multiple of W columns.
template <bool TRANSPOSED>
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a,
                     int64_t a_stride, const float* b, int64_t b_stride, const float* decay,
                     float* c, int64_t c_stride) {
  multiply_columns<GEMM_COLUMNS, TRANSPOSED>(rows, columns, depth, a, a_stride, b, b_stride, decay,
                                             c, c_stride);
}

// What the softmax knows of W query rows, one a lane; tokens count from the tile's first.
struct ColumnBounds {
  vi low, high;  // the tokens that a query sees
  bool everywhere;  // all of the tile's
  vf slope, distance;  // ALiBi: the slope, and the tile's first token less the query's position
  bool has_slope;
};

// Turns W columns of scores into weights, as softmax_row does with a row.
inline void softmax_columns(float* scores, int64_t stride, int64_t size, const ColumnBounds& bounds,
                            float softcap, float* column_max, float* column_sum, float* decay) {
  const vf old_max = load(column_max);
  vf top = old_max;
  if (bounds.everywhere && softcap == 0 && !bounds.has_slope) {
    for (int64_t t = 0; t < size; t++) top = max(top, load(scores + t * stride));
  } else {
    for (int64_t t = 0; t < size; t++) {
      vf x = load(scores + t * stride);
      if (softcap != 0) x = tanh(x * (1.0f / softcap)) * softcap;
      if (bounds.has_slope) x += bounds.slope * (bounds.distance + static_cast<float>(t));
      const vi at = broadcast(static_cast<int32_t>(t));
      x = select((at >= bounds.low) & (at < bounds.high), x, broadcast(-INFINITY));
      store(scores + t * stride, x);
      top = max(top, x);
    }
  }
  const vf shift = select(top == broadcast(-INFINITY), vf{}, top);
  const vf change = exp(old_max - shift);
  vf sum = {};
  for (int64_t t = 0; t < size; t++) {
    const vf weight = exp(load(scores + t * stride) - shift);
    sum += weight;
    store(scores + t * stride, weight);
  }
  store(column_max, top);
  store(column_sum, load(column_sum) * change + sum);
  store(decay, change);
}

}  // namespace hfp
