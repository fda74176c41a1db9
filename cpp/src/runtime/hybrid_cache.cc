#include "segki/hybrid_cache.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "runtime/describe.h"
#include "runtime/memory.h"
#include "segki/error.h"
#include "segki/ops.h"

namespace segki {
namespace {

[[noreturn]] void reject(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "hybrid cache: " + message);
}

std::string layer_name(std::size_t layer) { return "layer " + std::to_string(layer); }

void check_size(std::size_t layer, const char* name, std::int32_t given) {
  if (given < 1) {
    reject(layer_name(layer) + ": " + name + " is " + std::to_string(given) +
           ", accepted is 1 or more");
  }
}

void check_dtype(std::size_t layer, const char* name, DType given) {
  if (given != DType::kF32 && given != DType::kBF16 && given != DType::kF16) {
    reject(layer_name(layer) + ": " + name + " is " + name_of(given) +
           ", accepted is f32, bf16 or f16");
  }
}

std::int32_t ring_of(const KvLayer& layer, std::int32_t max_len) {
  return layer.window > 0 ? std::min(layer.window, max_len) : max_len;
}

constexpr std::size_t kMaxBytes = std::numeric_limits<std::ptrdiff_t>::max();

[[noreturn]] void reject_bytes() { reject("spec asks for more bytes than an address can reach"); }

// Of factors that are not 0.
std::size_t product(std::initializer_list<std::size_t> factors) {
  std::size_t result = 1;
  for (const std::size_t factor : factors) {
    if (result > kMaxBytes / factor) reject_bytes();
    result *= factor;
  }
  return result;
}

std::size_t as_size(std::int32_t value) { return static_cast<std::size_t>(value); }

// One tensor of the storage: `rows` slots of `slot_bytes`, at `offset` of the block.
struct Region {
  std::size_t offset = 0;
  std::size_t slot_bytes = 0;
};

// first: keys or convolution state; second: values or recurrent state.
struct LayerRegions {
  Region first;
  Region second;
};

// What a slot holds of one tensor of a KV layer: [heads, ring] tokens.
struct SlotShape {
  std::int64_t heads = 0;
  std::int64_t ring = 0;
  std::size_t token_bytes = 0;
  std::size_t element_bytes = 0;
};

// Steps are bytes from one token to the next.
void copy_tokens(std::byte* to, std::ptrdiff_t to_step, const std::byte* from,
                 std::ptrdiff_t from_step, std::size_t token_bytes, std::int64_t count) {
  const auto dense = static_cast<std::ptrdiff_t>(token_bytes);
  if (to_step == dense && from_step == dense) {
    std::memcpy(to, from, token_bytes * static_cast<std::size_t>(count));
    return;
  }
  for (std::int64_t t = 0; t < count; ++t) {
    std::memcpy(to + t * to_step, from + t * from_step, token_bytes);
  }
}

// Calls copy(ring index, token, count) for each stretch of [begin, end) that the ring does not
// break.
template <typename Copy>
void for_ring_stretches(std::int64_t begin, std::int64_t end, std::int64_t ring, Copy copy) {
  while (begin < end) {
    const std::int64_t index = begin % ring;
    const std::int64_t count = std::min(end - begin, ring - index);
    copy(index, begin, count);
    begin += count;
  }
}

std::byte* at(const TensorView& view, std::size_t element_bytes, std::int64_t row,
              std::int64_t head, std::int64_t position) {
  const std::int64_t element =
      row * view.stride[0] + head * view.stride[1] + position * view.stride[2];
  return view.as<std::byte>() + element * static_cast<std::int64_t>(element_bytes);
}

std::ptrdiff_t token_step(const TensorView& view, std::size_t element_bytes) {
  return view.stride[2] * static_cast<std::ptrdiff_t>(element_bytes);
}

void fill_row(const SlotShape& shape, std::byte* slot, const TensorView& view, std::int64_t row,
              std::int64_t first) {
  const std::int64_t tokens = view.shape[2] - first;
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    std::byte* head = slot + static_cast<std::size_t>(h * shape.ring) * shape.token_bytes;
    for_ring_stretches(std::max<std::int64_t>(0, tokens - shape.ring), tokens, shape.ring,
                       [&](std::int64_t index, std::int64_t token, std::int64_t count) {
                         copy_tokens(head + static_cast<std::size_t>(index) * shape.token_bytes,
                                     static_cast<std::ptrdiff_t>(shape.token_bytes),
                                     at(view, shape.element_bytes, row, h, first + token),
                                     token_step(view, shape.element_bytes), shape.token_bytes,
                                     count);
                       });
  }
}

