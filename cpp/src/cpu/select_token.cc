// The step's choice of the next token on the CPU.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/select_token.cc"
#include "cpu/targets.h"
#include "hwy/foreach_target.h"
// After foreach_target.h
#include "cpu/argmax-inl.h"
#include "cpu/kernels.h"
#include "segki/stop.h"

HWY_BEFORE_NAMESPACE();
namespace segki::cpu {
namespace HWY_NAMESPACE {

// The lowest eos id in [from, end), or end.
inline std::int64_t next_eos(const TensorView& eos, std::int64_t from, std::int64_t end) {
  std::int64_t next = end;
  for (std::int64_t i = 0; i < eos.shape[0]; ++i) {
    const std::int64_t id = eos.as<std::int64_t>()[i * eos.stride[0]];
    if (id >= from && id < next) next = id;
  }
  return next;
}

inline bool is_eos(const TensorView& eos, std::int64_t token) {
  if (!eos.present()) return false;
  for (std::int64_t i = 0; i < eos.shape[0]; ++i) {
    if (eos.as<std::int64_t>()[i * eos.stride[0]] == token) return true;
  }
  return false;
}

// Argmax as if the logits of all eos ids were -inf.
inline std::int64_t argmax_without_eos(const float* logits, std::int64_t count,
                                       const TensorView& eos) {
  RowMax best;
  for (std::int64_t begin = 0; begin < count;) {
    const std::int64_t end = next_eos(eos, begin, count);
    update_max(logits, begin, end, best);
    begin = end + 1;
  }
  const bool all_lowest = best.value == -std::numeric_limits<float>::infinity();
  return all_lowest ? 0 : best.index;
}

// Of a row that has finished.
inline void freeze(const SelectTokenArgs& args, std::int64_t r) {
  if (args.frozen.present() && args.advance_finished == 0) {
    args.frozen.as<std::int32_t>()[r * args.frozen.stride[0]] = 1;
  }
}

inline void select_row(const SelectTokenArgs& args, std::int64_t r) {
  const auto at = [r](const TensorView& view) { return r * view.stride[0]; };
  std::int32_t& generated = args.generated.as<std::int32_t>()[at(args.generated)];
  std::int32_t& finished = args.finished.as<std::int32_t>()[at(args.finished)];
  std::int64_t& next = args.next.as<std::int64_t>()[at(args.next)];
  std::int64_t* history = args.history.as<std::int64_t>() + at(args.history);
  const std::int64_t step = generated;
  if (finished != static_cast<std::int32_t>(StopReason::kRunning)) {
    next = args.pad;
    if (step < args.history.shape[1]) history[step] = args.pad;
    ++generated;
    if (args.advance_finished != 0) {
      ++args.lengths.as<std::int32_t>()[at(args.lengths)];
      ++args.positions.as<std::int32_t>()[at(args.positions)];
    }
    freeze(args, r);
    return;
  }

  const std::int64_t count = args.logits.shape[1];
  const float* logits = args.logits.as<float>() + at(args.logits);
  RowMax best;
  update_max(logits, 0, count, best);
  const bool nan = best.nan >= 0;
  const bool forced = args.forced.present();
  std::int64_t token = nan ? best.nan : best.index;
  if (forced && step < args.forced.shape[1]) {
    token = args.forced.as<std::int64_t>()[at(args.forced) + step];
  } else if (!nan && step < args.min_new_tokens && is_eos(args.eos, token)) {
    token = argmax_without_eos(logits, count, args.eos);
  }

  next = token;
  if (step < args.history.shape[1]) history[step] = token;
  if (args.log_prob.present() && step < args.log_prob.shape[1]) {
    const bool known = token >= 0 && token < count;
    args.log_prob.as<float>()[at(args.log_prob) + step] =
        known ? log_prob_of(logits, count, token, best) : std::numeric_limits<float>::quiet_NaN();
  }
  ++generated;
  ++args.lengths.as<std::int32_t>()[at(args.lengths)];
  ++args.positions.as<std::int32_t>()[at(args.positions)];
  if (nan) {
    finished = static_cast<std::int32_t>(StopReason::kNan);
  } else if (!forced && is_eos(args.eos, token)) {
    finished = static_cast<std::int32_t>(StopReason::kEos);
  } else if (generated >= args.max_new_tokens) {
    finished = static_cast<std::int32_t>(StopReason::kLength);
  }
  if (finished != static_cast<std::int32_t>(StopReason::kRunning)) freeze(args, r);
}

std::int32_t select_token(const SelectTokenArgs* args, const Exec* exec) {
  const Range rows = part_range(args->logits.shape[0], 1, exec->part, exec->parts);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) select_row(*args, r);
  return 0;
}

}  // namespace HWY_NAMESPACE
}  // namespace segki::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace segki::cpu {

Kernel<SelectTokenArgs> select_token_kernel(InstructionSet set) {
  return SEGKI_CPU_VARIANT(set, select_token);
}

std::size_t select_token_scratch_bytes(const SelectTokenArgs&) { return 0; }

}  // namespace segki::cpu
#endif  // HWY_ONCE
