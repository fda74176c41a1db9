// Products of a few rows with a weight matrix, fp32 accumulation, for weights [N, K] and [K, N].
//
// The order in which an output is summed depends on K alone, so that a row's bits are the same in
// any batch and for any split of N: one vector accumulator runs over k in order, then its lanes are
// added in a fixed tree ([N, K]), or one lane runs over k in order ([K, N]).

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/numeric-inl.h"
#include "hwy/cache_control.h"

#ifndef SEGKI_CPU_MATMUL_SHARED_
#define SEGKI_CPU_MATMUL_SHARED_
namespace segki::cpu {

// Granularity in output features of the split into parts; every register tile divides it.
constexpr std::int64_t kSplitBlock = 16;

// Rows of one register tile at most, and the k that packed rows are padded to; the widest
// instruction set's values.
constexpr std::int64_t kMaxTileRows = 8;
constexpr std::int64_t kMaxChunk = 32;

// Output features that share one pass over the packed rows, while the rows are in cache.
constexpr std::int64_t kPanel = 48;

// [K, N] weights: columns whose running sums are kept in scratch together, and k steps that update
// them at a time.
constexpr std::int64_t kWideColumns = 1024;
constexpr std::int64_t kDeepSteps = 16;

inline std::size_t packed_bytes(std::int64_t rows, std::int64_t k) {
  const std::int64_t padded_rows = (rows + kMaxTileRows - 1) / kMaxTileRows * kMaxTileRows;
  const std::int64_t padded_k = (k + kMaxChunk - 1) / kMaxChunk * kMaxChunk;
  return static_cast<std::size_t>(padded_rows * padded_k) * sizeof(float);
}

// Scratch of one part: packed rows, then running sums.
inline std::size_t matmul_scratch_bytes(std::int64_t rows, std::int64_t k, bool transposed) {
  const std::size_t sums =
      transposed ? static_cast<std::size_t>(kMaxTileRows * kWideColumns) * sizeof(float) : 0;
  return packed_bytes(rows, k) + sums;
}

}  // namespace segki::cpu
#endif

#if defined(SEGKI_CPU_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEGKI_CPU_MATMUL_INL_H_
#undef SEGKI_CPU_MATMUL_INL_H_
#else
#define SEGKI_CPU_MATMUL_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {

// Register tile: kTileColumns<R> weight rows times R rows of x.
#if HWY_TARGET == HWY_AVX3
constexpr std::int64_t kTileRows = 8;
template <int R>
constexpr int kTileColumns = R == 8 ? 3 : 4;
#else
constexpr std::int64_t kTileRows = 4;
template <int R>
constexpr int kTileColumns = R == 4 ? 2 : 4;
#endif

// k values that one step of a [N, K] tile takes.
constexpr std::int64_t kChunk = 2 * kLanes;

HWY_INLINE std::int64_t padded_k(std::int64_t k) { return (k + kChunk - 1) / kChunk * kChunk; }

// Loads kChunk values as two vectors. Which value goes where is the same for weights and x.
HWY_INLINE void load_chunk(const float* p, VF& a, VF& b) {
  a = load(p);
  b = load(p + kLanes);
}
HWY_INLINE void load_chunk(const F16* p, VF& a, VF& b) {
  a = load(p);
  b = load(p + kLanes);
}
// Values with even index, then those with odd index: one instruction each.
HWY_INLINE void load_chunk(const Bf16* p, VF& a, VF& b) {
#if HWY_TARGET == HWY_SCALAR
  a = load(p);
  b = load(p + 1);
#else
  const DU du;
  const hn::Repartition<std::uint16_t, DU> du16;
  const VU pairs = hn::BitCast(du, hn::LoadU(du16, reinterpret_cast<const std::uint16_t*>(p)));
  a = hn::BitCast(DF(), hn::ShiftLeft<16>(pairs));
  b = hn::BitCast(DF(), hn::And(pairs, hn::Set(du, 0xFFFF0000u)));
#endif
}

template <typename T>
HWY_INLINE void load_chunk_n(const T* p, std::int64_t n, VF& a, VF& b) {
  alignas(64) T buffer[kChunk] = {};
  std::memcpy(buffer, p, static_cast<std::size_t>(n) * sizeof(T));
  load_chunk(buffer, a, b);
}

// --- Rows of x as fp32 in scratch, in tiles of R rows (R: 1, 2, 4 or 8; missing rows are zero).

