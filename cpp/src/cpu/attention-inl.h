// The two products of decode attention over one block of keys: scores of several queries, and the
// weighted sum of values. Included once for each instruction set.
//
// The order of every sum depends on the head's size and on a key's place in its block alone: which
// queries share a tile, and which keys share a vector, changes nothing.
#if defined(SEGKI_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEGKI_CPU_ATTENTION_INL_H_
#undef SEGKI_CPU_ATTENTION_INL_H_
#else
#define SEGKI_CPU_ATTENTION_INL_H_
#endif

#include <cstdint>

#include "cpu/norm-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {

constexpr std::int64_t kKeyBlock = 64;
// Queries that share the registers of one tile, and vectors of a value row in a tile: as many as
// leave registers for the operands.
#if HWY_TARGET == HWY_AVX3
constexpr int kTileQueries = 4;
constexpr int kTileVectors = 4;
#else
constexpr int kTileQueries = 2;
constexpr int kTileVectors = 4;
#endif

// Rows of one head in the cache, from the block's first key on; the ring continues at its start.
template <typename T>
struct BlockRows {
  const T* base;
  std::int64_t stride;
  std::int64_t length;  // of the ring
  std::int64_t first;   // index of the block's first key
  std::int64_t count;   // keys in the block
  std::int64_t size;    // elements of a row

  HWY_INLINE const T* row(std::int64_t j) const {
    const std::int64_t index = first + j;
    return base + (index < length ? index : index - length) * stride;
  }

  // Asks for a row that the other product will read; blocks of keys and values alternate, which the
  // hardware does not foresee.
  HWY_INLINE void prefetch(std::int64_t j) const {
    if (j >= count) return;
    const char* from = reinterpret_cast<const char*>(row(j));
    const std::int64_t bytes = size * static_cast<std::int64_t>(sizeof(T));
    for (std::int64_t at = 0; at < bytes; at += 64) hwy::Prefetch(from + at);
  }
};

#if HWY_TARGET == HWY_SCALAR

// scores[g][j] = q[g] . key j for kQueries queries; `stride` is that of q, kKeyBlock that of
// scores.
template <int kQueries, typename T>
void dots(const BlockRows<T>& keys, const BlockRows<T>&, const float* q, std::int64_t stride,
          std::int64_t dim, float* scores) {
  for (std::int64_t j = 0; j < keys.count; ++j) {
    const T* key = keys.row(j);
    for (int g = 0; g < kQueries; ++g) {
      VF sum = zero();
      for (std::int64_t d = 0; d < dim; ++d) {
        sum = hn::MulAdd(hn::LoadU(DF(), q + g * stride + d), load(key + d), sum);
      }
      scores[g * kKeyBlock + j] = hn::GetLane(sum);
    }
  }
}

#else

// In each 128-bit block the sums of that block of a, b, c and d.
HWY_INLINE VF fold4(VF a, VF b, VF c, VF d) {
  const hn::RepartitionToWide<DF> wide;
  const VF ab = hn::Add(hn::InterleaveLower(DF(), a, b), hn::InterleaveUpper(DF(), a, b));
  const VF cd = hn::Add(hn::InterleaveLower(DF(), c, d), hn::InterleaveUpper(DF(), c, d));
  const auto ab2 = hn::BitCast(wide, ab);
  const auto cd2 = hn::BitCast(wide, cd);
  return hn::Add(hn::BitCast(DF(), hn::InterleaveLower(wide, ab2, cd2)),
                 hn::BitCast(DF(), hn::InterleaveUpper(wide, ab2, cd2)));
}

constexpr int kQuads = static_cast<int>(kLanes / 4);

// The sums of the blocks of each quad, quad after quad.
HWY_INLINE VF fold_blocks(const VF (&quads)[kQuads]) {
  static_assert(kQuads == 1 || kQuads == 2 || kQuads == 4);
  if constexpr (kQuads == 1) {
    return quads[0];
  } else {
    const auto halves = [](VF hi, VF lo) HWY_ATTR {
      return hn::Add(hn::ConcatLowerLower(DF(), hi, lo), hn::ConcatUpperUpper(DF(), hi, lo));
    };
    if constexpr (kQuads == 2) {
      return halves(quads[1], quads[0]);
    } else {
      const VF even = halves(quads[2], quads[0]);
      const VF odd = halves(quads[3], quads[1]);
      return hn::OddEvenBlocks(hn::Add(odd, hn::SwapAdjacentBlocks(odd)),
                               hn::Add(even, hn::SwapAdjacentBlocks(even)));
    }
  }
}

