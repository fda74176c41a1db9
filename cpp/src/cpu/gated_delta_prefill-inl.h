// Small dense products of the GatedDeltaNet prefill: fp32 matrices in scratch, cut into tiles of
// kTileTokens rows and a few vectors of columns. Rows and columns of scratch are padded to whole
// tiles, so that nothing here has a remainder.

#include <cstdint>
#include <type_traits>

#include "cpu/gated_delta-inl.h"

#ifndef SEGKI_CPU_GATED_DELTA_PREFILL_SHARED_
#define SEGKI_CPU_GATED_DELTA_PREFILL_SHARED_
namespace segki::cpu {

// Tokens that are solved together. Counted from a sequence's begin.
constexpr std::int64_t kScanChunk = 64;

// Rows of a tile.
constexpr std::int64_t kTileTokens = 4;

// One part's scratch, in floats; every row is a whole number of the widest vectors.
struct PrefillScratch {
  std::int64_t key_stride;
  std::int64_t value_stride;
  std::int64_t value_columns;  // Dv as whole vectors
  std::int64_t state_size;     // of one value head, [key_rows, value_stride]

  std::int64_t keys;            // [chunk, key_stride]
  std::int64_t queries;         // the same
  std::int64_t keys_by_column;  // [Dk, chunk]
  std::int64_t key_products;    // [chunk, chunk]: k_i . k_j
  std::int64_t query_products;  // [chunk, chunk]: q_i . k_j
  std::int64_t coupling;        // [chunk, chunk]: how token i's update depends on token j's
  std::int64_t mixing;          // [chunk, chunk]: how token i's output depends on token j's update
  std::int64_t values;          // [chunk, value_stride]: values, then updates
  std::int64_t carried;         // [chunk, value_stride]: updates as they arrive at the chunk's end
  std::int64_t seen;            // [chunk, value_stride]: k S
  std::int64_t outputs;         // [chunk, value_stride]: q S, then o
  std::int64_t numbers;         // 5 a token
  std::int64_t states;          // [R, state_size]
  std::int64_t size;

  PrefillScratch(std::int64_t key_dim, std::int64_t group, std::int64_t value_dim) {
    const auto whole = [](std::int64_t n) { return (n + 15) / 16 * 16; };
    // An odd number of cache lines, so that neighbouring rows do not compete for the same sets.
    const auto odd = [whole](std::int64_t n) { return whole(n) + (whole(n) % 32 == 0 ? 16 : 0); };
    key_stride = odd(key_dim);
    value_stride = odd(value_dim);
    value_columns = whole(value_dim);
    state_size = (key_dim + kTileTokens - 1) / kTileTokens * kTileTokens * value_stride;
    size = 0;
    const auto take = [this](std::int64_t floats) {
      const std::int64_t at = size;
      size += floats;
      return at;
    };
    keys = take(kScanChunk * key_stride);
    queries = take(kScanChunk * key_stride);
    keys_by_column = take(key_dim * kScanChunk);
    key_products = take(kScanChunk * kScanChunk);
    query_products = take(kScanChunk * kScanChunk);
    coupling = take(kScanChunk * kScanChunk);
    mixing = take(kScanChunk * kScanChunk);
    values = take(kScanChunk * value_stride);
    carried = take(kScanChunk * value_stride);
    seen = take(kScanChunk * value_stride);
    outputs = take(kScanChunk * value_stride);
    numbers = take(5 * kScanChunk);
    states = take(group * state_size);
  }
};

}  // namespace segki::cpu
#endif

// Per-target include guard.
#if defined(SEGKI_CPU_GATED_DELTA_PREFILL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEGKI_CPU_GATED_DELTA_PREFILL_INL_H_
#undef SEGKI_CPU_GATED_DELTA_PREFILL_INL_H_
#else
#define SEGKI_CPU_GATED_DELTA_PREFILL_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {

static_assert(16 % kLanes == 0 && kScanChunk % kLanes == 0 && kScanChunk % kTileTokens == 0);

