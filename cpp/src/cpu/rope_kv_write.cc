// Query and key norm, rotary embedding and the cache write on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/rope_kv_write.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

// Rotation of a head's first 2 * half elements; out may be x.
struct Rope {
  const float* cos;
  const float* sin;
  std::int64_t half;
  RopeKind kind;
  bool round_products;

  template <typename T>
  HWY_INLINE void turn(std::int64_t j, std::int64_t left, VF& a, VF& b) const {
    const VF c = load_row(cos + j, left);
    const VF s = load_row(sin + j, left);
    VF ac = hn::Mul(a, c), bs = hn::Mul(b, s), bc = hn::Mul(b, c), as = hn::Mul(a, s);
    if (round_products) {
      ac = rounded<T>(ac);
      bs = rounded<T>(bs);
      bc = rounded<T>(bc);
      as = rounded<T>(as);
    }
    a = hn::Sub(ac, bs);
    b = hn::Add(bc, as);
  }

  template <typename T>
  void head(const T* x, T* out, std::int64_t size) const {
    for (std::int64_t j = 0; j < half; j += kLanes) {
      const std::int64_t left = half - j;
      if (kind == RopeKind::kNeox) {
        VF a = load_row(x + j, left);
        VF b = load_row(x + half + j, left);
        turn<T>(j, left, a, b);
        store_row(a, out + j, left);
        store_row(b, out + half + j, left);
        continue;
      }
      const std::int64_t pairs = std::min(left, kLanes);
      HWY_ALIGN float mixed[2 * kLanes], first[kLanes], second[kLanes];
      hn::Store(load_row(x + 2 * j, 2 * left), DF(), mixed);
      hn::Store(2 * left > kLanes ? load_row(x + 2 * j + kLanes, 2 * left - kLanes) : zero(), DF(),
                mixed + kLanes);
      for (std::int64_t i = 0; i < kLanes; ++i) {
        first[i] = mixed[2 * i];
        second[i] = mixed[2 * i + 1];
      }
      VF a = hn::Load(DF(), first);
      VF b = hn::Load(DF(), second);
      turn<T>(j, left, a, b);
      hn::Store(a, DF(), first);
      hn::Store(b, DF(), second);
      for (std::int64_t i = 0; i < kLanes; ++i) {
        mixed[2 * i] = first[i];
        mixed[2 * i + 1] = second[i];
      }
      for (std::int64_t i = 0; i < 2 * pairs; i += kLanes) {
        store_row(hn::Load(DF(), mixed + i), out + 2 * j + i, 2 * pairs - i);
      }
    }
    if (out != x) std::copy(x + 2 * half, x + size, out + 2 * half);
  }
};

// The heads of one row's q or k, from where the projection left them to where they belong. `out`
// takes each stage's result: every stage ends with a rounding.
template <typename T>
struct Heads {
  const T* x;
  T* out;
  std::int64_t groups, group_size, dim;
  std::int64_t group_stride, head_stride;          // of x
  std::int64_t out_group_stride, out_head_stride;  // of out

  // visit(source, target, index of the head) for each head of groups [begin, end).
  template <typename Visit>
  HWY_INLINE void each(std::int64_t begin, std::int64_t end, const Visit& visit) const {
    for (std::int64_t g = begin; g < end; ++g) {
      for (std::int64_t h = 0; h < group_size; ++h) {
        visit(x + g * group_stride + h * head_stride,
              out + g * out_group_stride + h * out_head_stride, g * group_size + h);
      }
    }
  }
};

// What happens to the heads of q or of k.
template <typename T>
struct HeadStages {
  NormSpec norm;
  const TensorView& weight;
  const TensorView& bias;
  bool norm_full_width;
  bool norm_after_rope;
  Rope rope;
  bool has_scale;
  float scale;

  // Weight or bias of one head; null when absent.
  HWY_INLINE const T* of_head(const TensorView& view, std::int64_t head, std::int64_t dim) const {
    if (!view.present()) return nullptr;
    if (norm_full_width) return view.as<const T>() + head * dim;
    return view.as<const T>() + (view.rank == 2 ? head * view.stride[0] : 0);
  }

  // `in_place`: an earlier stage has already written to the target.
  HWY_INLINE void normalise(const Heads<T>& heads, std::int64_t begin, std::int64_t end,
                            bool in_place) const {
    RowStatistics statistics;
    if (norm_full_width) {
      statistics = row_statistics(norm, (end - begin) * heads.group_size * heads.dim,
                                  [&](const auto& visit) {
                                    heads.each(begin, end, [&](const T* x, T* out, std::int64_t) {
                                      visit(in_place ? out : x, heads.dim);
                                    });
                                  });
    }
    heads.each(begin, end, [&](const T* x, T* out, std::int64_t head) {
      const T* from = in_place ? out : x;
      const T* w = of_head(weight, head, heads.dim);
      const T* b = of_head(bias, head, heads.dim);
      if (norm_full_width) {
        apply_norm(norm, statistics, from, w, b, out, heads.dim);
      } else {
        norm_row(norm, from, w, b, out, heads.dim);
      }
    });
  }