// scores[g][j] = q[g] . key j for kQueries queries; `stride` is that of q, kKeyBlock that of
// scores. Scores past the block's last key are written too, up to a whole vector.
template <int kQueries, typename T>
void dots(const BlockRows<T>& keys, const BlockRows<T>& ahead, const float* HWY_RESTRICT q,
          std::int64_t stride, std::int64_t dim, float* HWY_RESTRICT scores) {
  const std::int64_t whole = dim / kLanes * kLanes;
  for (std::int64_t begin = 0; begin < keys.count; begin += kLanes) {
    VF quads[kQueries][kQuads];
    for (int quad = 0; quad < kQuads; ++quad) {
      const std::int64_t j = begin + quad * 4;
      if (j >= keys.count) {
        for (int g = 0; g < kQueries; ++g) quads[g][quad] = zero();
        continue;
      }
      const std::int64_t last = keys.count - 1;
      const T* const key[4] = {keys.row(j), keys.row(j + 1 < last ? j + 1 : last),
                               keys.row(j + 2 < last ? j + 2 : last),
                               keys.row(j + 3 < last ? j + 3 : last)};
      for (int i = 0; i < 4; ++i) ahead.prefetch(j + i);
      VF sums[kQueries][4];
      for (int g = 0; g < kQueries; ++g) {
        for (int i = 0; i < 4; ++i) sums[g][i] = zero();
      }
      for (std::int64_t d = 0; d < whole; d += kLanes) {
        VF k[4];
        for (int i = 0; i < 4; ++i) k[i] = load(key[i] + d);
        for (int g = 0; g < kQueries; ++g) {
          const VF x = hn::Load(DF(), q + g * stride + d);
          for (int i = 0; i < 4; ++i) sums[g][i] = hn::MulAdd(k[i], x, sums[g][i]);
        }
      }
      if (whole < dim) {
        VF k[4];
        for (int i = 0; i < 4; ++i) k[i] = load_n(key[i] + whole, dim - whole);
        for (int g = 0; g < kQueries; ++g) {
          const VF x = hn::Load(DF(), q + g * stride + whole);
          for (int i = 0; i < 4; ++i) sums[g][i] = hn::MulAdd(k[i], x, sums[g][i]);
        }
      }
      for (int g = 0; g < kQueries; ++g) {
        quads[g][quad] = fold4(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
      }
    }
    for (int g = 0; g < kQueries; ++g) {
      hn::Store(fold_blocks(quads[g]), DF(), scores + g * kKeyBlock + begin);
    }
  }
}

#endif

// mixed[g][d] = mixed[g][d] * decay[g] + sum over keys of weights[g][j] * value j[d], for kQueries
// queries and kVectors vectors from element d on, of which `left` elements exist.
template <int kQueries, int kVectors, typename T>
HWY_INLINE void mix_tile(const BlockRows<T>& values, const BlockRows<T>& ahead,
                         const float* HWY_RESTRICT weights, const float* decay, std::int64_t d,
                         std::int64_t left, float* HWY_RESTRICT mixed, std::int64_t stride) {
  VF sums[kQueries][kVectors];
  for (int g = 0; g < kQueries; ++g) {
    for (int v = 0; v < kVectors; ++v) {
      sums[g][v] = hn::Mul(hn::Load(DF(), mixed + g * stride + d + v * kLanes), set(decay[g]));
    }
  }
  for (std::int64_t j = 0; j < values.count; ++j) {
    const T* value = values.row(j) + d;
    if (d == 0) ahead.prefetch(j);
    VF x[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      x[v] = kVectors == 1 ? load_row(value, left) : load(value + v * kLanes);
    }
    for (int g = 0; g < kQueries; ++g) {
      const VF weight = set(weights[g * kKeyBlock + j]);
      for (int v = 0; v < kVectors; ++v) sums[g][v] = hn::MulAdd(weight, x[v], sums[g][v]);
    }
  }
  for (int g = 0; g < kQueries; ++g) {
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(sums[g][v], DF(), mixed + g * stride + d + v * kLanes);
    }
  }
}

template <int kQueries, typename T>
void mix(const BlockRows<T>& values, const BlockRows<T>& ahead, const float* weights,
         const float* decay, std::int64_t dim, float* mixed, std::int64_t stride) {
  std::int64_t d = 0;
  for (; d + kTileVectors * kLanes <= dim; d += kTileVectors * kLanes) {
    mix_tile<kQueries, kTileVectors>(values, ahead, weights, decay, d, dim - d, mixed, stride);
  }
  for (; d < dim; d += kLanes) {
    mix_tile<kQueries, 1>(values, ahead, weights, decay, d, dim - d, mixed, stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#endif  // SEGKI_CPU_ATTENTION_INL_H_