// How many rows the tile that starts at `row` has room for.
HWY_INLINE std::int64_t tile_rows(std::int64_t row, std::int64_t rows) {
  const std::int64_t left = rows - row;
  if (left >= kTileRows) return kTileRows;
  return left > 4 ? 8 : left > 2 ? 4 : left;
}

// [N, K]: for each tile, chunk and half of the chunk, one vector of each row; row_at(r) is row r.
template <typename T, typename RowAt>
void pack_rows(std::int64_t rows, std::int64_t k, const RowAt& row_at, float* packed) {
  for (std::int64_t row = 0; row < rows;) {
    const std::int64_t tile = tile_rows(row, rows);
    for (std::int64_t r = 0; r < tile; ++r) {
      float* to = packed + r * kLanes;
      const bool live = row + r < rows;
      const T* from = live ? row_at(row + r) : nullptr;
      for (std::int64_t i = 0; i < k; i += kChunk) {
        VF a = zero();
        VF b = zero();
        if (live) {
          if (i + kChunk <= k) {
            load_chunk(from + i, a, b);
          } else {
            load_chunk_n(from + i, k - i, a, b);
          }
        }
        hn::Store(a, DF(), to);
        hn::Store(b, DF(), to + tile * kLanes);
        to += 2 * tile * kLanes;
      }
    }
    packed += tile * padded_k(k);
    row += tile;
  }
}

template <typename T>
void pack_rows(const TensorView& x, float* packed) {
  pack_rows<T>(
      x.shape[0], x.shape[1], [&x](std::int64_t r) { return x.as<const T>() + r * x.stride[0]; },
      packed);
}

// [K, N]: for each tile and k, the value of each row.
template <typename T, typename RowAt>
void pack_rows_transposed(std::int64_t rows, std::int64_t k, const RowAt& row_at, float* packed) {
  for (std::int64_t row = 0; row < rows;) {
    const std::int64_t tile = tile_rows(row, rows);
    for (std::int64_t r = 0; r < tile; ++r) {
      const bool live = row + r < rows;
      const T* from = live ? row_at(row + r) : nullptr;
      for (std::int64_t i = 0; i < k; i += kLanes) {
        const std::int64_t n = std::min(kLanes, k - i);
        alignas(64) float values[kLanes];
        hn::Store(live ? load_n(from + i, n) : zero(), DF(), values);
        for (std::int64_t j = 0; j < n; ++j) packed[(i + j) * tile + r] = values[j];
      }
    }
    packed += tile * padded_k(k);
    row += tile;
  }
}

template <typename T>
void pack_rows_transposed(const TensorView& x, float* packed) {
  pack_rows_transposed<T>(
      x.shape[0], x.shape[1], [&x](std::int64_t r) { return x.as<const T>() + r * x.stride[0]; },
      packed);
}

// --- Sums over the lanes of several vectors at once.

// One level of the tree: lanes of `a` that are `kDistance` apart are added; the results of `a` go
// to lanes whose index has the bit kDistance clear, those of `c` to the others.
#if HWY_TARGET != HWY_SCALAR
template <int kDistance>
HWY_INLINE VF add_lanes(VF a, VF c) {
  const DF d;
#if HWY_TARGET == HWY_AVX3
  if constexpr (kDistance == 8) {
    return hn::Add(hn::ConcatLowerLower(d, c, a), hn::ConcatUpperUpper(d, c, a));
  }
#endif
  if constexpr (kDistance == 4) {
    return hn::Add(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(c), a),
                   hn::OddEvenBlocks(c, hn::SwapAdjacentBlocks(a)));
  } else if constexpr (kDistance == 2) {
    const hn::Repartition<double, DF> d64;
    const auto a64 = hn::BitCast(d64, a);
    const auto c64 = hn::BitCast(d64, c);
    return hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, a64, c64)),
                   hn::BitCast(d, hn::InterleaveUpper(d64, a64, c64)));
  } else if constexpr (kDistance == 1) {
    return hn::Add(hn::OddEven(hn::DupEven(c), a), hn::OddEven(c, hn::DupOdd(a)));
  }
}
#endif

// Sums of kCount vectors (a power of two, at most kLanes); that of v[i] is in lane i * kLanes /
// kCount.
template <int kCount, int kDistance = static_cast<int>(kLanes) / 2>
HWY_INLINE VF sum_lanes(const VF* v) {
  if constexpr (kDistance == 0) {
    return v[0];
  } else if constexpr (kCount == 1) {
    const VF sum = add_lanes<kDistance>(v[0], v[0]);
    return sum_lanes<1, kDistance / 2>(&sum);
  } else {
    VF sums[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) {
      sums[i] = add_lanes<kDistance>(v[i], v[i + kCount / 2]);
    }
    return sum_lanes<kCount / 2, kDistance / 2>(sums);
  }
}