void zero_tokens(const SlotShape& shape, const TensorView& view, std::int64_t row,
                 std::int64_t head, std::int64_t begin, std::int64_t end) {
  for (std::int64_t p = begin; p < end; ++p) {
    std::memset(at(view, shape.element_bytes, row, head, p), 0, shape.token_bytes);
  }
}

void gather_row(const SlotShape& shape, const std::byte* slot, const TensorView& view,
                std::int64_t row, std::int64_t tokens, std::int64_t first) {
  const std::int64_t begin =
      std::min(tokens, std::max({std::int64_t{0}, tokens - shape.ring, -first}));
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    const std::byte* head = slot + static_cast<std::size_t>(h * shape.ring) * shape.token_bytes;
    zero_tokens(shape, view, row, h, 0, std::max<std::int64_t>(0, first + begin));
    for_ring_stretches(
        begin, tokens, shape.ring, [&](std::int64_t index, std::int64_t token, std::int64_t count) {
          copy_tokens(at(view, shape.element_bytes, row, h, first + token),
                      token_step(view, shape.element_bytes),
                      head + static_cast<std::size_t>(index) * shape.token_bytes,
                      static_cast<std::ptrdiff_t>(shape.token_bytes), shape.token_bytes, count);
        });
    zero_tokens(shape, view, row, h, std::max<std::int64_t>(0, first + tokens), view.shape[2]);
  }
}

}  // namespace

struct HybridCache::Impl {
  CacheSpec spec;
  std::vector<LayerRegions> regions;
  Block block;

  Impl(CacheSpec given, Allocator allocator);

  std::size_t index_of(int layer) const;
  template <typename Kind>
  const Kind& layer_of(int layer, const char* wanted) const;
  std::byte* slot_of(const Region& region, std::int64_t slot) const;
  void check_slot(const char* name, std::int32_t slot) const;
  // Throws Error(kState) after release().
  void require_storage() const;
  TensorView view(const Region& region, DType dtype, std::array<std::int64_t, 3> sizes,
                  int count) const;
  void check_transfer(int layer, const TensorView& keys, const TensorView& values) const;
  // Of the keys and of the values.
  std::pair<SlotShape, SlotShape> slot_shapes(int layer) const;
  void reorder_region(const Region& region, const std::int32_t* source) const;
  // visit(address, bytes) for the slots 0..rows-1 of each storage that a step overwrites.
  template <typename Visit>
  void each_changing(std::int32_t rows, const Visit& visit) const;
  std::size_t snapshot_bytes(std::int32_t rows) const;
};

template <typename Visit>
void HybridCache::Impl::each_changing(std::int32_t rows, const Visit& visit) const {
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    const auto* kv = std::get_if<KvLayer>(&spec.layers[i]);
    if (kv != nullptr && kv->window == 0) continue;
    for (const Region& region : {regions[i].first, regions[i].second}) {
      visit(slot_of(region, 0), as_size(rows) * region.slot_bytes);
    }
  }
}

std::size_t HybridCache::Impl::snapshot_bytes(std::int32_t rows) const {
  if (rows < 1 || rows > spec.rows) {
    reject("rows is " + std::to_string(rows) + ", accepted is 1 to " + std::to_string(spec.rows));
  }
  require_storage();
  std::size_t bytes = 0;
  each_changing(rows, [&](std::byte*, std::size_t size) { bytes += size; });
  return bytes;
}

