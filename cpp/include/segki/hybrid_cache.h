// Fixed-address storage of everything that a model remembers between steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "segki/export.h"
#include "segki/tensor.h"

namespace segki {

// Memory comes from the host. `allocate` returns zeroed or uninitialised memory aligned to at least
// 64 bytes, or null when there is none. A default-constructed allocator takes it from the C++ heap.
struct Allocator {
  void* context = nullptr;
  void* (*allocate)(void* context, std::size_t bytes) = nullptr;
  void (*release)(void* context, void* address, std::size_t bytes) = nullptr;
};

// Full attention (window == 0: room for max_len tokens) or sliding window (window > 0: a ring of
// min(window, max_len) tokens).
struct KvLayer {
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t v_head_dim = 0;
  std::int32_t window = 0;
  DType dtype = DType::kF32;
};

// Linear attention: the last `conv_width` inputs of the convolution and an fp32 recurrent state.
struct LinearLayer {
  std::int32_t conv_channels = 0;
  std::int32_t conv_width = 0;
  std::int32_t heads = 0;
  std::int32_t key_dim = 0;
  std::int32_t value_dim = 0;
  DType conv_dtype = DType::kF32;
};

using CacheLayer = std::variant<KvLayer, LinearLayer>;

struct CacheSpec {
  std::int32_t rows = 0;     // slots; 1 to 64
  std::int32_t max_len = 0;  // tokens a slot
  std::vector<CacheLayer> layers;
};

// One slot a row. Addresses never change during the cache's life. A slot holds its tokens without
// left padding: index t is the row's t-th real token (modulo the ring of a sliding layer).
class SEGKI_EXPORT HybridCache {
 public:
  // Throws Error(kInvalidArgument) for a bad spec, Error(kOutOfMemory) when the allocator has no
  // memory (nothing stays allocated).
  explicit HybridCache(CacheSpec spec, Allocator allocator = {});
  ~HybridCache();
  HybridCache(const HybridCache&) = delete;
  HybridCache& operator=(const HybridCache&) = delete;

  const CacheSpec& spec() const;
  std::size_t bytes() const;  // of all storage, 0 after release()

  TensorView keys(int layer) const;             // [rows, Hkv, L, D]
  TensorView values(int layer) const;           // [rows, Hkv, L, Dv]
  TensorView conv_state(int layer) const;       // [rows, channels, width]
  TensorView recurrent_state(int layer) const;  // f32 [rows, heads, key_dim, value_dim]
  std::int32_t capacity(int layer) const;       // L of a KV layer

  // Copies a prompt's keys and values [rows, Hkv, T, D] (any strides but the last) into slots
  // 0..rows-1, leaving out the first `first[r]` positions (left padding; null: none); a sliding
  // layer keeps what its ring holds. Throws Error(kInvalidArgument).
  void fill(int layer, const TensorView& keys, const TensorView& values, const std::int32_t* first);

  // The inverse of fill, for handing a conversation back: copies one slot a row out to keys and
  // values [rows, Hkv, T, D] (any strides but the last). Row r comes from slot slots[r] (null
  // `slots`: from slot r) and holds lengths[r] tokens; token t goes to position first[r] + t (null
  // `first`: to position t). Every other position, and a token that a sliding layer's ring no
  // longer holds, becomes zero. A negative first[r] leaves out the row's oldest tokens. Throws
  // Error(kInvalidArgument).
  void gather(int layer, const std::int32_t* slots, const std::int32_t* lengths,
              const std::int32_t* first, const TensorView& keys, const TensorView& values) const;

  // Zeroes the linear-attention state of a slot (KV storage needs no reset: lengths say what is
  // valid).
  void reset(std::int32_t slot);
  // New slot r holds what slot `source[r]` held, for all layers; for beams and slot refill.
  // `source` has `rows` entries.
  void reorder(const std::int32_t* source);

  // Everything of slots 0..rows-1 that a step changes for good: linear-attention states and the
  // rings of sliding layers (a full layer's tokens past a row's length are written again).
  // Allocates. Throws Error(kInvalidArgument).
  struct Snapshot {
    std::int32_t rows = 0;
    std::vector<std::byte> bytes;
  };
  Snapshot snapshot(std::int32_t rows) const;
  // Puts a snapshot of this cache back, bit for bit: warming up or probing leaves no trace. Throws
  // Error(kInvalidArgument) for the snapshot of a cache of another layout.
  void restore(const Snapshot& snapshot);

  // Checks that a slot of `length` tokens may go back to its first `kept`: for layers that keep all
  // tokens the caller just lowers the row's length. Throws Error(kInvalidArgument) for kept outside
  // 0..length and Error(kState) where the past is gone: a linear-attention state, or a ring that
  // has overwritten tokens that a query at `kept` sees.
  void crop(std::int32_t length, std::int32_t kept) const;

  // Gives all memory back to the allocator; views become invalid and further access throws
  // Error(kState).
  void release();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace segki