// sums[r * kPanel + c * apart] = v[r * C + c] added over its lanes, from v[kFirst] on.
template <int C, int R, int kFirst = 0>
HWY_INLINE void store_sums(const VF* v, std::int64_t apart, float* sums) {
  constexpr int kLeft = C * R - kFirst;
  constexpr int kMost = std::min(kLeft, static_cast<int>(kLanes));
  constexpr int kCount = kMost >= 16 ? 16 : kMost >= 8 ? 8 : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
  constexpr int kSpacing = static_cast<int>(kLanes) / kCount;
  alignas(64) float lanes[kLanes];
  hn::Store(sum_lanes<kCount>(v + kFirst), DF(), lanes);
  for (int i = 0; i < kCount; ++i) {
    const int index = kFirst + i;
    sums[index / C * kPanel + index % C * apart] = lanes[i * kSpacing];
  }
  if constexpr (kLeft > kCount) store_sums<C, R, kFirst + kCount>(v, apart, sums);
}

// --- [N, K]

// How far ahead of its use a weight is requested, in bytes; less than the L1 cache keeps, more than
// the memory's latency takes.
constexpr std::int64_t kAhead = 2048;

// Keeps a loaded value in a register: GCC otherwise repeats the load in each instruction that uses
// it, and the loads then take longer than the arithmetic.
HWY_INLINE VF in_register(VF v) {
#if (HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3) && HWY_COMPILER_GCC
  asm("" : "+v"(v.raw));
#endif
  return v;
}

// What is requested while a tile of a panel is multiplied: the weights kAhead bytes on in its
// streams, and at the streams' end those at the start of the streams of the next panel, where no
// hardware prefetcher looks.
struct Ahead {
  std::uintptr_t here;  // first stream's address kAhead bytes on
  std::uintptr_t next;  // what to use in place of `here` from byte `left` of the tile on
  std::int64_t left;
};

// C rows of W that are `apart` rows from each other times R rows of x. kPrefetch: the weights come
// from memory and not from an earlier tile's cache.
template <int C, int R, bool kPrefetch, typename T>
HWY_INLINE void tile_product(const T* HWY_RESTRICT w, std::int64_t apart, std::int64_t k,
                             const float* HWY_RESTRICT x, float* HWY_RESTRICT sums,
                             [[maybe_unused]] const Ahead& ahead) {
  const std::int64_t stride = apart * k;
  VF acc[R * C];
  for (int i = 0; i < R * C; ++i) acc[i] = zero();
  std::int64_t i = 0;
  for (; i + kChunk <= k; i += kChunk) {
    VF a[C];
    VF b[C];
    [[maybe_unused]] std::uintptr_t from = 0;
    if constexpr (kPrefetch) {
      const std::int64_t done = i * static_cast<std::int64_t>(sizeof(T));
      from = (done < ahead.left ? ahead.here : ahead.next) + static_cast<std::uintptr_t>(done);
    }
    for (int c = 0; c < C; ++c) {
      const T* p = w + c * stride + i;
      load_chunk(p, a[c], b[c]);
      if constexpr (kPrefetch) {
        for (std::size_t line = 0; line < kChunk * sizeof(T); line += 64) {
          hwy::Prefetch(reinterpret_cast<const char*>(from + line));  // may lie past the weights
        }
        from += static_cast<std::uintptr_t>(stride) * sizeof(T);
      }
    }
    for (int r = 0; r < R; ++r) {
      const VF xa = in_register(hn::Load(DF(), x + r * kLanes));
      for (int c = 0; c < C; ++c) acc[r * C + c] = hn::MulAdd(a[c], xa, acc[r * C + c]);
    }
    for (int r = 0; r < R; ++r) {
      const VF xb = in_register(hn::Load(DF(), x + (R + r) * kLanes));
      for (int c = 0; c < C; ++c) acc[r * C + c] = hn::MulAdd(b[c], xb, acc[r * C + c]);
    }
    x += 2 * R * kLanes;
  }
  if (i < k) {
    for (int c = 0; c < C; ++c) {
      VF a;
      VF b;
      load_chunk_n(w + c * stride + i, k - i, a, b);
      for (int r = 0; r < R; ++r) {
        VF& sum = acc[r * C + c];
        sum = hn::MulAdd(a, hn::Load(DF(), x + r * kLanes), sum);
        sum = hn::MulAdd(b, hn::Load(DF(), x + (R + r) * kLanes), sum);
      }
    }
  }
  store_sums<C, R>(acc, apart, sums);
}