HybridCache::Impl::Impl(CacheSpec given, Allocator allocator) : spec(std::move(given)) {
  if (spec.rows < 1 || spec.rows > kMaxRows) {
    reject("spec.rows is " + std::to_string(spec.rows) + ", accepted is 1 to " +
           std::to_string(kMaxRows));
  }
  if (spec.max_len < 1) {
    reject("spec.max_len is " + std::to_string(spec.max_len) + ", accepted is 1 or more");
  }
  if (spec.layers.empty()) reject("spec.layers is empty, accepted is one layer or more");
  std::size_t bytes = 0;
  const auto place = [&](std::size_t slot_bytes) {
    const std::size_t whole = product({as_size(spec.rows), slot_bytes});
    if (whole > kMaxBytes - kMemoryAlignment - bytes) reject_bytes();
    return Region{std::exchange(bytes, round_up(bytes + whole, kMemoryAlignment)), slot_bytes};
  };
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    LayerRegions layer_regions;
    if (const auto* kv = std::get_if<KvLayer>(&spec.layers[i])) {
      check_size(i, "kv_heads", kv->kv_heads);
      check_size(i, "head_dim", kv->head_dim);
      check_size(i, "v_head_dim", kv->v_head_dim);
      check_dtype(i, "dtype", kv->dtype);
      if (kv->window < 0) {
        reject(layer_name(i) + ": window is " + std::to_string(kv->window) +
               ", accepted is 0 (none) or more");
      }
      const std::size_t tokens =
          product({as_size(kv->kv_heads), as_size(ring_of(*kv, spec.max_len)), size_of(kv->dtype)});
      layer_regions.first = place(product({tokens, as_size(kv->head_dim)}));
      layer_regions.second = place(product({tokens, as_size(kv->v_head_dim)}));
    } else {
      const auto& linear = std::get<LinearLayer>(spec.layers[i]);
      check_size(i, "conv_channels", linear.conv_channels);
      check_size(i, "conv_width", linear.conv_width);
      check_size(i, "heads", linear.heads);
      check_size(i, "key_dim", linear.key_dim);
      check_size(i, "value_dim", linear.value_dim);
      check_dtype(i, "conv_dtype", linear.conv_dtype);
      layer_regions.first = place(product(
          {as_size(linear.conv_channels), as_size(linear.conv_width), size_of(linear.conv_dtype)}));
      layer_regions.second = place(product({as_size(linear.heads), as_size(linear.key_dim),
                                            as_size(linear.value_dim), size_of(DType::kF32)}));
    }
    regions.push_back(layer_regions);
  }
  block = Block(allocator, bytes, "hybrid cache");
}

std::size_t HybridCache::Impl::index_of(int layer) const {
  if (layer < 0 || static_cast<std::size_t>(layer) >= spec.layers.size()) {
    reject("layer is " + std::to_string(layer) + ", accepted is 0 to " +
           std::to_string(spec.layers.size() - 1));
  }
  return static_cast<std::size_t>(layer);
}

template <typename Kind>
const Kind& HybridCache::Impl::layer_of(int layer, const char* wanted) const {
  const std::size_t index = index_of(layer);
  const auto* found = std::get_if<Kind>(&spec.layers[index]);
  if (found == nullptr) {
    reject(layer_name(index) + " is " +
           (std::holds_alternative<KvLayer>(spec.layers[index]) ? "a KV layer"
                                                                : "a linear-attention layer") +
           ", accepted is " + wanted);
  }
  return *found;
}

std::byte* HybridCache::Impl::slot_of(const Region& region, std::int64_t slot) const {
  return block.data() + region.offset + static_cast<std::size_t>(slot) * region.slot_bytes;
}

void HybridCache::Impl::check_slot(const char* name, std::int32_t slot) const {
  if (slot < 0 || slot >= spec.rows) {
    reject(std::string(name) + " is " + std::to_string(slot) + ", accepted is 0 to " +
           std::to_string(spec.rows - 1));
  }
}

void HybridCache::Impl::require_storage() const {
  if (block.data() == nullptr) {
    throw Error(ErrorCode::kState, "hybrid cache: its memory has been released");
  }
}

TensorView HybridCache::Impl::view(const Region& region, DType dtype,
                                   std::array<std::int64_t, 3> sizes, int count) const {
  require_storage();
  std::byte* data = slot_of(region, 0);
  return count == 2 ? dense_view(data, dtype, spec.rows, sizes[0], sizes[1])
                    : dense_view(data, dtype, spec.rows, sizes[0], sizes[1], sizes[2]);
}

