// What moves K and V without computing, and the checks that come before everything else.

#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "simd.h"
#include "tile.h"

namespace hfp {
namespace {

constexpr int64_t BYTES_WORTH_THREADS = 128 * 1024;

// Calls f(begin, end) on equal shares of [0, count), one a thread if `bytes` are worth it.
template <class F>
void share(const hfp_threads& threads, int64_t count, int64_t bytes, const F& f) {
  const int64_t shares =
      bytes < BYTES_WORTH_THREADS ? 1 : std::min(threads.num_threads, count);
  parallel(threads, shares, [&](int64_t i) { f(count * i / shares, count * (i + 1) / shares); });
}

void copy_heads(const hfp_cache& cache, const hfp_tokens& tokens, const hfp_write& args,
                int64_t token, int64_t slot, int64_t head_bytes) {
  const int64_t block = slot / args.block_size, offset = slot % args.block_size;
  char* target = static_cast<char*>(cache.data) +
                 (block * cache.block_stride + offset * cache.token_stride) * args.element_size;
  const char* source =
      static_cast<const char*>(tokens.data) + token * tokens.token_stride * args.element_size;
  for (int64_t head = 0; head < args.num_kv_heads; head++)
    std::memcpy(target + head * cache.head_stride * args.element_size,
                source + head * tokens.head_stride * args.element_size, head_bytes);
}

}  // namespace
}  // namespace hfp

const char* hfp_isa() {
#if defined(__AMX_BF16__)
  return "amx";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "portable";
#endif
}

int64_t hfp_struct_size(int32_t which) {
  const int64_t sizes[] = {sizeof(hfp_rows), sizeof(hfp_attention), sizeof(hfp_write),
                           sizeof(hfp_threads)};
  return sizes[which];
}

int32_t hfp_check_rows(const hfp_rows* rows, int64_t window, int64_t* detail) {
  const auto fail = [&](int32_t status, int64_t row, int64_t found, int64_t limit, int64_t entry) {
    detail[0] = row;
    detail[1] = found;
    detail[2] = limit;
    detail[3] = entry;
    return status;
  };
  if (rows->cu_seqlens_q[0] != 0)
    return fail(HFP_BAD_QUERY_LENGTH, 0, rows->cu_seqlens_q[0], rows->num_tokens, 0);
  for (int64_t i = 0; i < rows->num_rows; i++) {
    const hfp::Row row = hfp::row_of(*rows, i);
    if (row.num_queries < 0 || row.first_query + row.num_queries > rows->num_tokens)
      return fail(HFP_BAD_QUERY_LENGTH, i + 1, row.first_query + row.num_queries, rows->num_tokens,
                  0);
    const int64_t stored = row.num_queries == 1 ? row.num_tokens : row.num_past();
    const int64_t room = rows->table_width * rows->block_size;
    if (row.num_tokens < row.num_queries || stored > room)
      return fail(HFP_BAD_SEQUENCE_LENGTH, i, row.num_tokens, room, 0);
    if (row.num_queries == 0) continue;
    const int64_t first = std::max<int64_t>(0, row.num_past() - window + 1) / rows->block_size;
    const int32_t* table = rows->block_tables + i * rows->table_stride;
    for (int64_t entry = first; entry * rows->block_size < stored; entry++)
      if (table[entry] < 0 || table[entry] >= rows->num_blocks)
        return fail(HFP_BAD_BLOCK_ID, i, table[entry], rows->num_blocks, entry);
  }
  if (rows->cu_seqlens_q[rows->num_rows] != rows->num_tokens)
    return fail(HFP_BAD_QUERY_LENGTH, rows->num_rows, rows->cu_seqlens_q[rows->num_rows],
                rows->num_tokens, 0);
  return HFP_OK;
}

int32_t hfp_check_slots(const int64_t* slots, int64_t num_slots, int64_t limit, int64_t* detail) {
  for (int64_t i = 0; i < num_slots; i++)
    if (slots[i] >= limit) {
      detail[0] = i;
      detail[1] = slots[i];
      detail[2] = limit;
      return HFP_BAD_SLOT;
    }
  return HFP_OK;
}

void hfp_write_tokens(const hfp_write* args, const hfp_threads* threads) {
  const int64_t bytes = args->num_tokens * args->num_kv_heads * (args->key_bytes + args->value_bytes);
  hfp::share(*threads, args->num_tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++) {
      const int64_t slot = args->slot_mapping[token];
      if (slot < 0) continue;
      hfp::copy_heads(args->key_cache, args->key, *args, token, slot, args->key_bytes);
      hfp::copy_heads(args->value_cache, args->value, *args, token, slot, args->value_bytes);
    }
  });
}

void hfp_copy_blocks(void* cache, int64_t block_stride, int64_t block_bytes, const int64_t* source,
                     const int64_t* target, int64_t num_copies, const hfp_threads* threads) {
  char* bytes = static_cast<char*>(cache);
  hfp::share(*threads, num_copies, num_copies * block_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      std::memcpy(bytes + target[i] * block_stride, bytes + source[i] * block_stride, block_bytes);
  });
}

float hfp_read(const float* data, int64_t num_floats, const hfp_threads* threads) {
  using namespace hfp;
  constexpr int64_t STEP = 8 * W;
  float sums[256] = {};
  const int64_t steps = num_floats / STEP, workers = std::min<int64_t>(threads->num_threads, 256);
  parallel(*threads, workers, [&](int64_t i) {
    vf sum[8] = {};
    for (int64_t step = steps * i / workers; step < steps * (i + 1) / workers; step++)
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) sum[j] += hfp::load(data + step * STEP + j * W);
    vf total = {};
    for (int j = 0; j < 8; j++) total += sum[j];
    sums[i] = sum_lanes(total);
  });
  float total = 0;
  for (int64_t i = 0; i < workers; i++) total += sums[i];
  return total;
}