// Sums of `columns` rows of W, at most kPanel, for one tile of packed rows. The rows of a register
// tile are spread evenly over the panel, so that memory is read as C long streams: measurably
// faster than neighbouring rows, whose short streams the hardware's prefetcher loses at each tile's
// end.
template <int R, bool kPrefetch, typename T>
HWY_NOINLINE void panel_product_r(const T* w, std::int64_t columns, std::int64_t k, const T* next,
                                  const float* packed, float* sums) {
  constexpr int C = kTileColumns<R>;
  const std::int64_t apart = columns / C;
  const std::int64_t row_bytes = k * static_cast<std::int64_t>(sizeof(T));
  Ahead ahead;
  ahead.here = reinterpret_cast<std::uintptr_t>(w) + kAhead;
  ahead.left = apart * row_bytes - kAhead;
  ahead.next = reinterpret_cast<std::uintptr_t>(next) - static_cast<std::uintptr_t>(ahead.left);
  for (std::int64_t n = 0; n < apart; ++n) {
    tile_product<C, R, kPrefetch>(w + n * k, apart, k, packed, sums + n, ahead);
    ahead.here += static_cast<std::uintptr_t>(row_bytes);
    ahead.next += static_cast<std::uintptr_t>(row_bytes);
    ahead.left -= row_bytes;
  }
  for (std::int64_t n = apart * C; n < columns; ++n) {
    const std::uintptr_t on = reinterpret_cast<std::uintptr_t>(w + n * k) + kAhead;
    tile_product<1, R, kPrefetch>(w + n * k, 1, k, packed, sums + n, Ahead{on, on, 0});
  }
}

template <int R, typename T>
HWY_INLINE void panel_product_r(const T* w, std::int64_t columns, std::int64_t k, const T* next,
                                const float* packed, float* sums, bool prefetch) {
  if (prefetch) {
    panel_product_r<R, true>(w, columns, k, next, packed, sums);
  } else {
    panel_product_r<R, false>(w, columns, k, next, packed, sums);
  }
}

// `next` is the panel that follows: its first weights are requested early.
template <typename T>
HWY_INLINE void panel_product(std::int64_t tile, const T* w, std::int64_t columns, std::int64_t k,
                              const T* next, const float* packed, float* sums, bool prefetch) {
  switch (tile) {
    case 1:
      return panel_product_r<1>(w, columns, k, next, packed, sums, prefetch);
    case 2:
      return panel_product_r<2>(w, columns, k, next, packed, sums, prefetch);
    case 4:
      return panel_product_r<4>(w, columns, k, next, packed, sums, prefetch);
    default:
      if constexpr (kTileRows == 8) {
        panel_product_r<8>(w, columns, k, next, packed, sums, prefetch);
      }
  }
}

// Calls emit(row, column, count, sums...) for all rows and for columns [range.begin, range.end) of
// each of the kWeights matrices [N, K]; sums[i] are the fp32 products of `count` columns from
// `column` on with weight i. `after`, where given, is what the caller reads next: its first lines
// are requested early.
template <int kWeights, typename T, typename Emit>
void matmul(const T* const (&weights)[kWeights], Range range, std::int64_t k, std::int64_t rows,
            const float* packed, const Emit& emit, const T* after = nullptr) {
  alignas(64) float sums[kWeights][kMaxTileRows * kPanel];
  for (std::int64_t n = range.begin; n < range.end; n += kPanel) {
    const std::int64_t columns = std::min(kPanel, range.end - n);
    const float* x = packed;
    for (std::int64_t row = 0; row < rows;) {
      const std::int64_t tile = tile_rows(row, rows);
      for (int i = 0; i < kWeights; ++i) {
        const T* next = i + 1 < kWeights ? weights[i + 1] + n * k : weights[0] + (n + columns) * k;
        if (after != nullptr && i + 1 == kWeights && n + columns == range.end) next = after;
        panel_product(tile, weights[i] + n * k, columns, k, next, x, sums[i], row == 0);
      }
      for (std::int64_t r = 0; r < std::min(tile, rows - row); ++r) {
        const float* of_row[kWeights];
        for (int i = 0; i < kWeights; ++i) of_row[i] = sums[i] + r * kPanel;
        emit(row + r, n, columns, of_row);
      }
      x += tile * padded_k(k);
      row += tile;
    }
  }
}

