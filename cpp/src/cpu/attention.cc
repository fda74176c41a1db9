// Decode attention on the CPU: one pass over keys and values in blocks, with a running softmax.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include <algorithm>
#include <atomic>
#include <limits>

#include "cpu/attention-inl.h"

#ifndef SEGKI_CPU_ATTENTION_SCRATCH_
#define SEGKI_CPU_ATTENTION_SCRATCH_
namespace segki::cpu {

// One part's scratch, in floats; every piece is a whole number of the widest vectors.
struct AttentionScratch {
  std::int64_t query_stride;
  std::int64_t mixed_stride;
  std::int64_t queries;
  std::int64_t scores;
  std::int64_t mixed;
  std::int64_t running;  // maximum, sum and decay of each query
  std::int64_t size;

  AttentionScratch(std::int64_t group_size, std::int64_t key_block, std::int64_t dim,
                   std::int64_t v_dim) {
    const auto whole = [](std::int64_t n) { return (n + 15) / 16 * 16; };
    query_stride = whole(dim);
    mixed_stride = whole(v_dim);
    queries = 0;
    scores = queries + group_size * query_stride;
    mixed = scores + group_size * key_block;
    running = mixed + group_size * mixed_stride;
    size = running + 3 * whole(group_size);
  }
};

constexpr std::int64_t kAttentionKeyBlock = 64;

// How the keys of one row are cut into pieces.
struct KeySplit {
  std::int64_t pieces;
  std::int64_t keys;  // in each piece but the last

  KeySplit(std::int64_t visible, std::int64_t most) {
    pieces =
        std::max(std::min(most, (visible + kMinSplitKeys - 1) / kMinSplitKeys), std::int64_t{1});
    keys = (visible + pieces - 1) / pieces;
    keys = (keys + kAttentionKeyBlock - 1) / kAttentionKeyBlock * kAttentionKeyBlock;
    if (keys > 0) pieces = std::max((visible + keys - 1) / keys, std::int64_t{1});
  }
};

}  // namespace segki::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

static_assert(kKeyBlock == kAttentionKeyBlock && kKeyBlock % kLanes == 0 && 16 % kLanes == 0);

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Running softmax of one query.
struct Running {
  float max = kLowest;
  float sum = 0.0F;
};

// Turns the block's dot products into unnormalised weights in place, and gives the factor by which
// what was summed before decays.
HWY_INLINE float softmax_block(const AttentionArgs& args, float* HWY_RESTRICT scores,
                               std::int64_t count, Running& running) {
  const DF d;
  const VF scale = set(args.scale);
  VF max = set(running.max);
  for (std::int64_t j = 0; j < count; j += kLanes) {
    VF s = hn::Mul(hn::Load(d, scores + j), scale);
    if (args.softcap != 0.0F) {
      s = hn::Mul(tanh(hn::Div(s, set(args.softcap))), set(args.softcap));
    }
    if (count - j < kLanes) {
      s = hn::IfThenElse(hn::FirstN(d, static_cast<std::size_t>(count - j)), s, set(kLowest));
    }
    hn::Store(s, d, scores + j);
    max = hn::Max(max, s);
  }
  const float new_max = hn::GetLane(hn::MaxOfLanes(d, max));
  // Where every score is -inf so far the weights are 0, and so is the sum they are divided by.
  const VF shift = set(new_max == kLowest ? 0.0F : new_max);
  VF sum = zero();
  for (std::int64_t j = 0; j < count; j += kLanes) {
    const VF weight = exp(hn::Sub(hn::Load(d, scores + j), shift));
    hn::Store(weight, d, scores + j);
    sum = hn::Add(sum, weight);
  }
  const float decay = hn::GetLane(exp(hn::Sub(set(running.max), shift)));
  running.max = new_max;
  running.sum = running.sum * decay + hn::GetLane(hn::SumOfLanes(d, sum));
  return decay;
}

// Calls run(constant, first query) for tiles of queries.
template <typename Run>
HWY_INLINE void for_tiles(std::int64_t queries, const Run& run) {
  std::int64_t g = 0;
  for (; g + kTileQueries <= queries; g += kTileQueries) {
    run(std::integral_constant<int, kTileQueries>(), g);
  }
  if constexpr (kTileQueries > 2) {
    if (g + 3 == queries) {
      run(std::integral_constant<int, 3>(), g);
      return;
    }
    if (g + 2 <= queries) {
      run(std::integral_constant<int, 2>(), g);
      g += 2;
    }
  }
  if (g < queries) run(std::integral_constant<int, 1>(), g);
}

