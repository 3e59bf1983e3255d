// How the work of one call is cut into tasks for threads.
//
// A task is some query rows of one sequence against some of its tokens, for some K heads. Sequences
// with few query rows are cut along their tokens, all heads in a task (heads of one token are
// neighbours in memory); sequences with many are cut along their queries, a head a task. Where a
// task group is cut along its tokens, each part leaves a partial result, and whoever finishes last
// merges them in order: which thread ran what changes no bit.
#pragma once

#include <algorithm>

#include "element.h"
#include "tile.h"

namespace hfp {

constexpr int64_t MAX_FEW = 16;  // query rows a K head
constexpr int64_t INVARIANT_FEW_CHUNK = 512;
constexpr int64_t INVARIANT_MANY_CHUNK = 2048;

struct Task {
  int64_t row;
  int64_t query_begin, query_end;  // within the row
  int64_t head_begin, head_end;    // K heads
  int64_t token_begin, token_end;
  int64_t part, num_parts;
  int64_t group;  // counts task groups
  int64_t state;  // where the group's partial results begin, in floats; unused if num_parts is 1

  int64_t num_queries() const { return query_end - query_begin; }
  int64_t num_heads() const { return head_end - head_begin; }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Plan {
 public:
  Plan(const hfp_attention& args, int64_t num_threads) : args_(args) {
    group_size_ = args.num_heads / args.num_kv_heads;
    queries_per_task_ = std::max<int64_t>(
        1, (std::max(args.head_dim, args.value_dim) > 128 ? 96 : 192) / group_size_);
    value_stride_ = round_up(args.value_dim, STRIP);
    int64_t few_tokens = 0, num_many = 0;
    for_each_row([&](const Row& row) {
      const int64_t tokens = row.num_tokens - begin_of(row, 0);
      work_ += tokens * row.num_queries * args.num_heads * (args.head_dim + args.value_dim);
      if (is_few(row))
        few_tokens += tokens;
      else
        num_many += ceil_div(row.num_queries, queries_per_task_) * args.num_kv_heads;
    });
    few_chunk_ = args.batch_invariant
                     ? INVARIANT_FEW_CHUNK
                     : std::max<int64_t>(256, ceil_div(few_tokens, 4 * num_threads));
    int64_t num_few = 0;
    for_each_row([&](const Row& row) {
      if (is_few(row)) num_few += ceil_div(row.num_tokens - begin_of(row, 0), few_chunk_);
    });
    // Too few tokens for all threads: cut along heads too.
    const int64_t head_splits = std::clamp<int64_t>(
        ceil_div(2 * num_threads, std::max<int64_t>(1, num_few)), 1, args.num_kv_heads);
    heads_per_task_ = ceil_div(args.num_kv_heads, head_splits);
    many_parts_ = num_many < 2 * num_threads
                      ? ceil_div(4 * num_threads, std::max<int64_t>(1, num_many))
                      : 1;
  }

  int64_t group_size() const { return group_size_; }
  int64_t value_stride() const { return value_stride_; }  // of a row of a partial result

  // Multiply-adds of the call, masked ones included.
  int64_t work() const { return work_; }

  // Query rows of a task: rows [h * n, (h + 1) * n) belong to its K head h.
  int64_t num_rows(const Task& task) const {
    return task.num_heads() * task.num_queries() * group_size_;
  }
  bool is_few(const Task& task) const {
    return task.num_queries() * group_size_ <= MAX_FEW;
  }

  // Floats of one partial result: a row of D_v, a maximum and a sum for each query row.
  int64_t state_size(const Task& task) const {
    return round_up(num_rows(task), W) * (value_stride_ + 2);
  }

  // Calls f(task) for each task, the long ones first.
  template <class F>
  void for_each_task(F f) const {
    int64_t group = 0, state = 0;
    const auto emit = [&](Task task, int64_t chunk) {
      const int64_t tokens = task.token_end - task.token_begin, begin = task.token_begin;
      task.num_parts = ceil_div(tokens, chunk);
      task.group = group++;
      task.state = state;
      for (task.part = 0; task.part < task.num_parts; task.part++) {
        task.token_begin = begin + tokens * task.part / task.num_parts;
        task.token_end = begin + tokens * (task.part + 1) / task.num_parts;
        f(task);
      }
      if (task.num_parts > 1) state += task.num_parts * state_size(task);
    };
    for_each_row([&](const Row& row) {
      if (is_few(row)) return;
      for (int64_t query, end = row.num_queries; end > 0; end = query) {
        query = (end - 1) / queries_per_task_ * queries_per_task_;
        Task task{};
        task.row = row.index;
        task.query_begin = query;
        task.query_end = end;
        task.token_begin = begin_of(row, query);
        task.token_end = row.num_past() + end;
        for (int64_t head = 0; head < args_.num_kv_heads; head++) {
          task.head_begin = head;
          task.head_end = head + 1;
          emit(task, many_chunk(row, task.token_end - task.token_begin));
        }
      }
    });
    for_each_row([&](const Row& row) {
      if (!is_few(row)) return;
      Task task{};
      task.row = row.index;
      task.query_end = row.num_queries;
      task.token_begin = begin_of(row, 0);
      task.token_end = row.num_tokens;
      for (int64_t head = 0; head < args_.num_kv_heads; head += heads_per_task_) {
        task.head_begin = head;
        task.head_end = std::min(head + heads_per_task_, args_.num_kv_heads);
        emit(task, few_chunk_);
      }
    });
  }

 private:
  template <class F>
  void for_each_row(F f) const {
    for (int64_t i = 0; i < args_.rows.num_rows; i++) {
      const Row row = row_of(args_.rows, i);
      if (row.num_queries > 0) f(row);
    }
  }
  bool is_few(const Row& row) const { return row.num_queries * group_size_ <= MAX_FEW; }
  int64_t begin_of(const Row& row, int64_t query) const {
    return first_visible(args_, row.num_past() + query);
  }
  int64_t many_chunk(const Row& row, int64_t tokens) const {
    if (args_.batch_invariant) return row.num_queries > 64 ? tokens : INVARIANT_MANY_CHUNK;
    return std::max<int64_t>(std::min<int64_t>(512, tokens), ceil_div(tokens, many_parts_));
  }

  const hfp_attention& args_;
  int64_t group_size_, queries_per_task_, value_stride_;
  int64_t few_chunk_, heads_per_task_, many_parts_, work_ = 0;
};

}  // namespace hfp
