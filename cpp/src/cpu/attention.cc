// Decode attention on the CPU: one pass over keys and values in blocks, with a running softmax.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
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

  void run(std::int64_t row, std::int64_t head) {
    const auto row_value = [row](const TensorView& view) {
      return std::int64_t{view.as<std::int32_t>()[row * view.stride[0]]};
    };
    const std::int64_t length = args_.k_cache.shape[2];
    const std::int64_t end = row_value(args_.lengths) + 1;
    // A stopped row may stand one past the last place of the cache.
    std::int64_t first = std::max(end - length, std::int64_t{0});
    if (args_.first.present()) first = std::max(first, row_value(args_.first));
    if (args_.window > 0) first = std::max(first, end - args_.window);
    const std::int64_t slot = args_.slots.present() ? row_value(args_.slots) : row;

    begin(row, head);
    const auto rows = [&](const TensorView& cache, std::int64_t t) HWY_ATTR {
      const std::int64_t count = std::clamp(end - t, std::int64_t{0}, kKeyBlock);
      return BlockRows<T>{
          head_of(cache, slot, head), cache.stride[2], length, t % length, count, cache.shape[3]};
    };
    for (std::int64_t t = first; t < end; t += kKeyBlock) {
      block(rows(args_.k_cache, t), rows(args_.v_cache, t), rows(args_.k_cache, t + kKeyBlock));
    }
    finish(row, head);
  }

 private:
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
      for (std::int64_t d = 0; d < v_dim_; d += kLanes) {
        const std::int64_t left = v_dim_ - d;
        VF y = hn::Div(hn::Load(DF(), mixed_ + g * layout_.mixed_stride + d), sum);
        if (gate != nullptr) {
          y = hn::Mul(rounded<T>(y), rounded<T>(sigmoid(load_row(gate + d, left))));
        }
        store_row(y, out + d, left);
      }
    }
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
  const std::int64_t heads = args.k_cache.shape[1];
  const Range items = part_range(args.q.shape[0] * heads, 1, exec.part, exec.parts);
  Group<T> group(args, static_cast<float*>(exec.scratch));
  for (std::int64_t item = items.begin; item < items.end; ++item) {
    group.run(item / heads, item % heads);
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
