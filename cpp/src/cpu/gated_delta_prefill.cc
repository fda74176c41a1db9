// GatedDeltaNet over whole prompts on the CPU.
//
// The gated delta rule in chunks (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024). With c_i
// the sum of the log decays of a chunk's tokens up to i and S the state before the chunk, the
// updates u of the chunk's tokens solve a unit lower triangular system,
//   u_i + sum_{j < i} beta_i exp(c_i - c_j) (k_i . k_j) u_j = beta_i (v_i - exp(c_i) S^T k_i),
// and then
//   o_i = exp(c_i) S^T q_i + sum_{j <= i} exp(c_i - c_j) (q_i . k_j) u_j,
//   S' = exp(c_last) S + sum_j exp(c_last - c_j) k_j u_j^T.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gated_delta_prefill.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/gated_delta_prefill-inl.h"

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

#ifndef SEGKI_CPU_GATED_DELTA_PREFILL_FLUSH_
#define SEGKI_CPU_GATED_DELTA_PREFILL_FLUSH_
namespace segki::cpu {

// While alive, this thread's results below the smallest normal number are 0: what has decayed that
// far would slow every product down tenfold.
class FlushSubnormals {
 public:
#if defined(__x86_64__) || defined(__i386__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlush); }
  ~FlushSubnormals() { _mm_setcsr((_mm_getcsr() & ~kFlush) | (before_ & kFlush)); }
#else
  FlushSubnormals() = default;
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

#if defined(__x86_64__) || defined(__i386__)
 private:
  static constexpr unsigned kFlush = 0x8000;
  const unsigned before_;
#endif
};

}  // namespace segki::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {
namespace {

// A decay of exp(-110) is 0 in fp32; less would only cost precision in sums of log decays.
constexpr float kLowestLogDecay = -110.0F;

// Some value heads of one key head over one sequence.
template <typename T>
class Scan {
 public:
  Scan(const GatedDeltaPrefillArgs& args, float* scratch)
      : args_(args),
        key_heads_(args.q.shape[1]),
        key_dim_(args.q.shape[2]),
        group_(args.v.shape[2]),
        value_dim_(args.v.shape[3]),
        width_(args.conv_weight.shape[1]),
        layout_(key_dim_, group_, value_dim_),
        scratch_(scratch),
        beta_(scratch + layout_.numbers),
        from_begin_(beta_ + kScanChunk),
        to_end_(from_begin_ + kScanChunk),
        log_high_(to_end_ + kScanChunk),
        log_low_(log_high_ + kScanChunk) {
    // Padding takes part in products and stays zero.
    std::fill(scratch, scratch + layout_.size, 0.0F);
  }

  // Value heads [first, last) of key head `head`.
  void run(std::int64_t sequence, std::int64_t head, std::int64_t first, std::int64_t last) {
    sequence_ = sequence;
    head_ = head;
    begin_ = number(args_.begins);
    end_ = number(args_.ends);
    for (std::int64_t g = first; g < last; ++g) load_state(g);
    for (token_ = begin_; token_ < end_; token_ += kScanChunk) {
      tokens_ = std::min(kScanChunk, end_ - token_);
      rows_ = (tokens_ + kTileTokens - 1) / kTileTokens * kTileTokens;
      prepare_keys();
      for (std::int64_t g = first; g < last; ++g) advance_head(g);
    }
    for (std::int64_t g = first; g < last; ++g) store_state(g);
    if (args_.conv_state.present()) {
      if (first == 0) {
        store_inputs(queries());
        store_inputs(keys());
      }
      for (std::int64_t g = first; g < last; ++g) store_inputs(values(g));
    }
  }

 private:
  // Inputs of the convolution that belong together: token t's are at x + t * stride.
  struct Channels {
    const T* x;
    std::int64_t stride;
    std::int64_t first;  // among all channels
    std::int64_t count;
  };

  float* at(std::int64_t offset) const { return scratch_ + offset; }
  std::int64_t number(const TensorView& view) const {
    return view.as<const std::int32_t>()[sequence_ * view.stride[0]];
  }
  static const T* token_of(const TensorView& view, std::int64_t token, std::int64_t head,
                           std::int64_t g) {
    return view.as<const T>() + token * view.stride[0] + head * view.stride[1] + g * view.stride[2];
  }

  Channels queries() const {
    return {token_of(args_.q, 0, head_, 0), args_.q.stride[0], head_ * key_dim_, key_dim_};
  }
  Channels keys() const {
    return {token_of(args_.k, 0, head_, 0), args_.k.stride[0], (key_heads_ + head_) * key_dim_,
            key_dim_};
  }
  Channels values(std::int64_t g) const {
    return {token_of(args_.v, 0, head_, g), args_.v.stride[0],
            2 * key_heads_ * key_dim_ + (head_ * group_ + g) * value_dim_, value_dim_};
  }

