// From a public op to a backend's kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "segki/error.h"
#include "segki/ops.h"

namespace segki::ops {

// Below this an op is done sooner than other threads are woken.
constexpr std::size_t kBytesWorthSharing = std::size_t{64} << 10;

struct FreeScratch {
  void operator()(std::byte* address) const { ::operator delete (address, std::align_val_t{64}); }
};

[[noreturn]] void throw_no_kernel(const char* op, const Backend& backend);
[[noreturn]] void throw_failed(const char* op, const Backend& backend, std::int32_t code);
[[noreturn]] void throw_no_scratch(const char* op, std::size_t bytes);

// The backend's kernel for an op, null when it has none: the table of an older backend ends before
// the newest slots.
template <typename Args>
Kernel<Args> kernel_of(const BackendTable& table) {
  constexpr auto kSlot = OpTraits<Args>::kSlot;
  const auto begin = reinterpret_cast<std::uintptr_t>(&table);
  const auto end = reinterpret_cast<std::uintptr_t>(&(table.*kSlot)) + sizeof(Kernel<Args>);
  return end - begin <= table.struct_size ? table.*kSlot : nullptr;
}

// `bytes` estimates the memory that the op goes through.
template <typename Args>
void run(const Backend& backend, const Args& args, const RunOptions& options, std::size_t bytes) {
  using Traits = OpTraits<Args>;
  const BackendTable& table = backend.table();
  const Kernel<Args> kernel = kernel_of<Args>(table);
  if (kernel == nullptr) {
    throw_no_kernel(Traits::kName, backend);
  }
  if (table.is_host == 0) {
    const Exec exec{options.stream, 0, 1, nullptr};
    if (const std::int32_t code = kernel(&args, &exec)) {
      throw_failed(Traits::kName, backend, code);
    }
    return;
  }

  const ParallelHook hook = options.parallel.run != nullptr ? options.parallel : default_parallel();
  const std::int32_t parts = bytes < kBytesWorthSharing ? 1 : std::max(hook.parts, 1);
  const std::size_t needed =
      table.scratch_bytes != nullptr ? table.scratch_bytes(Traits::kId, &args) : 0;
  const std::size_t share = (needed + 63) / 64 * 64;
  std::unique_ptr<std::byte, FreeScratch> scratch;
  if (share != 0) {
    const std::size_t total = share * static_cast<std::size_t>(parts);
    scratch.reset(
        static_cast<std::byte*>(::operator new (total, std::align_val_t{64}, std::nothrow)));
    if (!scratch) {
      throw_no_scratch(Traits::kName, total);
    }
  }

  struct Call {
    Kernel<Args> kernel;
    const Args* args;
    void* stream;
    std::int32_t parts;
    std::byte* scratch;
    std::size_t share;
    std::atomic<std::int32_t> failure;

    static void part(void* self, std::int32_t index) {
      auto* call = static_cast<Call*>(self);
      const Exec exec{call->stream, index, call->parts,
                      call->share == 0
                          ? nullptr
                          : call->scratch + call->share * static_cast<std::size_t>(index)};
      if (const std::int32_t code = call->kernel(call->args, &exec)) {
        call->failure.store(code, std::memory_order_relaxed);
      }
    }
  };
  Call call{kernel, &args, options.stream, parts, scratch.get(), share, 0};
  if (parts == 1) {
    Call::part(&call, 0);
  } else {
    hook.run(hook.context, parts, &Call::part, &call);
  }
  if (const std::int32_t code = call.failure.load(std::memory_order_relaxed)) {
    throw_failed(Traits::kName, backend, code);
  }
}

}  // namespace segki::ops