// Vectors of a tile's rows.
#if HWY_TARGET == HWY_AVX3
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif

template <int N>
struct Tile {
  VF at[kTileTokens][N];
};

// The left matrix of a product: element (row, k) at data[row * row_stride + k * step].
struct Left {
  const float* data;
  std::int64_t row_stride;
  std::int64_t step;

  Left from_row(std::int64_t row) const { return {data + row * row_stride, row_stride, step}; }
};

// tile = left[0 .. kTileTokens, 0 .. depth] right[0 .. depth, N vectors].
template <int N>
HWY_INLINE void multiply(const Left& left, const float* HWY_RESTRICT right, std::int64_t stride,
                         std::int64_t depth, Tile<N>& tile) {
  VF sums[kTileTokens][N];
  for (int i = 0; i < kTileTokens; ++i) {
    for (int j = 0; j < N; ++j) sums[i][j] = zero();
  }
  const float* a0 = left.data;
  for (std::int64_t k = 0; k < depth; ++k) {
    VF b[N];
    for (int j = 0; j < N; ++j) b[j] = hn::Load(DF(), right + k * stride + j * kLanes);
    for (int i = 0; i < kTileTokens; ++i) {
      const VF a = set(a0[i * left.row_stride]);
      for (int j = 0; j < N; ++j) sums[i][j] = hn::MulAdd(a, b[j], sums[i][j]);
    }
    a0 += left.step;
  }
  for (int i = 0; i < kTileTokens; ++i) {
    for (int j = 0; j < N; ++j) tile.at[i][j] = sums[i][j];
  }
}

// Calls run(constant, column) for tiles of columns that cover [0, columns).
template <typename Run>
HWY_INLINE void for_column_tiles(std::int64_t columns, const Run& run) {
  std::int64_t column = 0;
  for (; column + kTileVectors * kLanes <= columns; column += kTileVectors * kLanes) {
    run(std::integral_constant<int, kTileVectors>(), column);
  }
  const std::int64_t left = (columns - column + kLanes - 1) / kLanes;
  if constexpr (kTileVectors > 2) {
    if (left == 3) return run(std::integral_constant<int, 3>(), column);
    if (left == 2) return run(std::integral_constant<int, 2>(), column);
  }
  // Where a tile is two vectors wide, rows may end in one and a half of them.
  for (; column < columns; column += kLanes) run(std::integral_constant<int, 1>(), column);
}

// out[rows, columns] = left[rows, depth] right[depth, columns]; with `triangular`, of row i only
// the columns up to its tile's diagonal. Row strides of right and out are the same.
HWY_INLINE void product(const Left& left, const float* right, std::int64_t stride,
                        std::int64_t rows, std::int64_t columns, std::int64_t depth,
                        bool triangular, float* out) {
  if (triangular) {
    for (std::int64_t row = 0; row < rows; row += kTileTokens) {
      for_column_tiles(row + kTileTokens, [&](auto vectors, std::int64_t column) HWY_ATTR {
        Tile<vectors()> tile;
        multiply(left.from_row(row), right + column, stride, depth, tile);
        for (int i = 0; i < kTileTokens; ++i) {
          for (int j = 0; j < vectors(); ++j) {
            hn::Store(tile.at[i][j], DF(), out + (row + i) * stride + column + j * kLanes);
          }
        }
      });
    }
    return;
  }
  for_column_tiles(columns, [&](auto vectors, std::int64_t column) HWY_ATTR {
    for (std::int64_t row = 0; row < rows; row += kTileTokens) {
      Tile<vectors()> tile;
      multiply(left.from_row(row), right + column, stride, depth, tile);
      for (int i = 0; i < kTileTokens; ++i) {
        for (int j = 0; j < vectors(); ++j) {
          hn::Store(tile.at[i][j], DF(), out + (row + i) * stride + column + j * kLanes);
        }
      }
    }
  });
}

