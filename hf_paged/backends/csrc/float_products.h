// The two matrix products of many query rows, in fp32.
//
// K and V of a tile are converted once, and multiplied from cache in blocks of registers.
#pragma once

#include "element.h"
#include "state.h"
#include "tile.h"

namespace hfp {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int GEMM_COLUMNS = 4;  // vectors; with GEMM_ROWS and a few more they fill 32 registers
#else
constexpr int GEMM_COLUMNS = 2;  // or 16
#endif
constexpr int GEMM_ROWS = 6;

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

// See attend_many.
template <class T>
class FloatProducts {
 public:
  static constexpr int64_t PANEL = 48;  // query rows whose scores are in the first-level cache
  static constexpr int64_t TOKEN_STEP = 1;

  static int64_t scratch_size(const hfp_attention& args, int64_t columns) {
    return columns * round_up(args.head_dim, STRIP) +
           MAX_TILE * (round_up(args.head_dim, STRIP) + round_up(args.value_dim, STRIP) + PANEL);
  }

  FloatProducts(const hfp_attention& args, int64_t columns, State state, float* scratch)
      : args_(args),
        state_(state),
        columns_(columns),
        key_stride_(round_up(args.head_dim, STRIP)),
        query_(scratch),
        keys_(query_ + key_stride_ * columns),
        values_(keys_ + MAX_TILE * key_stride_),
        scores_(values_ + MAX_TILE * state.stride) {
    state.clear_out();
  }

  void set_queries(int64_t column, const T* const* rows) {
    for (int64_t m = 0; m < W; m++) {
      float* row = keys_;  // before any tile is there
      if (rows[m])
        load_row(rows[m], args_.head_dim, row);
      else
        std::fill(row, row + key_stride_, 0.0f);
      for (int64_t d = 0; d < key_stride_; d++) query_[d * columns_ + column + m] = row[d];
    }
  }

  void set_tile(const Tile<T>& tile, int64_t head) {
    for (int64_t t = 0; t < tile.size; t++) {
      load_row(tile.keys[t] + head * tile.key_head_stride, args_.head_dim, keys_ + t * key_stride_);
      load_row(tile.values[t] + head * tile.value_head_stride, args_.value_dim,
               values_ + t * state_.stride);
    }
  }

  float* score(int64_t begin, int64_t end, int64_t column, int64_t width) {
    multiply<false>(end - begin, width, key_stride_, keys_ + begin * key_stride_, key_stride_,
                    query_ + column, columns_, nullptr, scores_, PANEL);
    return scores_;
  }

  vf keep_weights(int64_t t, int64_t m, vf first, vf second) {
    store(scores_ + t * PANEL + m, first);
    store(scores_ + (t + 1) * PANEL + m, second);
    return first + second;
  }

  void add_values(int64_t begin, int64_t end, int64_t column, int64_t width, const float* decay) {
    multiply<true>(width, state_.stride, end - begin, scores_, PANEL,
                   values_ + begin * state_.stride, state_.stride, decay,
                   state_.out + column * state_.stride, state_.stride);
  }

  void finish() {}

 private:
  const hfp_attention& args_;
  const State state_;
  const int64_t columns_, key_stride_;
  float* query_;   // [key_stride, columns]
  float* keys_;    // [MAX_TILE, key_stride]
  float* values_;  // [MAX_TILE, value_stride]
  float* scores_;  // [MAX_TILE, PANEL], then weights
};

}  // namespace hfp