// The queries of one row that share a key head.
template <typename T>
class Group {
 public:
  Group(const AttentionArgs& args, float* scratch)
      : args_(args),
        size_(args.q.shape[1] / args.k_cache.shape[1]),
        dim_(args.q.shape[2]),
        v_dim_(args.v_cache.shape[3]),
        layout_(size_, kKeyBlock, dim_, v_dim_),
        queries_(scratch + layout_.queries),
        scores_(scratch + layout_.scores),
        mixed_(scratch + layout_.mixed),
        decay_(scratch + layout_.running),
        running_(reinterpret_cast<Running*>(decay_ + (layout_.size - layout_.running) / 3)) {}

  // How many pieces a row has.
  std::int64_t pieces(std::int64_t row) const {
    const auto [first, end] = visible(row);
    return split(end - first).pieces;
  }

  void run(std::int64_t row, std::int64_t head, std::int64_t piece) {
    const auto [first, end] = visible(row);
    const KeySplit cut = split(end - first);
    begin(row, head);
    const std::int64_t from = first + piece * cut.keys;
    blocks(row, head, from, cut.pieces == 1 ? end : std::min(end, from + cut.keys));
    if (cut.pieces == 1 || gather(row, head, piece, cut.pieces)) finish(row, head);
  }

 private:
  struct Visible {
    std::int64_t first;
    std::int64_t end;
  };

  static std::int64_t row_value(const TensorView& view, std::int64_t row) {
    return view.as<std::int32_t>()[row * view.stride[0]];
  }

  KeySplit split(std::int64_t keys) const {
    return KeySplit(keys, args_.partial.present() ? args_.partial.shape[2] : 1);
  }

  // Keys that a row sees.
  Visible visible(std::int64_t row) const {
    const std::int64_t length = args_.k_cache.shape[2];
    const std::int64_t end = row_value(args_.lengths, row) + 1;
    // A stopped row may stand one past the last place of the cache.
    std::int64_t first = std::max(end - length, std::int64_t{0});
    if (args_.first.present()) first = std::max(first, row_value(args_.first, row));
    if (args_.window > 0) first = std::max(first, end - args_.window);
    return {first, end};
  }

  void blocks(std::int64_t row, std::int64_t head, std::int64_t first, std::int64_t end) {
    const std::int64_t length = args_.k_cache.shape[2];
    const std::int64_t slot = args_.slots.present() ? row_value(args_.slots, row) : row;
    const auto rows = [&](const TensorView& cache, std::int64_t t) HWY_ATTR {
      const std::int64_t count = std::clamp(end - t, std::int64_t{0}, kKeyBlock);
      return BlockRows<T>{
          head_of(cache, slot, head), cache.stride[2], length, t % length, count, cache.shape[3]};
    };
    for (std::int64_t t = first; t < end; t += kKeyBlock) {
      block(rows(args_.k_cache, t), rows(args_.v_cache, t), rows(args_.k_cache, t + kKeyBlock));
    }
  }