// Numbers of a chunk's tokens, with c the sum of the log decays up to and with the token.
struct ChunkNumbers {
  const float* beta;
  const float* from_begin;  // exp(c)
  const float* to_end;      // exp(c_last - c)
};

// Solves u_i + sum_{j < i} coupling[i, j] u_j = beta_i (v_i - exp(c_i) seen_i) for all rows:
// `values` becomes u, `carried` u_i exp(c_last - c_i). `coupling` is [chunk, chunk].
HWY_INLINE void solve(const float* coupling, const ChunkNumbers& numbers, const float* seen,
                      std::int64_t stride, std::int64_t rows, std::int64_t columns, float* values,
                      float* carried) {
  for_column_tiles(columns, [&](auto vectors, std::int64_t column) HWY_ATTR {
    for (std::int64_t row = 0; row < rows; row += kTileTokens) {
      Tile<vectors()> tile;
      const Left left{coupling + row * kScanChunk, kScanChunk, 1};
      multiply(left, values + column, stride, row, tile);
      for (int i = 0; i < kTileTokens; ++i) {
        const VF beta = set(numbers.beta[row + i]);
        const VF decay = set(numbers.from_begin[row + i]);
        const VF rest = set(numbers.to_end[row + i]);
        for (int j = 0; j < vectors(); ++j) {
          const std::int64_t at = (row + i) * stride + column + j * kLanes;
          const VF error =
              hn::NegMulAdd(decay, hn::Load(DF(), seen + at), hn::Load(DF(), values + at));
          VF u = hn::Sub(hn::Mul(beta, error), tile.at[i][j]);
          for (int before = 0; before < i; ++before) {
            u = hn::NegMulAdd(set(left.data[i * kScanChunk + row + before]), tile.at[before][j], u);
          }
          tile.at[i][j] = u;
          hn::Store(u, DF(), values + at);
          hn::Store(hn::Mul(u, rest), DF(), carried + at);
        }
      }
    }
  });
}

// outputs_i = exp(c_i) outputs_i + sum_{j <= i} mixing[i, j] u_j; `mixing` is [chunk, chunk] with
// zeros right of the diagonal.
HWY_INLINE void mix(const float* mixing, const float* from_begin, const float* updates,
                    std::int64_t stride, std::int64_t rows, std::int64_t columns, float* outputs) {
  for_column_tiles(columns, [&](auto vectors, std::int64_t column) HWY_ATTR {
    for (std::int64_t row = 0; row < rows; row += kTileTokens) {
      Tile<vectors()> tile;
      multiply(Left{mixing + row * kScanChunk, kScanChunk, 1}, updates + column, stride,
               row + kTileTokens, tile);
      for (int i = 0; i < kTileTokens; ++i) {
        const VF decay = set(from_begin[row + i]);
        for (int j = 0; j < vectors(); ++j) {
          float* at = outputs + (row + i) * stride + column + j * kLanes;
          hn::Store(hn::MulAdd(decay, hn::Load(DF(), at), tile.at[i][j]), DF(), at);
        }
      }
    }
  });
}

// state = state * decay + keys^T carried, over `tokens` tokens.
HWY_INLINE void advance_state(const float* keys, std::int64_t key_stride, const float* carried,
                              std::int64_t stride, std::int64_t tokens, float decay,
                              std::int64_t key_dim, std::int64_t columns, float* state) {
  const VF factor = set(decay);
  for_column_tiles(columns, [&](auto vectors, std::int64_t column) HWY_ATTR {
    for (std::int64_t row = 0; row < key_dim; row += kTileTokens) {
      Tile<vectors()> tile;
      multiply(Left{keys + row, 1, key_stride}, carried + column, stride, tokens, tile);
      for (int i = 0; i < kTileTokens; ++i) {
        for (int j = 0; j < vectors(); ++j) {
          float* at = state + (row + i) * stride + column + j * kLanes;
          hn::Store(hn::MulAdd(factor, hn::Load(DF(), at), tile.at[i][j]), DF(), at);
        }
      }
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