// --- [K, N]

// Adds `steps` k steps to the running sums of V vectors of columns, `live` columns of them.
template <int V, int R, typename T>
HWY_INLINE void deep_step(const T* HWY_RESTRICT w, std::int64_t stride, std::int64_t steps,
                          std::int64_t live, const float* HWY_RESTRICT x,
                          float* HWY_RESTRICT sums) {
  VF acc[R * V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      acc[r * V + v] = hn::Load(DF(), sums + r * kWideColumns + v * kLanes);
    }
  }
  for (std::int64_t i = 0; i < steps; ++i) {
    VF wv[V];
    for (int v = 0; v < V; ++v) {
      const T* p = w + i * stride + v * kLanes;
      wv[v] = V == 1 && live < kLanes ? load_n(p, live) : load(p);
    }
    for (int r = 0; r < R; ++r) {
      const VF xr = set(x[i * R + r]);
      for (int v = 0; v < V; ++v) acc[r * V + v] = hn::MulAdd(wv[v], xr, acc[r * V + v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      hn::Store(acc[r * V + v], DF(), sums + r * kWideColumns + v * kLanes);
    }
  }
}

// Sums of `columns` columns, at most kWideColumns, for one tile of packed rows.
template <int R, typename T>
HWY_NOINLINE void wide_product(const T* w, std::int64_t stride, std::int64_t columns,
                               std::int64_t k, const float* packed, float* sums) {
  constexpr int V = kTileColumns<R>;
  for (int r = 0; r < R; ++r) {
    for (std::int64_t n = 0; n < columns; n += kLanes) {
      hn::Store(zero(), DF(), sums + r * kWideColumns + n);
    }
  }
  for (std::int64_t i = 0; i < k; i += kDeepSteps) {
    const std::int64_t steps = std::min(kDeepSteps, k - i);
    const T* wi = w + i * stride;
    const float* x = packed + i * R;
    std::int64_t n = 0;
    for (; n + V * kLanes <= columns; n += V * kLanes) {
      deep_step<V, R>(wi + n, stride, steps, V * kLanes, x, sums + n);
    }
    for (; n < columns; n += kLanes) {
      deep_step<1, R>(wi + n, stride, steps, std::min(kLanes, columns - n), x, sums + n);
    }
  }
}

// As matmul, for one weight [K, N] of `stride` columns; `sums` is kMaxTileRows * kWideColumns of
// scratch.
template <typename T, typename Emit>
void matmul_transposed(const T* weight, std::int64_t stride, Range range, std::int64_t k,
                       std::int64_t rows, const float* packed, float* sums, const Emit& emit) {
  for (std::int64_t n = range.begin; n < range.end; n += kWideColumns) {
    const std::int64_t columns = std::min(kWideColumns, range.end - n);
    const float* x = packed;
    for (std::int64_t row = 0; row < rows;) {
      const std::int64_t tile = tile_rows(row, rows);
      switch (tile) {
        case 1:
          wide_product<1>(weight + n, stride, columns, k, x, sums);
          break;
        case 2:
          wide_product<2>(weight + n, stride, columns, k, x, sums);
          break;
        case 4:
          wide_product<4>(weight + n, stride, columns, k, x, sums);
          break;
        default:
          if constexpr (kTileRows == 8) wide_product<8>(weight + n, stride, columns, k, x, sums);
      }
      for (std::int64_t r = 0; r < std::min(tile, rows - row); ++r) {
        const float* const of_row[1] = {sums + r * kWideColumns};
        emit(row + r, n, columns, of_row);
      }
      x += tile * padded_k(k);
      row += tile;
    }
  }
}

// --- What all epilogues begin with.

// round(sum + bias), bias optional; `n` live lanes.
template <typename T>
HWY_INLINE VF biased(const float* sums, const T* bias, std::int64_t n) {
  VF y = n == kLanes ? load(sums) : load_n(sums, n);
  if (bias != nullptr) y = hn::Add(y, n == kLanes ? load(bias) : load_n(bias, n));
  return rounded<T>(y);
}

template <typename T>
HWY_INLINE VF load_live(const T* p, std::int64_t n) {
  return n == kLanes ? load(p) : load_n(p, n);
}
template <typename T>
HWY_INLINE void store_live(VF v, T* p, std::int64_t n) {
  if (n == kLanes) {
    store(v, p);
  } else {
    store_n(v, p, n);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