void HybridCache::Impl::check_transfer(int layer, const TensorView& keys,
                                       const TensorView& values) const {
  const auto& kv = layer_of<KvLayer>(layer, "a KV layer");
  require_storage();
  const auto check_view = [&](const char* name, const TensorView& view, std::int32_t width) {
    if (!view.present() || view.dtype != kv.dtype || view.rank != 4 || view.shape[0] < 1 ||
        view.shape[0] > spec.rows || view.shape[1] != kv.kv_heads || view.shape[2] < 1 ||
        view.shape[3] != width || (width > 1 && view.stride[3] != 1)) {
      reject(layer_name(static_cast<std::size_t>(layer)) + ": " + name + " is " + describe(view) +
             ", accepted is " + name_of(kv.dtype) + " [1 to " + std::to_string(spec.rows) + ", " +
             std::to_string(kv.kv_heads) + ", T, " + std::to_string(width) +
             "] with a dense last dimension");
    }
  };
  check_view("keys", keys, kv.head_dim);
  check_view("values", values, kv.v_head_dim);
  if (keys.shape[0] != values.shape[0] || keys.shape[2] != values.shape[2]) {
    reject(layer_name(static_cast<std::size_t>(layer)) + ": keys are " + describe(keys) +
           " but values " + describe(values) + ", accepted are equal rows and T");
  }
}

std::pair<SlotShape, SlotShape> HybridCache::Impl::slot_shapes(int layer) const {
  const auto& kv = std::get<KvLayer>(spec.layers[static_cast<std::size_t>(layer)]);
  const std::size_t element = size_of(kv.dtype);
  const std::int64_t ring = ring_of(kv, spec.max_len);
  return {SlotShape{kv.kv_heads, ring, element * as_size(kv.head_dim), element},
          SlotShape{kv.kv_heads, ring, element * as_size(kv.v_head_dim), element}};
}

// A slot that nobody reads any more may be overwritten: with these first, what is left are cycles,
// which are rotated in pieces through a buffer on the stack. No slot is copied twice and no memory
// is allocated.
void HybridCache::Impl::reorder_region(const Region& region, const std::int32_t* source) const {
  std::array<std::int32_t, kMaxRows> from = {};
  std::array<std::int32_t, kMaxRows> readers = {};
  std::array<std::int32_t, kMaxRows> free_slots = {};
  std::copy_n(source, spec.rows, from.begin());
  const auto pending = [&](std::int32_t slot) { return from[as_size(slot)] != slot; };
  for (std::int32_t r = 0; r < spec.rows; ++r) {
    if (pending(r)) ++readers[as_size(from[as_size(r)])];
  }
  std::size_t free_count = 0;
  const auto free_when_unread = [&](std::int32_t slot) {
    if (pending(slot) && readers[as_size(slot)] == 0) free_slots[free_count++] = slot;
  };
  for (std::int32_t r = 0; r < spec.rows; ++r) free_when_unread(r);
  while (free_count > 0) {
    const std::int32_t slot = free_slots[--free_count];
    const std::int32_t origin = std::exchange(from[as_size(slot)], slot);
    std::memcpy(slot_of(region, slot), slot_of(region, origin), region.slot_bytes);
    --readers[as_size(origin)];
    free_when_unread(origin);
  }
  std::array<std::byte, 4096> piece;
  for (std::int32_t r = 0; r < spec.rows; ++r) {
    if (!pending(r)) continue;
    for (std::size_t begin = 0; begin < region.slot_bytes; begin += piece.size()) {
      const std::size_t bytes = std::min(piece.size(), region.slot_bytes - begin);
      std::memcpy(piece.data(), slot_of(region, r) + begin, bytes);
      std::int32_t slot = r;
      for (; from[as_size(slot)] != r; slot = from[as_size(slot)]) {
        std::memcpy(slot_of(region, slot) + begin, slot_of(region, from[as_size(slot)]) + begin,
                    bytes);
      }
      std::memcpy(slot_of(region, slot) + begin, piece.data(), bytes);
    }
    for (std::int32_t slot = r; pending(slot);) slot = std::exchange(from[as_size(slot)], slot);
  }
}

HybridCache::HybridCache(CacheSpec spec, Allocator allocator)
    : impl_(std::make_unique<Impl>(std::move(spec), allocator)) {
  for (std::int32_t slot = 0; slot < impl_->spec.rows; ++slot) reset(slot);
}

