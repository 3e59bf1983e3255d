// hfp_attend: plan, run the tasks in the host's threads, merge.

#include <atomic>
#include <type_traits>

#include "amx_products.h"
#include "few_queries.h"
#include "float_products.h"
#include "many_queries.h"
#include "parallel.h"
#include "plan.h"
#include "workspace.h"

namespace hfp {
namespace {

// A call of fewer multiply-adds is done sooner than a second thread is awake.
constexpr int64_t WORK_WORTH_THREADS = 100'000;

// Where the processor multiplies matrices, prompts in bfloat16 go there.
template <class T>
using Products =
#if defined(__AMX_BF16__)
    std::conditional_t<std::is_same_v<T, bfloat16>, AmxProducts, FloatProducts<T>>;
#else
    FloatProducts<T>;
#endif

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
                                                   : many_scratch<Products<T>>(plan, args, task));
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
        attend_many<Products<T>, T>(args, plan, row, task, rest, state);
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
