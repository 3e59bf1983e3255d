// The two matrix products of many query rows, in bfloat16 on AMX tiles; sums in fp32.
//
// An AMX register is 16 rows of 64 bytes. One instruction adds to c[16][16] the product of
// a[16][32] and b[32][16], where b holds *pairs*: two elements that are neighbours along the depth
// share a 32-bit word. So one side of each product comes from a transpose of words:
//
//     scores[t][m] = K[t][d] * pairs of Q^T[d][m]          Q transposed, K as it lies in the cache
//     out[d][m]    = V^T[d][t] * pairs of weights[t][m]    V transposed, weights packed as computed
//
// Weights are rounded to bfloat16 and summed as rounded, so they add up to 1.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include "element.h"
#include "state.h"
#include "tile.h"

namespace hfp {

constexpr int64_t SIDE = 16;  // rows of a register, and 32-bit words of its rows
constexpr int64_t BLOCK = 2 * SIDE;  // rows and columns that are multiplied at a time
static_assert(W == SIDE && STRIP == BLOCK, "a row of a register is a vector, and a strip");

// Sets the shape of all eight registers of this thread.
class AmxRegisters {
 public:
  AmxRegisters() {
    struct alignas(64) Config {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config{};
    static_assert(sizeof(Config) == 64, "as the processor reads it");
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      config.row_bytes[i] = 4 * SIDE;
      config.rows[i] = SIDE;
    }
    // Not _tile_loadconfig: GCC 12 believes that it reads 8 bytes, and may not write the others.
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~AmxRegisters() { _tile_release(); }
  AmxRegisters(const AmxRegisters&) = delete;
  AmxRegisters& operator=(const AmxRegisters&) = delete;
};

// GCC knows that a tile is stored to memory, but not that one is loaded from it.
HFP_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

// c[i][j] = sum over p of a[i][p] * b[p][j] for one or two registers of rows and of columns, and
// `steps` times BLOCK elements of depth. Strides count words: two elements of a, a pair of b, a
// float of c.
template <bool TWO_ROWS, bool TWO_COLUMNS>
inline void amx_multiply_block(int64_t steps, const uint32_t* a, int64_t a_stride,
                               const uint32_t* b, int64_t b_stride, float* c, int64_t c_stride) {
  const int64_t a_bytes = 4 * a_stride, b_bytes = 4 * b_stride, c_bytes = 4 * c_stride;
  _tile_zero(0);
  if constexpr (TWO_COLUMNS) _tile_zero(1);
  if constexpr (TWO_ROWS) _tile_zero(2);
  if constexpr (TWO_ROWS && TWO_COLUMNS) _tile_zero(3);
  for (int64_t s = 0; s < steps; s++, a += SIDE, b += SIDE * b_stride) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (TWO_COLUMNS) {
      _tile_loadd(7, b + SIDE, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (TWO_ROWS) {
      _tile_loadd(5, a + SIDE * a_stride, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (TWO_COLUMNS) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (TWO_COLUMNS) _tile_stored(1, c + SIDE, c_bytes);
  if constexpr (TWO_ROWS) {
    _tile_stored(2, c + SIDE * c_stride, c_bytes);
    if constexpr (TWO_COLUMNS) _tile_stored(3, c + SIDE * c_stride + SIDE, c_bytes);
  }
}

// amx_multiply_block for what is left of rows and columns, in whole registers.
inline void amx_multiply(int64_t rows, int64_t columns, int64_t steps, const uint32_t* a,
                         int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
                         int64_t c_stride) {
  const bool two_columns = columns > SIDE;
  const auto multiply_block =
      rows > SIDE ? (two_columns ? amx_multiply_block<true, true> : amx_multiply_block<true, false>)
                  : (two_columns ? amx_multiply_block<false, true>
                                 : amx_multiply_block<false, false>);
  multiply_block(steps, a, a_stride, b, b_stride, c, c_stride);
}

// See attend_many.
class AmxProducts {
 public:
  static constexpr int64_t PANEL = 64;
  static constexpr int64_t TOKEN_STEP = BLOCK;

  static int64_t scratch_size(const hfp_attention& args, int64_t columns) {
    const int64_t key_words = round_up(args.head_dim, STRIP) / 2;
    const int64_t value_stride = round_up(args.value_dim, STRIP);
    return columns * (key_words + value_stride) + MAX_TILE * (key_words + value_stride / 2) +
           MAX_TILE * PANEL * 3 / 2 + BLOCK * BLOCK;
  }

  AmxProducts(const hfp_attention& args, int64_t columns, State state, float* scratch)
      : args_(args),
        state_(state),
        columns_(columns),
        key_words_(round_up(args.head_dim, STRIP) / 2),
        scores_(scratch),
        sums_(scores_ + MAX_TILE * PANEL),
        out_(sums_ + BLOCK * BLOCK),
        weights_(reinterpret_cast<uint32_t*>(out_ + state.stride * columns)),
        query_(weights_ + MAX_TILE / 2 * PANEL),
        keys_(query_ + key_words_ * columns),
        values_(keys_ + MAX_TILE * key_words_) {
    std::fill(out_, out_ + state.stride * columns, 0.0f);
  }

  void set_queries(int64_t column, const bfloat16* const* rows) {
    for (int64_t d = 0; d < args_.head_dim; d += STRIP) {
      vf words[W];
      for (int64_t m = 0; m < W; m++)
        words[m] = rows[m] ? (vf)load_words(rows[m], d, args_.head_dim) : vf{};
      transpose(words);
      for (int64_t i = 0; i < W; i++)
        store(query_ + (d / 2 + i) * columns_ + column, (vu)words[i]);
    }
  }

  void set_tile(const Tile<bfloat16>& tile, int64_t head) {
    for (int64_t t = 0; t < tile.size; t++) {
      const bfloat16* key = tile.keys[t] + head * tile.key_head_stride;
      for (int64_t d = 0; d < args_.head_dim; d += STRIP)
        store(keys_ + t * key_words_ + d / 2, load_words(key, d, args_.head_dim));
    }
    // The depth of the second product is whole steps, of zeros past the last token: what is left
    // there from another tile may be no number.
    for (int64_t t = 0; t < tile.size; t += BLOCK)
      for (int64_t d = 0; d < args_.value_dim; d += STRIP) {
        const auto words_of = [&](int64_t token) {
          if (token >= tile.size) return vu{};
          return load_words(tile.values[token] + head * tile.value_head_stride, d, args_.value_dim);
        };
        vf even[W], odd[W];  // pairs of tokens of the even and the odd dims
        for (int64_t i = 0; i < W; i++) {
          const vu first = words_of(t + 2 * i), second = words_of(t + 2 * i + 1);
          even[i] = (vf)((first & 0xffffu) | (second << 16));
          odd[i] = (vf)((first >> 16) | (second & 0xffff0000u));
        }
        transpose(even);
        transpose(odd);
        for (int64_t i = 0; i < W; i++) {
          store(values_ + (d + i) * (MAX_TILE / 2) + t / 2, (vu)even[i]);
          store(values_ + (d + W + i) * (MAX_TILE / 2) + t / 2, (vu)odd[i]);
        }
      }
  }

  float* score(int64_t begin, int64_t end, int64_t column, int64_t width) {
    finish_stores();
    for (int64_t t = begin; t < end; t += BLOCK)
      for (int64_t m = 0; m < width; m += BLOCK)
        amx_multiply(end - t, width - m, key_words_ / SIDE, keys_ + t * key_words_, key_words_,
                     query_ + column + m, columns_, scores_ + (t - begin) * PANEL + m, PANEL);
    return scores_;
  }

  vf keep_weights(int64_t t, int64_t m, vf first, vf second) {
    const __m512i order =  // element i of both after element i - 1 of both
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    const vu words = (vu)_mm512_permutexvar_epi16(order, rounded);
    store(weights_ + t / 2 * PANEL + m, words);
    const Strip kept = split_bfloat16(words);
    return kept.a + kept.b;
  }

  void add_values(int64_t begin, int64_t end, int64_t column, int64_t width, const float* decay) {
    const int64_t pairs = (end - begin + 1) / 2, steps = (pairs + SIDE - 1) / SIDE;
    std::fill(weights_ + pairs * PANEL, weights_ + steps * SIDE * PANEL, 0u);
    finish_stores();
    for (int64_t d = 0; d < state_.stride; d += BLOCK)
      for (int64_t m = 0; m < width; m += BLOCK) {
        const int64_t columns = std::min(BLOCK, width - m);
        amx_multiply(BLOCK, columns, steps, values_ + d * (MAX_TILE / 2) + begin / 2, MAX_TILE / 2,
                     weights_ + m, PANEL, sums_, BLOCK);
        for (int64_t j = 0; j < columns; j += W) {
          const vf factor = load(decay + m + j);
          float* out = out_ + d * columns_ + column + m + j;
          for (int64_t i = 0; i < BLOCK; i++, out += columns_)
            store(out, load(out) * factor + load(sums_ + i * BLOCK + j));
        }
      }
  }

  void finish() {
    for (int64_t m = 0; m < columns_; m += W)
      for (int64_t d = 0; d < state_.stride; d += W) {
        vf x[W];
        for (int64_t i = 0; i < W; i++) x[i] = load(out_ + (d + i) * columns_ + m);
        transpose(x);
        for (int64_t i = 0; i < W; i++) store(state_.out + (m + i) * state_.stride + d, x[i]);
      }
  }

 private:
  // Elements d to d + STRIP of a row of n, two a word, zeros past its end.
  static vu load_words(const bfloat16* row, int64_t d, int64_t n) {
    alignas(64) bfloat16 strip[STRIP];
    const bfloat16* p = row + d;
    if (n - d < STRIP) {
      copy_part(p, n - d, strip);
      p = strip;
    }
    vu words;
    std::memcpy(&words, p, sizeof words);
    return words;
  }

  const hfp_attention& args_;
  const State state_;
  const int64_t columns_, key_words_;
  const AmxRegisters registers_;
  float* scores_;      // [MAX_TILE, PANEL]
  float* sums_;        // [BLOCK, BLOCK]
  float* out_;         // [value_stride, columns], rows in strip order
  uint32_t* weights_;  // [MAX_TILE / 2, PANEL]
  uint32_t* query_;    // [key_words, columns]
  uint32_t* keys_;     // [MAX_TILE, key_words]
  uint32_t* values_;   // [value_stride, MAX_TILE / 2], rows in strip order
};

}  // namespace hfp

#endif
