// The running softmax of a task's query rows.
#pragma once

#include <algorithm>
#include <cmath>

#include "plan.h"

namespace hfp {

// Query rows of a task in whole vectors.
inline int64_t padded_rows(const Plan& plan, const Task& task) {
  return round_up(plan.num_rows(task), W);
}

// Maximum and sum of each query row so far, and its sum of values.
struct State {
  float* out;  // [rows, stride] in strip order
  float* max;  // [rows]
  float* sum;  // [rows]
  int64_t rows, stride;

  State(float* memory, int64_t num_rows, int64_t row_stride)
      : out(memory),
        max(memory + num_rows * row_stride),
        sum(max + num_rows),
        rows(num_rows),
        stride(row_stride) {}

  void clear_out() const { std::fill(out, out + rows * stride, 0.0f); }

  void clear_softmax() const {
    std::fill(max, max + rows, -INFINITY);
    std::fill(sum, sum + rows, 0.0f);
  }
};

}  // namespace hfp
