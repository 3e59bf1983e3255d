// Where the K and V rows of some consecutive tokens lie.
#pragma once

#include <algorithm>

#include "abi.h"
#include "simd.h"

namespace hfp {

constexpr int64_t MAX_TILE = 64;

// One row of the batch: its tokens, and which of them are new.
struct Row {
  int64_t index, first_query, num_queries, num_tokens;

  int64_t num_past() const { return num_tokens - num_queries; }
};

inline Row row_of(const hfp_rows& rows, int64_t index) {
  const int64_t begin = rows.cu_seqlens_q[index], end = rows.cu_seqlens_q[index + 1];
  return {index, begin, end - begin, rows.seq_lens[index]};
}

// The first token that a query at `position` sees.
inline int64_t first_visible(const hfp_attention& args, int64_t position) {
  return position < args.window ? 0 : position - args.window + 1;
}

// Up to MAX_TILE consecutive tokens of one row, as pointers to their rows in head 0.
template <class T>
struct Tile {
  const T* keys[MAX_TILE];
  const T* values[MAX_TILE];
  int64_t key_head_stride, value_head_stride;
  int64_t first, size;

  // Fills the tile with the tokens from `first` on, at most `limit` of them and none past `end`.
  //
  // A row with one new token has everything in its blocks. In a row with more, the new ones may
  // have left the window without ever having a slot: they are taken from `key` and `value`.
  void resolve(const hfp_attention& args, const Row& row, int64_t first_token, int64_t end,
               int64_t limit) {
    const int64_t num_stored = row.num_queries == 1 ? row.num_tokens : row.num_past();
    first = first_token;
    if (first < num_stored) {
      size = std::min({limit, end - first, num_stored - first});
      key_head_stride = args.key_cache.head_stride;
      value_head_stride = args.value_cache.head_stride;
      const int32_t* table = args.rows.block_tables + row.index * args.rows.table_stride;
      const int64_t block_size = args.rows.block_size;
      int64_t entry = first / block_size, offset = first % block_size;
      for (int64_t t = 0; t < size; entry++, offset = 0) {
        const int64_t block = table[entry];
        const T* key = static_cast<const T*>(args.key_cache.data) +
                       block * args.key_cache.block_stride + offset * args.key_cache.token_stride;
        const T* value = static_cast<const T*>(args.value_cache.data) +
                         block * args.value_cache.block_stride +
                         offset * args.value_cache.token_stride;
        const int64_t stop = std::min(size, t + block_size - offset);
        for (; t < stop; t++) {
          keys[t] = key;
          values[t] = value;
          key += args.key_cache.token_stride;
          value += args.value_cache.token_stride;
        }
      }
    } else {
      size = std::min(limit, end - first);
      key_head_stride = args.key.head_stride;
      value_head_stride = args.value.head_stride;
      const int64_t packed = row.first_query + first - row.num_past();
      for (int64_t t = 0; t < size; t++) {
        keys[t] = static_cast<const T*>(args.key.data) + (packed + t) * args.key.token_stride;
        values[t] =
            static_cast<const T*>(args.value.data) + (packed + t) * args.value.token_stride;
      }
    }
  }

  int64_t end() const { return first + size; }
};

}  // namespace hfp