HybridCache::~HybridCache() = default;

const CacheSpec& HybridCache::spec() const { return impl_->spec; }

std::size_t HybridCache::bytes() const { return impl_->block.bytes(); }

TensorView HybridCache::keys(int layer) const {
  const auto& kv = impl_->layer_of<KvLayer>(layer, "a KV layer");
  return impl_->view(impl_->regions[static_cast<std::size_t>(layer)].first, kv.dtype,
                     {kv.kv_heads, ring_of(kv, impl_->spec.max_len), kv.head_dim}, 3);
}

TensorView HybridCache::values(int layer) const {
  const auto& kv = impl_->layer_of<KvLayer>(layer, "a KV layer");
  return impl_->view(impl_->regions[static_cast<std::size_t>(layer)].second, kv.dtype,
                     {kv.kv_heads, ring_of(kv, impl_->spec.max_len), kv.v_head_dim}, 3);
}

TensorView HybridCache::conv_state(int layer) const {
  const auto& linear = impl_->layer_of<LinearLayer>(layer, "a linear-attention layer");
  return impl_->view(impl_->regions[static_cast<std::size_t>(layer)].first, linear.conv_dtype,
                     {linear.conv_channels, linear.conv_width, 0}, 2);
}

TensorView HybridCache::recurrent_state(int layer) const {
  const auto& linear = impl_->layer_of<LinearLayer>(layer, "a linear-attention layer");
  return impl_->view(impl_->regions[static_cast<std::size_t>(layer)].second, DType::kF32,
                     {linear.heads, linear.key_dim, linear.value_dim}, 3);
}

std::int32_t HybridCache::capacity(int layer) const {
  return ring_of(impl_->layer_of<KvLayer>(layer, "a KV layer"), impl_->spec.max_len);
}

void HybridCache::fill(int layer, const TensorView& keys, const TensorView& values,
                       const std::int32_t* first) {
  impl_->check_transfer(layer, keys, values);
  const std::int64_t rows = keys.shape[0];
  const std::int64_t columns = keys.shape[2];
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t start = first == nullptr ? 0 : first[r];
    const std::int64_t least = std::max<std::int64_t>(0, columns - impl_->spec.max_len);
    if (start < least || start > columns) {
      reject("first[" + std::to_string(r) + "] is " + std::to_string(start) + ", accepted is " +
             std::to_string(least) + " to " + std::to_string(columns) + " (a prompt of " +
             std::to_string(columns) + " positions into a slot of " +
             std::to_string(impl_->spec.max_len) + " tokens)");
    }
  }
  const LayerRegions& regions = impl_->regions[static_cast<std::size_t>(layer)];
  const auto [key_shape, value_shape] = impl_->slot_shapes(layer);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t start = first == nullptr ? 0 : first[r];
    fill_row(key_shape, impl_->slot_of(regions.first, r), keys, r, start);
    fill_row(value_shape, impl_->slot_of(regions.second, r), values, r, start);
  }
}

void HybridCache::gather(int layer, const std::int32_t* slots, const std::int32_t* lengths,
                         const std::int32_t* first, const TensorView& keys,
                         const TensorView& values) const {
  impl_->check_transfer(layer, keys, values);
  if (lengths == nullptr) reject("lengths is null, accepted is one length a row");
  const std::int64_t rows = keys.shape[0];
  for (std::int64_t r = 0; r < rows; ++r) {
    if (slots != nullptr) {
      impl_->check_slot(("slots[" + std::to_string(r) + "]").c_str(), slots[r]);
    }
    if (lengths[r] < 0 || lengths[r] > impl_->spec.max_len) {
      reject("lengths[" + std::to_string(r) + "] is " + std::to_string(lengths[r]) +
             ", accepted is 0 to max_len (" + std::to_string(impl_->spec.max_len) + ")");
    }
    const std::int64_t start = first == nullptr ? 0 : first[r];
    if (start + lengths[r] > keys.shape[2]) {
      reject("first[" + std::to_string(r) + "] is " + std::to_string(start) + " and lengths[" +
             std::to_string(r) + "] " + std::to_string(lengths[r]) +
             ", accepted is a sum of at most T (" + std::to_string(keys.shape[2]) + ")");
    }
  }
  const LayerRegions& regions = impl_->regions[static_cast<std::size_t>(layer)];
  const auto [key_shape, value_shape] = impl_->slot_shapes(layer);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t slot = slots == nullptr ? r : slots[r];
    const std::int64_t start = first == nullptr ? 0 : first[r];
    gather_row(key_shape, impl_->slot_of(regions.first, slot), keys, r, lengths[r], start);
    gather_row(value_shape, impl_->slot_of(regions.second, slot), values, r, lengths[r], start);
  }
}