  // The last inputs [W] of a channel before the sequence.
  T* inputs_of(std::int64_t channel) const {
    return args_.conv_state.as<T>() + (sequence_ * args_.conv_weight.shape[0] + channel) * width_;
  }

  bool has_past() const { return args_.continued != 0 && args_.conv_state.present(); }

  // Inputs of channels [c, c + kLanes) at a token before the sequence.
  HWY_INLINE VF past(const Channels& channels, std::int64_t c, std::int64_t token) const {
    if (!has_past()) return zero();
    HWY_ALIGN float lanes[kLanes] = {};
    for (std::int64_t i = 0; i < std::min(kLanes, channels.count - c); ++i) {
      lanes[i] = load_one(inputs_of(channels.first + c + i) + width_ - (begin_ - token));
    }
    return hn::Load(DF(), lanes);
  }

  // The chunk's convolution with its activation: out[token, channel], padding rows zero.
  void convolve(const Channels& channels, float* out, std::int64_t stride) const {
    if (args_.conv_activation == Activation::kSilu) {
      convolve(channels, out, stride,
               [](VF v) HWY_ATTR { return activate<Activation::kSilu, T>(v); });
    } else {
      const Activation activation = args_.conv_activation;
      convolve(channels, out, stride,
               [activation](VF v) HWY_ATTR { return activate<T>(activation, v); });
    }
  }

  template <typename Activate>
  HWY_INLINE void convolve(const Channels& channels, float* out, std::int64_t stride,
                           const Activate& activate_lanes) const {
    HWY_ALIGN float inputs[(kScanChunk + kMaxConvWidth - 1) * kLanes];
    HWY_ALIGN float taps[kMaxConvWidth * kLanes];
    const std::int64_t before = width_ - 1;
    for (std::int64_t c = 0; c < channels.count; c += kLanes) {
      const std::int64_t left = channels.count - c;
      const T* weight = args_.conv_weight.as<const T>() + (channels.first + c) * width_;
      for (std::int64_t i = 0; i < kLanes; ++i) {
        for (std::int64_t j = 0; j < width_; ++j) {
          taps[j * kLanes + i] = i < left ? load_one(weight + i * width_ + j) : 0.0F;
        }
      }
      for (std::int64_t i = 0; i < before + tokens_; ++i) {
        const std::int64_t token = token_ - before + i;
        hn::Store(token < begin_ ? past(channels, c, token)
                                 : load_row(channels.x + token * channels.stride + c, left),
                  DF(), inputs + i * kLanes);
      }
      const VF bias = args_.conv_bias.present()
                          ? load_row(args_.conv_bias.as<const T>() + channels.first + c, left)
                          : zero();
      for (std::int64_t i = 0; i < tokens_; ++i) {
        VF sum = zero();
        for (std::int64_t j = 0; j < width_; ++j) {
          sum = hn::MulAdd(hn::Load(DF(), inputs + (i + j) * kLanes),
                           hn::Load(DF(), taps + j * kLanes), sum);
        }
        sum = hn::Add(sum, bias);
        store_row(activate_lanes(rounded<T>(sum)), out + i * stride + c, left);
      }
    }
    std::fill(out + tokens_ * stride, out + rows_ * stride, 0.0F);
  }

  // What the value heads share: q, k and their products.
  void prepare_keys() {
    float* q = at(layout_.queries);
    float* k = at(layout_.keys);
    const std::int64_t stride = layout_.key_stride;
    convolve(queries(), q, stride);
    convolve(keys(), k, stride);
    for (std::int64_t i = 0; i < tokens_; ++i) {
      l2_normalise(q + i * stride, key_dim_, args_.l2_eps, args_.query_scale);
      l2_normalise(k + i * stride, key_dim_, args_.l2_eps, 1.0F);
    }
    float* columns = at(layout_.keys_by_column);
    for (std::int64_t d = 0; d < key_dim_; ++d) {
      for (std::int64_t i = 0; i < rows_; ++i) columns[d * kScanChunk + i] = k[i * stride + d];
    }
    product({k, stride, 1}, columns, kScanChunk, rows_, rows_, key_dim_, true,
            at(layout_.key_products));
    product({q, stride, 1}, columns, kScanChunk, rows_, rows_, key_dim_, true,
            at(layout_.query_products));
  }

