// hfp_attend: plan, run the tasks in the host's threads, merge.

#include <atomic>

#include "few_queries.h"
#include "many_queries.h"
#include "parallel.h"
#include "plan.h"
#include "workspace.h"

namespace hfp {
namespace {

// A call of fewer multiply-adds is done sooner than a second thread is awake.
constexpr int64_t WORK_WORTH_THREADS = 100'000;

// The running softmax of some query rows, and their sums of values so far.
struct State {
  float* out;  // [rows, stride] in strip order
  float* max;  // [rows]
  float* sum;  // [rows]

  State(float* memory, int64_t rows, int64_t stride)
      : out(memory), max(memory + rows * stride), sum(max + rows) {}
};

int64_t padded_rows(const Plan& plan, const Task& task) { return round_up(plan.num_rows(task), W); }

// Tokens a tile: K and V of one head take half of a first-level cache of 32 KB.
template <class T>
int64_t few_tile(const hfp_attention& args) {
  const int64_t bytes = (args.head_dim + args.value_dim) * sizeof(T);
  return std::clamp<int64_t>(16384 / bytes / 16 * 16, 16, MAX_TILE);
}

int64_t few_scratch(const Plan& plan, const hfp_attention& args, const Task& task) {
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
  std::fill(state.out, state.out + num_rows * out_stride, 0.0f);
  std::fill(state.max, state.max + num_rows, -INFINITY);
  std::fill(state.sum, state.sum + num_rows, 0.0f);

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

int64_t many_scratch(const Plan& plan, const hfp_attention& args, const Task& task) {
  const int64_t columns = padded_rows(plan, task);
  return columns * round_up(args.head_dim, STRIP) +
         MAX_TILE * (round_up(args.head_dim, STRIP) + plan.value_stride() + PANEL) + 5 * columns +
         plan.state_size(task);
}

template <class T>
void attend_many(const hfp_attention& args, const Plan& plan, const Row& row, const Task& task,
                 float* scratch, State state) {
  const int64_t group = plan.group_size(), num_rows = task.num_queries() * group;
  const int64_t columns = padded_rows(plan, task), head = task.head_begin;
  const int64_t key_stride = round_up(args.head_dim, STRIP), value_stride = plan.value_stride();
  float* query = scratch;  // [key_stride, columns]
  float* keys = query + key_stride * columns;
  float* values = keys + MAX_TILE * key_stride;
  float* scores = values + MAX_TILE * value_stride;  // [MAX_TILE, PANEL]
  float* decay = scores + MAX_TILE * PANEL;
  float* slope = decay + columns;
  float* position = slope + columns;
  int32_t* low = reinterpret_cast<int32_t*>(position + columns);
  int32_t* high = low + columns;

  const int64_t first_position = row.num_past() + task.query_begin;
  const auto position_of = [&](int64_t m) { return first_position + m / group; };
  for (int64_t m = 0; m < columns; m++) {
    if (m < num_rows) {
      const T* source = static_cast<const T*>(args.query.data) +
                        (row.first_query + task.query_begin + m / group) * args.query.token_stride +
                        (head * group + m % group) * args.query.head_stride;
      load_row(source, args.head_dim, keys);  // one row, before any tile is there
    } else {
      std::fill(keys, keys + key_stride, 0.0f);
    }
    for (int64_t d = 0; d < key_stride; d++) query[d * columns + m] = keys[d] * args.scale;
    const int64_t at = position_of(std::min(m, num_rows - 1));
    position[m] = static_cast<float>(at - task.token_begin);
    low[m] = static_cast<int32_t>(first_visible(args, at) - task.token_begin);
    high[m] = static_cast<int32_t>(at + 1 - task.token_begin);
    slope[m] = args.alibi_slopes ? args.alibi_slopes[head * group + m % group] : 0.0f;
  }
  std::fill(state.out, state.out + columns * value_stride, 0.0f);
  std::fill(state.max, state.max + columns, -INFINITY);
  std::fill(state.sum, state.sum + columns, 0.0f);

  Tile<T> tile;
  for (int64_t first = task.token_begin; first < task.token_end; first = tile.end()) {
    tile.resolve(args, row, first, task.token_end, MAX_TILE);
    for (int64_t t = 0; t < tile.size; t++) {
      load_row(tile.keys[t] + head * tile.key_head_stride, args.head_dim, keys + t * key_stride);
      load_row(tile.values[t] + head * tile.value_head_stride, args.value_dim,
               values + t * value_stride);
    }
    for (int64_t column = 0; column < columns; column += PANEL) {
      const int64_t width = std::min(PANEL, columns - column);
      const int64_t last = std::min(column + width, num_rows) - 1;
      // What some query of the panel sees.
      const int64_t begin =
          std::max<int64_t>(0, first_visible(args, position_of(column)) - first);
      const int64_t end = std::min(tile.size, position_of(last) + 1 - first);
      if (begin >= end) continue;
      multiply<false>(end - begin, width, key_stride, keys + begin * key_stride, key_stride,
                      query + column, columns, nullptr, scores, PANEL);
      const auto shift = static_cast<int32_t>(first + begin - task.token_begin);
      for (int64_t m = column; m < column + width; m += W) {
        ColumnBounds bounds;
        bounds.low = load(low + m) - broadcast(shift);
        bounds.high = load(high + m) - broadcast(shift);
        bounds.everywhere = high[m] - shift >= end - begin && low[m + W - 1] - shift <= 0;
        bounds.slope = load(slope + m);
        bounds.distance = broadcast(static_cast<float>(shift)) - load(position + m);
        bounds.has_slope = args.alibi_slopes != nullptr;
        softmax_columns(scores + (m - column), PANEL, end - begin, bounds, args.softcap,
                        state.max + m, state.sum + m, decay + m);
      }
      multiply<true>(width, value_stride, end - begin, scores, PANEL,
                     values + begin * value_stride, value_stride, decay + column,
                     state.out + column * value_stride, value_stride);
    }
  }
}

// Merges the partial results of a task group, in order, and stores the output rows.
template <class T>
void finish(const hfp_attention& args, const Plan& plan, const Row& row, const Task& task,
            float* first_state) {
  const int64_t group = plan.group_size(), rows_per_head = task.num_queries() * group;
  const int64_t padded = padded_rows(plan, task), stride = plan.value_stride();
  const int64_t state_size = plan.state_size(task);
  const State result(first_state, padded, stride);
  for (int64_t r = 0; r < plan.num_rows(task); r++) {
    const int64_t m = r % rows_per_head;
    const int64_t head = (task.head_begin + r / rows_per_head) * group + m % group;
    float top = args.sinks ? args.sinks[head] : -INFINITY;
    for (int64_t part = 0; part < task.num_parts; part++)
      top = std::max(top, State(first_state + part * state_size, padded, stride).max[r]);
    float total = args.sinks ? exp(args.sinks[head] - top) : 0.0f;
    float* out = result.out + r * stride;
    float factor = 1.0f;
    if (task.num_parts == 1) {
      factor = exp(result.max[r] - top);
      total += result.sum[r] * factor;
    } else {
      for (int64_t part = 0; part < task.num_parts; part++) {
        const State partial(first_state + part * state_size, padded, stride);
        const float weight = exp(partial.max[r] - top);
        total += partial.sum[r] * weight;
        for (int64_t d = 0; d < stride; d += W) {
          const vf sum = part == 0 ? vf{} : load(out + d);
          store(out + d, sum + load(partial.out + r * stride + d) * weight);
        }
      }
    }
    const int64_t token = row.first_query + task.query_begin + m / group;
    store_row(out, factor / total, args.value_dim,
              static_cast<T*>(args.out) + (token * args.num_heads + head) * args.value_dim);
  }
}

template <class T>
int32_t attend(const hfp_attention& args, Workspace& workspace, const hfp_threads& threads) {
  const Plan plan(args, threads.num_threads);
  int64_t num_tasks = 0, num_groups = 0, state_floats = 0, scratch_floats = 0;
  plan.for_each_task([&](const Task& task) {
    num_tasks++;
    num_groups = task.group + 1;
    if (task.num_parts > 1)
      state_floats = task.state + task.num_parts * plan.state_size(task);
    scratch_floats =
        std::max(scratch_floats, plan.is_few(task) ? few_scratch(plan, args, task)
                                                   : many_scratch(plan, args, task));
  });
  if (num_tasks == 0) return HFP_OK;
  scratch_floats = round_up(scratch_floats, 16);
  const int64_t num_workers =
      plan.work() < WORK_WORTH_THREADS ? 1 : std::min(threads.num_threads, num_tasks);
  Task* tasks = workspace.tasks.get<Task>(num_tasks);
  auto* counters = workspace.counters.get<std::atomic<int64_t>>(num_groups);
  float* states = workspace.states.get<float>(std::max<int64_t>(state_floats, 1));
  float* scratch = workspace.scratch.get<float>(num_workers * scratch_floats);
  if (!tasks || !counters || !states || !scratch) return HFP_OUT_OF_MEMORY;
  for (int64_t i = 0; i < num_groups; i++) counters[i].store(0, std::memory_order_relaxed);
  int64_t filled = 0;
  plan.for_each_task([&](const Task& task) { tasks[filled++] = task; });

  std::atomic<int64_t> next_task{0};
  parallel(threads, num_workers, [&](int64_t worker) {
    float* memory = scratch + worker * scratch_floats;
    for (int64_t i; (i = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
      const Task& task = tasks[i];
      const Row row = row_of(args.rows, task.row);
      const int64_t state_size = plan.state_size(task);
      float* group_states = task.num_parts > 1 ? states + task.state : memory;
      const State state(group_states + task.part * state_size, padded_rows(plan, task),
                        plan.value_stride());
      float* rest = task.num_parts > 1 ? memory : memory + state_size;
      if (plan.is_few(task))
        attend_few<T>(args, plan, row, task, rest, state);
      else
        attend_many<T>(args, plan, row, task, rest, state);
      const bool is_last =
          task.num_parts == 1 ||
          counters[task.group].fetch_add(1, std::memory_order_acq_rel) == task.num_parts - 1;
      if (is_last) finish<T>(args, plan, row, task, group_states);
    }
  });
  return HFP_OK;
}

}  // namespace
}  // namespace hfp

int32_t hfp_attend(const hfp_attention* args, void* workspace, const hfp_threads* threads) {
  auto& memory = *static_cast<hfp::Workspace*>(workspace);
  switch (args->dtype) {
    case HFP_FLOAT32:
      return hfp::attend<float>(*args, memory, *threads);
    case HFP_BFLOAT16:
      return hfp::attend<hfp::bfloat16>(*args, memory, *threads);
    default:
      return hfp::attend<hfp::half>(*args, memory, *threads);
  }
}

void* hfp_workspace_new() { return new (std::nothrow) hfp::Workspace; }
void hfp_workspace_free(void* workspace) { delete static_cast<hfp::Workspace*>(workspace); }
int64_t hfp_workspace_bytes(const void* workspace) {
  const auto& w = *static_cast<const hfp::Workspace*>(workspace);
  return w.tasks.size() + w.counters.size() + w.states.size() + w.scratch.size();
}