  // Leaves this piece's sums for whoever comes last, who adds up all pieces in order and gets true.
  bool gather(std::int64_t row, std::int64_t head, std::int64_t piece, std::int64_t pieces) {
    const std::int64_t width = size_ * (v_dim_ + 2);
    float* all =
        args_.partial.as<float>() + row * args_.partial.stride[0] + head * args_.partial.stride[1];
    float* mine = all + piece * width;
    for (std::int64_t g = 0; g < size_; ++g) {
      float* to = mine + g * (v_dim_ + 2);
      to[0] = running_[g].max;
      to[1] = running_[g].sum;
      std::copy_n(mixed_ + g * layout_.mixed_stride, v_dim_, to + 2);
    }
    std::atomic_ref<std::int32_t> arrived(
        args_.arrived.as<std::int32_t>()[row * args_.arrived.stride[0] + head]);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < pieces) return false;
    arrived.store(0, std::memory_order_relaxed);
    for (std::int64_t g = 0; g < size_; ++g) add_up(all + g * (v_dim_ + 2), width, pieces, g);
    return true;
  }

  // One query's sums of all pieces, `apart` floats from each other.
  void add_up(const float* from, std::int64_t apart, std::int64_t pieces, std::int64_t g) {
    float max = kLowest;
    for (std::int64_t p = 0; p < pieces; ++p) max = std::max(max, from[p * apart]);
    const VF shift = set(max == kLowest ? 0.0F : max);
    float* mixed = mixed_ + g * layout_.mixed_stride;
    std::fill_n(mixed, layout_.mixed_stride, 0.0F);
    float sum = 0.0F;
    for (std::int64_t p = 0; p < pieces; ++p) {
      const float* piece = from + p * apart;
      const VF weight = exp(hn::Sub(set(piece[0]), shift));
      sum += piece[1] * hn::GetLane(weight);
      for (std::int64_t d = 0; d < v_dim_; d += kLanes) {
        const VF value = load_row(piece + 2 + d, v_dim_ - d);
        hn::Store(hn::MulAdd(value, weight, hn::Load(DF(), mixed + d)), DF(), mixed + d);
      }
    }
    running_[g] = Running{max, sum};
  }

  static const T* head_of(const TensorView& cache, std::int64_t slot, std::int64_t head) {
    return cache.as<const T>() + slot * cache.stride[0] + head * cache.stride[1];
  }

  void begin(std::int64_t row, std::int64_t head) {
    std::fill(mixed_, mixed_ + size_ * layout_.mixed_stride, 0.0F);
    for (std::int64_t g = 0; g < size_; ++g) {
      running_[g] = Running();
      const T* q =
          args_.q.as<const T>() + row * args_.q.stride[0] + (head * size_ + g) * args_.q.stride[1];
      for (std::int64_t d = 0; d < dim_; d += kLanes) {
        hn::Store(load_row(q + d, dim_ - d), DF(), queries_ + g * layout_.query_stride + d);
      }
    }
  }

  void block(const BlockRows<T>& keys, const BlockRows<T>& values, const BlockRows<T>& next_keys) {
    BlockRows<T> nothing = keys;
    nothing.count = 0;
    for_tiles(size_, [&](auto tile, std::int64_t g) {
      dots<tile()>(keys, g == 0 ? values : nothing, queries_ + g * layout_.query_stride,
                   layout_.query_stride, dim_, scores_ + g * kKeyBlock);
    });
    for (std::int64_t g = 0; g < size_; ++g) {
      decay_[g] = softmax_block(args_, scores_ + g * kKeyBlock, keys.count, running_[g]);
    }
    for_tiles(size_, [&](auto tile, std::int64_t g) {
      mix<tile()>(values, g == 0 ? next_keys : nothing, scores_ + g * kKeyBlock, decay_ + g, v_dim_,
                  mixed_ + g * layout_.mixed_stride, layout_.mixed_stride);
    });
  }

  void finish(std::int64_t row, std::int64_t head) {
    for (std::int64_t g = 0; g < size_; ++g) {
      const VF sum = set(running_[g].sum);
      T* out = args_.out.as<T>() + row * args_.out.stride[0] + (head * size_ + g) * v_dim_;
      const T* gate = nullptr;
      if (args_.gate.present()) {
        gate = args_.gate.as<const T>() + row * args_.gate.stride[0] + head * args_.gate.stride[1] +
               g * args_.gate.stride[2];
      }
      const bool biased = args_.gate_bias.present();
      const VF bias = biased ? set(gate_bias(head * size_ + g)) : zero();
      for (std::int64_t d = 0; d < v_dim_; d += kLanes) {
        const std::int64_t left = v_dim_ - d;
        VF y = hn::Div(hn::Load(DF(), mixed_ + g * layout_.mixed_stride + d), sum);
        if (gate != nullptr) {
          VF z = load_row(gate + d, left);
          if (biased) z = rounded<T>(hn::Add(z, bias));
          y = hn::Mul(rounded<T>(y), rounded<T>(sigmoid(z)));
        }
        store_row(y, out + d, left);
      }
    }
  }

  float gate_bias(std::int64_t query_head) const {
    return hn::GetLane(
        load_row(args_.gate_bias.as<const T>() + query_head * args_.gate_bias.stride[0], 1));
  }

  const AttentionArgs& args_;
  std::int64_t size_;
  std::int64_t dim_;
  std::int64_t v_dim_;
  AttentionScratch layout_;
  float* queries_;
  float* scores_;
  float* mixed_;
  float* decay_;
  Running* running_;
};

template <typename T>
void run(const AttentionArgs& args, const Exec& exec) {
  const std::int64_t rows = args.q.shape[0], heads = args.k_cache.shape[1];
  Group<T> group(args, static_cast<float*>(exec.scratch));
  std::int64_t units = 0;  // pieces of all rows and heads
  for (std::int64_t row = 0; row < rows; ++row) units += heads * group.pieces(row);
  const Range mine = part_range(units, 1, exec.part, exec.parts);
  std::int64_t before = 0;  // units of earlier rows
  for (std::int64_t row = 0; row < rows && before < mine.end; ++row) {
    const std::int64_t pieces = group.pieces(row);
    const std::int64_t begin = std::max(mine.begin - before, std::int64_t{0});
    const std::int64_t end = std::min(mine.end - before, heads * pieces);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      group.run(row, unit / pieces, unit % pieces);
    }
    before += heads * pieces;
  }
}

}  // namespace

std::int32_t attention(const AttentionArgs* args, const Exec* exec) {
  return with_type(args->q.dtype,
                   [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(*args, *exec); });
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<AttentionArgs> attention_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, attention);
}

std::size_t attention_scratch_bytes(const AttentionArgs& args) {
  const AttentionScratch layout(args.q.shape[1] / args.k_cache.shape[1], kAttentionKeyBlock,
                                args.q.shape[2], args.v_cache.shape[3]);
  return static_cast<std::size_t>(layout.size) * sizeof(float);
}

}  // namespace segki::cpu
#endif  // HWY_ONCE