void HybridCache::reset(std::int32_t slot) {
  impl_->check_slot("slot", slot);
  impl_->require_storage();
  for (std::size_t i = 0; i < impl_->spec.layers.size(); ++i) {
    if (!std::holds_alternative<LinearLayer>(impl_->spec.layers[i])) continue;
    for (const Region& region : {impl_->regions[i].first, impl_->regions[i].second}) {
      std::memset(impl_->slot_of(region, slot), 0, region.slot_bytes);
    }
  }
}

void HybridCache::reorder(const std::int32_t* source) {
  if (source == nullptr) reject("source is null, accepted is one slot a row");
  for (std::int32_t r = 0; r < impl_->spec.rows; ++r) {
    impl_->check_slot(("source[" + std::to_string(r) + "]").c_str(), source[r]);
  }
  impl_->require_storage();
  for (const LayerRegions& layer : impl_->regions) {
    impl_->reorder_region(layer.first, source);
    impl_->reorder_region(layer.second, source);
  }
}

HybridCache::Snapshot HybridCache::snapshot(std::int32_t rows) const {
  Snapshot taken;
  taken.bytes.resize(impl_->snapshot_bytes(rows));
  taken.rows = rows;
  std::byte* to = taken.bytes.data();
  impl_->each_changing(rows, [&](std::byte* state, std::size_t bytes) {
    std::memcpy(to, state, bytes);
    to += bytes;
  });
  return taken;
}

void HybridCache::restore(const Snapshot& snapshot) {
  const std::size_t accepted = impl_->snapshot_bytes(snapshot.rows);
  if (snapshot.bytes.size() != accepted) {
    reject("snapshot has " + std::to_string(snapshot.bytes.size()) + " bytes for " +
           std::to_string(snapshot.rows) + " rows, accepted is " + std::to_string(accepted));
  }
  const std::byte* from = snapshot.bytes.data();
  impl_->each_changing(snapshot.rows, [&](std::byte* state, std::size_t bytes) {
    std::memcpy(state, from, bytes);
    from += bytes;
  });
}

void HybridCache::crop(std::int32_t length, std::int32_t kept) const {
  if (length < 0 || length > impl_->spec.max_len) {
    reject("length is " + std::to_string(length) + ", accepted is 0 to max_len (" +
           std::to_string(impl_->spec.max_len) + ")");
  }
  if (kept < 0 || kept > length) {
    reject("kept is " + std::to_string(kept) + ", accepted is 0 to length (" +
           std::to_string(length) + ")");
  }
  if (kept == length) return;
  for (std::size_t i = 0; i < impl_->spec.layers.size(); ++i) {
    const auto* kv = std::get_if<KvLayer>(&impl_->spec.layers[i]);
    if (kv == nullptr) {
      throw Error(ErrorCode::kState, "hybrid cache: " + layer_name(i) +
                                         " keeps a recurrent state, from which no token can be "
                                         "taken back; given a crop from " +
                                         std::to_string(length) + " to " + std::to_string(kept));
    }
    // The next token, at position `kept`, sees kept - window + 1 onwards; the ring holds the last
    // ring_of tokens.
    const std::int64_t oldest_seen = std::max(0, kept - kv->window + 1);
    if (kv->window > 0 && oldest_seen < length - ring_of(*kv, impl_->spec.max_len) && kept > 0) {
      throw Error(ErrorCode::kState, "hybrid cache: " + layer_name(i) + " holds the last " +
                                         std::to_string(ring_of(*kv, impl_->spec.max_len)) +
                                         " of " + std::to_string(length) +
                                         " tokens, which is not enough to go back to " +
                                         std::to_string(kept));
    }
  }
}

void HybridCache::release() { impl_->block = Block(); }

}  // namespace segki