  void run(const Heads<T>& heads, std::int64_t begin, std::int64_t end) const {
    bool in_place = false;
    const bool has_norm = norm.kind != NormKind::kNone;
    if (has_norm && !norm_after_rope) {
      normalise(heads, begin, end, in_place);
      in_place = true;
    }
    if (rope.kind != RopeKind::kNone) {
      heads.each(begin, end, [&](const T* x, T* out, std::int64_t) {
        rope.head(in_place ? out : x, out, heads.dim);
      });
      in_place = true;
    }
    if (has_norm && norm_after_rope) {
      normalise(heads, begin, end, in_place);
      in_place = true;
    }
    if (!has_scale && in_place) return;
    heads.each(begin, end, [&](const T* x, T* out, std::int64_t) {
      const T* from = in_place ? out : x;
      if (!has_scale) {
        std::copy(from, from + heads.dim, out);
        return;
      }
      for (std::int64_t i = 0; i < heads.dim; i += kLanes) {
        const std::int64_t left = heads.dim - i;
        store_row(hn::Mul(load_row(from + i, left), set(scale)), out + i, left);
      }
    });
  }
};

template <typename T>
void run(const RopeKvWriteArgs& args, const Exec& exec) {
  const std::int64_t rows = args.q.shape[0];
  const std::int64_t groups = args.q.shape[1];
  const std::int64_t group_size = args.q.shape[2];
  const std::int64_t dim = args.q.shape[3];
  const std::int64_t v_dim = args.v.shape[2];
  const bool full_width = args.norm_full_width != 0;
  // With a norm over all heads a row's q and its k are one piece of work each, else each group.
  const std::int64_t pieces = full_width ? 3 : groups;
  const Range items = part_range(rows * pieces, 1, exec.part, exec.parts);

  for (std::int64_t item = items.begin; item < items.end; ++item) {
    const std::int64_t r = item / pieces;
    const std::int64_t piece = item % pieces;
    const std::int64_t begin = full_width ? 0 : piece;
    const std::int64_t end = full_width ? groups : piece + 1;

    const auto row_value = [r](const TensorView& view) {
      return std::int64_t{view.as<std::int32_t>()[r * view.stride[0]]};
    };
    const std::int64_t slot = args.slots.present() ? row_value(args.slots) : r;
    const std::int64_t index = row_value(args.lengths) % args.k_cache.shape[2];
    Rope rope = {nullptr, nullptr, 0, args.rope, args.round_products != 0};
    float scale = 1.0F;
    if (rope.kind != RopeKind::kNone || args.position_scale.present()) {
      // A stopped row keeps its position, which may be one past the table.
      const std::int64_t position = std::max(row_value(args.positions), std::int64_t{0});
      if (rope.kind != RopeKind::kNone) {
        const std::int64_t p = std::min(position, args.cos.shape[0] - 1);
        rope.cos = args.cos.as<const float>() + p * args.cos.stride[0];
        rope.sin = args.sin.as<const float>() + p * args.sin.stride[0];
        rope.half = args.cos.shape[1];
      }
      if (args.position_scale.present()) {
        const std::int64_t p = std::min(position, args.position_scale.shape[0] - 1);
        scale = args.position_scale.as<const float>()[p * args.position_scale.stride[0]];
      }
    }

    if (!full_width || piece == 0) {
      const Heads<T> q = {args.q.as<const T>() + r * args.q.stride[0],
                          args.q_out.as<T>() + r * args.q_out.stride[0],
                          groups,
                          group_size,
                          dim,
                          args.q.stride[1],
                          args.q.stride[2],
                          group_size * args.q_out.stride[1],
                          args.q_out.stride[1]};
      HeadStages<T>{args.q_norm,
                    args.q_weight,
                    args.q_bias,
                    full_width,
                    args.norm_after_rope != 0,
                    rope,
                    args.position_scale.present(),
                    scale}
          .run(q, begin, end);
    }
    if (!full_width || piece == 1) {
      const Heads<T> k = {
          args.k.as<const T>() + r * args.k.stride[0],
          args.k_cache.as<T>() + slot * args.k_cache.stride[0] + index * args.k_cache.stride[2],
          groups,
          1,
          dim,
          args.k.stride[1],
          0,
          args.k_cache.stride[1],
          0};
      HeadStages<T>{args.k_norm, args.k_weight, args.k_bias, full_width, args.norm_after_rope != 0,
                    rope,        false,         1.0F}
          .run(k, begin, end);
    }
    if (!full_width || piece == 2) {
      for (std::int64_t h = begin; h < end; ++h) {
        const T* v = args.v.as<const T>() + r * args.v.stride[0] + h * args.v.stride[1];
        std::copy(v, v + v_dim,
                  args.v_cache.as<T>() + slot * args.v_cache.stride[0] +
                      h * args.v_cache.stride[1] + index * args.v_cache.stride[2]);
      }
    }
  }
}

}  // namespace

std::int32_t rope_kv_write(const RopeKvWriteArgs* args, const Exec* exec) {
  return with_type(args->q.dtype,
                   [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(*args, *exec); });
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<RopeKvWriteArgs> rope_kv_write_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, rope_kv_write);
}

std::size_t rope_kv_write_scratch_bytes(const RopeKvWriteArgs&) { return 0; }

}  // namespace segki::cpu
#endif  // HWY_ONCE