  // beta, and sums of log decays as two floats each: neighbours' differences stay exact far from 0.
  void prepare_numbers(std::int64_t g) {
    const std::int64_t head = head_ * group_ + g;
    double sum = 0.0;
    for (std::int64_t i = 0; i < kScanChunk; ++i) {
      beta_[i] = 0.0F;
      if (i < tokens_) {
        const Gates gates = gates_of(args_, load_one(token_of(args_.a, token_ + i, head_, g)),
                                     load_one(token_of(args_.b, token_ + i, head_, g)), head);
        beta_[i] = gates.beta;
        sum += gates.log_decay < kLowestLogDecay ? kLowestLogDecay : gates.log_decay;
      }
      log_high_[i] = static_cast<float>(sum);
      log_low_[i] = static_cast<float>(sum - static_cast<double>(log_high_[i]));
    }
    const VF high = set(log_high_[kScanChunk - 1]);
    const VF low = set(log_low_[kScanChunk - 1]);
    for (std::int64_t i = 0; i < kScanChunk; i += kLanes) {
      const VF h = hn::Load(DF(), log_high_ + i);
      const VF l = hn::Load(DF(), log_low_ + i);
      hn::Store(exp(hn::Add(h, l)), DF(), from_begin_ + i);
      hn::Store(exp(hn::Add(hn::Sub(high, h), hn::Sub(low, l))), DF(), to_end_ + i);
    }
  }

  void prepare_couplings() {
    float* coupling = at(layout_.coupling);
    float* mixing = at(layout_.mixing);
    const float* kk = at(layout_.key_products);
    const float* qk = at(layout_.query_products);
    for (std::int64_t i = 0; i < rows_; ++i) {
      const VF high = set(log_high_[i]);
      const VF low = set(log_low_[i]);
      const VF beta = set(beta_[i]);
      const std::int64_t columns = i / kTileTokens * kTileTokens + kTileTokens;
      for (std::int64_t j = 0; j < columns; j += kLanes) {
        const std::int64_t to = i * kScanChunk + j;
        const std::int64_t earlier = std::clamp(i - j, std::int64_t{0}, kLanes);
        const std::int64_t live = std::clamp(i + 1 - j, std::int64_t{0}, kLanes);
        const VF decay = exp(hn::Add(hn::Sub(high, hn::Load(DF(), log_high_ + j)),
                                     hn::Sub(low, hn::Load(DF(), log_low_ + j))));
        const VF key = hn::Mul(hn::Mul(beta, hn::Load(DF(), kk + to)), decay);
        const VF query = hn::Mul(hn::Load(DF(), qk + to), decay);
        const auto first = [](std::int64_t n)
                               HWY_ATTR { return hn::FirstN(DF(), static_cast<std::size_t>(n)); };
        hn::Store(hn::IfThenElseZero(first(earlier), key), DF(), coupling + to);
        hn::Store(hn::IfThenElseZero(first(live), query), DF(), mixing + to);
      }
    }
  }

  // One value head over the chunk.
  void advance_head(std::int64_t g) {
    const std::int64_t stride = layout_.value_stride, columns = layout_.value_columns;
    float* state = at(layout_.states) + g * layout_.state_size;
    float* v = at(layout_.values);
    float* o = at(layout_.outputs);
    float* seen = at(layout_.seen);
    convolve(values(g), v, stride);
    prepare_numbers(g);
    prepare_couplings();
    if (token_ == begin_ && !has_state()) {
      std::fill(seen, seen + rows_ * stride, 0.0F);
      std::fill(o, o + rows_ * stride, 0.0F);
    } else {
      const std::int64_t key_stride = layout_.key_stride;
      product({at(layout_.keys), key_stride, 1}, state, stride, rows_, columns, key_dim_, false,
              seen);
      product({at(layout_.queries), key_stride, 1}, state, stride, rows_, columns, key_dim_, false,
              o);
    }
    solve(at(layout_.coupling), {beta_, from_begin_, to_end_}, seen, stride, rows_, columns, v,
          at(layout_.carried));
    mix(at(layout_.mixing), from_begin_, v, stride, rows_, columns, o);
    if (token_ + tokens_ < end_ || args_.state.present()) {
      advance_state(at(layout_.keys), layout_.key_stride, at(layout_.carried), stride, tokens_,
                    from_begin_[kScanChunk - 1], key_dim_, columns, state);
    }
    for (std::int64_t i = 0; i < tokens_; ++i) {
      gated_norm(args_.norm, args_.norm_weight.as<const T>(), args_.gate_activation, o + i * stride,
                 token_of(args_.z, token_ + i, head_, g),
                 args_.out.as<T>() + (token_ + i) * args_.out.stride[0] +
                     (head_ * group_ + g) * value_dim_,
                 value_dim_);
    }
  }

  bool has_state() const { return args_.continued != 0 && args_.state.present(); }

  float* state_of(std::int64_t g) const {
    return args_.state.as<float>() +
           ((sequence_ * key_heads_ + head_) * group_ + g) * key_dim_ * value_dim_;
  }

