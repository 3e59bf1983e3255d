// The C interface of the native CPU backend; hf_paged/backends/native.py mirrors it with ctypes.
//
// Dimensions: B rows, N new tokens of all rows end to end, H query heads, H_kv key/value heads,
// D head dim, D_v head dim of values. Strides count elements, not bytes. Nothing here keeps a
// pointer after the call, but for the buffers of a workspace.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define HFP_EXPORT extern "C" __declspec(dllexport)
#else
#define HFP_EXPORT extern "C" __attribute__((visibility("default")))
#endif

enum hfp_dtype : int32_t { HFP_FLOAT32 = 0, HFP_BFLOAT16 = 1, HFP_FLOAT16 = 2 };

enum hfp_status : int32_t {
  HFP_OK = 0,
  HFP_OUT_OF_MEMORY = 1,
  // From hfp_check_rows; `detail` then holds {index, found, limit} and, for a block, {entry} too.
  HFP_BAD_QUERY_LENGTH = 2,  // cu_seqlens_q does not run from 0 to the number of tokens
  HFP_BAD_SEQUENCE_LENGTH = 3,  // a row has more new tokens than tokens, or more than its table
  HFP_BAD_BLOCK_ID = 4,  // a table names a block that the cache does not have
  HFP_BAD_SLOT = 5,  // from hfp_check_slots; `detail` holds {token, found, limit}
};

// torch's `torch_parallel_for`: calls fn on sub-ranges of [begin, end) in torch's own threads.
typedef int32_t (*hfp_parallel_for)(int64_t begin, int64_t end, int64_t grain_size,
                                    void (*fn)(int64_t, int64_t, void*), void* context);

struct hfp_threads {
  hfp_parallel_for parallel_for;
  int64_t num_threads;
};

// K or V of one layer in all blocks.
struct hfp_cache {
  void* data;
  int64_t block_stride, head_stride, token_stride;
};

// [N, heads, dim], the last dimension contiguous.
struct hfp_tokens {
  const void* data;
  int64_t token_stride, head_stride;
};

// What the tokens of a step are: shared by all layers of a group.
struct hfp_rows {
  const int32_t* block_tables;  // [B, table_stride]
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  int64_t num_rows, table_stride, table_width;
  int64_t block_size, num_blocks, num_tokens;
};

struct hfp_attention {
  hfp_rows rows;
  hfp_tokens query, key, value;
  hfp_cache key_cache, value_cache;
  void* out;           // [N, H, D_v], contiguous
  const float* sinks;  // [H] or null
  const float* alibi_slopes;  // [H] or null
  int64_t num_heads, num_kv_heads, head_dim, value_dim;
  int64_t window;  // tokens that a query sees, itself included; at least 1
  float scale;
  float softcap;  // 0: none
  int32_t dtype;
  int32_t batch_invariant;  // cut rows by their own length alone
};

struct hfp_write {
  hfp_tokens key, value;
  hfp_cache key_cache, value_cache;
  const int64_t* slot_mapping;  // [N], negative: not stored
  int64_t num_tokens, num_kv_heads, block_size;
  int64_t key_bytes, value_bytes;  // of one head of one token
  int32_t element_size;
};

HFP_EXPORT const char* hfp_isa();
HFP_EXPORT int64_t hfp_struct_size(int32_t which);  // 0 rows, 1 attention, 2 write, 3 threads

HFP_EXPORT void* hfp_workspace_new();
HFP_EXPORT void hfp_workspace_free(void* workspace);
HFP_EXPORT int64_t hfp_workspace_bytes(const void* workspace);

HFP_EXPORT int32_t hfp_check_rows(const hfp_rows* rows, int64_t window, int64_t* detail);
HFP_EXPORT int32_t hfp_check_slots(const int64_t* slots, int64_t num_slots, int64_t limit,
                                   int64_t* detail);
HFP_EXPORT int32_t hfp_attend(const hfp_attention* args, void* workspace,
                              const hfp_threads* threads);
HFP_EXPORT void hfp_write_tokens(const hfp_write* args, const hfp_threads* threads);
// Both in bytes: from one block to the next, and of a block.
HFP_EXPORT void hfp_copy_blocks(void* cache, int64_t block_stride, int64_t block_bytes,
                                const int64_t* source, const int64_t* target, int64_t num_copies,
                                const hfp_threads* threads);

// Sums `num_floats` floats as fast as memory gives them: the limit that benchmarks compare with.
HFP_EXPORT float hfp_read(const float* data, int64_t num_floats, const hfp_threads* threads);