  void load_state(std::int64_t g) {
    float* state = at(layout_.states) + g * layout_.state_size;
    if (!has_state()) {
      std::fill(state, state + layout_.state_size, 0.0F);
      return;
    }
    const float* from = state_of(g);
    for (std::int64_t d = 0; d < key_dim_; ++d) {
      std::copy(from + d * value_dim_, from + (d + 1) * value_dim_,
                state + d * layout_.value_stride);
    }
  }

  void store_state(std::int64_t g) const {
    if (!args_.state.present()) return;
    const float* state = at(layout_.states) + g * layout_.state_size;
    float* to = state_of(g);
    for (std::int64_t d = 0; d < key_dim_; ++d) {
      std::copy(state + d * layout_.value_stride, state + d * layout_.value_stride + value_dim_,
                to + d * value_dim_);
    }
  }

  // The last W inputs of each channel; what is older than the sequence moves to the left.
  void store_inputs(const Channels& channels) const {
    for (std::int64_t c = 0; c < channels.count; ++c) {
      T* inputs = inputs_of(channels.first + c);
      for (std::int64_t j = 0; j < width_; ++j) {
        const std::int64_t token = end_ - width_ + j;
        if (token >= begin_) {
          inputs[j] = channels.x[token * channels.stride + c];
        } else {
          inputs[j] = args_.continued != 0 ? inputs[width_ - (begin_ - token)] : T{};
        }
      }
    }
  }

  const GatedDeltaPrefillArgs& args_;
  const std::int64_t key_heads_;
  const std::int64_t key_dim_;
  const std::int64_t group_;
  const std::int64_t value_dim_;
  const std::int64_t width_;
  const PrefillScratch layout_;
  float* const scratch_;
  float* const beta_;
  float* const from_begin_;
  float* const to_end_;
  float* const log_high_;
  float* const log_low_;

  std::int64_t sequence_ = 0;
  std::int64_t head_ = 0;
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  std::int64_t token_ = 0;   // first of the chunk
  std::int64_t tokens_ = 0;  // of the chunk
  std::int64_t rows_ = 0;    // tokens_ as whole tiles
};

// Zero output for the tokens [token, end) that are in no sequence.
template <typename T>
void clear_gaps(const GatedDeltaPrefillArgs& args, std::int64_t token, std::int64_t end) {
  const std::int64_t sequences = args.begins.shape[0];
  while (token < end) {
    std::int64_t next = end;      // begin of the next sequence
    std::int64_t inside = token;  // end of the sequence that the token is in
    for (std::int64_t s = 0; s < sequences; ++s) {
      const std::int64_t from = args.begins.as<const std::int32_t>()[s * args.begins.stride[0]];
      const std::int64_t to = args.ends.as<const std::int32_t>()[s * args.ends.stride[0]];
      if (from <= token && token < to) inside = to;
      if (from > token && from < to) next = std::min(next, from);
    }
    if (inside > token) {
      token = inside;
      continue;
    }
    for (; token < next; ++token) {
      T* row = args.out.as<T>() + token * args.out.stride[0];
      std::fill(row, row + args.out.shape[1], T{});
    }
  }
}

template <typename T>
void run(const GatedDeltaPrefillArgs& args, const Exec& exec) {
  const std::int64_t sequences = args.begins.shape[0];
  const std::int64_t key_heads = args.q.shape[1], group = args.v.shape[2];
  // Where a key head's value heads are apart, the first of them writes the inputs that all of them
  // would start from.
  const bool apart =
      sequences * key_heads < exec.parts && !(args.continued != 0 && args.conv_state.present());
  const std::int64_t pieces = apart ? group : 1;
  const Range gaps = part_range(args.q.shape[0], 1, exec.part, exec.parts);
  clear_gaps<T>(args, gaps.begin, gaps.end);
  const Range units = part_range(key_heads * pieces * sequences, 1, exec.part, exec.parts);
  if (units.begin == units.end) return;
  const FlushSubnormals flush;
  Scan<T> scan(args, static_cast<float*>(exec.scratch));
  for (std::int64_t u = units.begin; u < units.end; ++u) {
    const std::int64_t piece = u / sequences % pieces;
    scan.run(u % sequences, u / sequences / pieces, apart ? piece : 0, apart ? piece + 1 : group);
  }
}

}  // namespace

std::int32_t gated_delta_prefill(const GatedDeltaPrefillArgs* args, const Exec* exec) {
  return with_type(args->q.dtype,
                   [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(*args, *exec); });
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<GatedDeltaPrefillArgs> gated_delta_prefill_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, gated_delta_prefill);
}

std::size_t gated_delta_prefill_scratch_bytes(const GatedDeltaPrefillArgs& args) {
  const PrefillScratch layout(args.q.shape[2], args.v.shape[2], args.v.shape[3]);
  return static_cast<std::size_t>(layout.size) * sizeof(float);
}

}  // namespace segki::cpu
#endif  // HWY_ONCE
