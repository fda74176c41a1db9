#include "segki/hybrid_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "segki/error.h"

namespace segki {
namespace {

using Bytes = std::vector<unsigned char>;

void expect_error(ErrorCode code, const std::string& part, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one with: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// Random draws that say their seed when a test fails.
class Random {
 public:
  int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }

  void fill(Bytes& bytes) {
    for (auto& byte : bytes) byte = static_cast<unsigned char>(draw(1, 255));
  }

  template <typename T, std::size_t N>
  T pick(const std::array<T, N>& from) {
    return from[static_cast<std::size_t>(draw(0, static_cast<int>(N) - 1))];
  }

  const unsigned seed = std::random_device{}();

 private:
  std::mt19937 engine_{seed};
};

std::size_t as_size(std::int64_t value) { return static_cast<std::size_t>(value); }

// A tensor [rows, heads, T, width] with memory of its own, in one of several layouts.
struct Tensor {
  Tensor(std::int64_t rows, std::int64_t heads, std::int64_t tokens, std::int64_t width,
         DType dtype, Random& random) {
    const std::int64_t pad = random.draw(0, 2);
    view = dense_view(nullptr, dtype, rows, heads, tokens, width);
    if (random.draw(0, 1) == 1) {  // [rows, T, heads, width] seen through a transpose
      view.stride[2] = heads * width + pad;
      view.stride[1] = width;
      view.stride[0] = tokens * view.stride[2];
    } else {
      view.stride[2] = width + pad;
      view.stride[1] = tokens * view.stride[2];
      view.stride[0] = heads * view.stride[1];
    }
    memory.resize(as_size(rows * view.stride[0]) * size_of(dtype));
    view.data = memory.data();
    random.fill(memory);
  }

  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  Bytes token(std::int64_t row, std::int64_t head, std::int64_t position) const {
    const std::size_t size = size_of(view.dtype);
    const auto* begin =
        memory.data() +
        as_size(row * view.stride[0] + head * view.stride[1] + position * view.stride[2]) * size;
    return Bytes(begin, begin + as_size(view.shape[3]) * size);
  }

  Bytes memory;
  TensorView view;
};

// What a KV layer of the cache should hold: (slot, head, ring index) -> bytes.
struct NaiveLayer {
  std::map<std::array<std::int64_t, 3>, Bytes> keys;
  std::map<std::array<std::int64_t, 3>, Bytes> values;

  void fill(const Tensor& k, const Tensor& v, const std::vector<std::int32_t>& first,
            std::int64_t ring) {
    for (std::int64_t r = 0; r < k.view.shape[0]; ++r) {
      for (std::int64_t h = 0; h < k.view.shape[1]; ++h) {
        for (std::int64_t p = first[as_size(r)]; p < k.view.shape[2]; ++p) {
          const std::int64_t index = (p - first[as_size(r)]) % ring;
          keys[{r, h, index}] = k.token(r, h, p);
          values[{r, h, index}] = v.token(r, h, p);
        }
      }
    }
  }

  void reorder(const std::vector<std::int32_t>& source, std::int64_t heads, std::int64_t ring) {
    const NaiveLayer before = *this;
    for (std::int64_t r = 0; r < static_cast<std::int64_t>(source.size()); ++r) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < ring; ++i) {
          keys[{r, h, i}] = before.keys.at({source[as_size(r)], h, i});
          values[{r, h, i}] = before.values.at({source[as_size(r)], h, i});
        }
      }
    }
  }
};

void read_layer(const HybridCache& cache, int layer, NaiveLayer& to) {
  const auto read = [](const TensorView& view, auto& map) {
    const std::size_t bytes = as_size(view.shape[3]) * size_of(view.dtype);
    for (std::int64_t r = 0; r < view.shape[0]; ++r) {
      for (std::int64_t h = 0; h < view.shape[1]; ++h) {
        for (std::int64_t i = 0; i < view.shape[2]; ++i) {
          const auto* begin = view.as<unsigned char>() +
                              as_size((r * view.shape[1] + h) * view.shape[2] + i) * bytes;
          map[{r, h, i}] = Bytes(begin, begin + bytes);
        }
      }
    }
  };
  read(cache.keys(layer), to.keys);
  read(cache.values(layer), to.values);
}

void poison(const TensorView& view, Random& random) {
  std::int64_t count = 1;
  for (int d = 0; d < view.rank; ++d) count *= view.shape[d];
  Bytes bytes(as_size(count) * size_of(view.dtype));
  random.fill(bytes);
  std::memcpy(view.data, bytes.data(), bytes.size());
}

KvLayer random_kv(Random& random) {
  KvLayer layer;
  layer.kv_heads = random.draw(1, 3);
  layer.head_dim = random.draw(1, 9);
  layer.v_head_dim = random.draw(1, 9);
  layer.window = random.draw(0, 1) * random.draw(1, 16);
  layer.dtype = random.pick(std::array{DType::kF32, DType::kBF16, DType::kF16});
  return layer;
}

TEST(HybridCache, Shapes) {
  KvLayer full{2, 5, 3, 0, DType::kBF16};
  KvLayer sliding{1, 4, 4, 6, DType::kF32};
  KvLayer wide{1, 4, 4, 600, DType::kF16};
  LinearLayer linear{7, 4, 3, 2, 5, DType::kF16};
  HybridCache cache(CacheSpec{3, 10, {full, sliding, wide, linear}});
  EXPECT_EQ(cache.capacity(0), 10);
  EXPECT_EQ(cache.capacity(1), 6);
  EXPECT_EQ(cache.capacity(2), 10);
  const auto expect_shape = [](const TensorView& view, DType dtype,
                               const std::vector<std::int64_t>& shape) {
    EXPECT_EQ(view.dtype, dtype);
    EXPECT_EQ(std::vector<std::int64_t>(view.shape, view.shape + view.rank), shape);
    std::int64_t stride = 1;
    for (int d = view.rank - 1; d >= 0; --d) {
      EXPECT_EQ(view.stride[d], stride);
      stride *= view.shape[d];
    }
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % 64, 0U);
  };
  expect_shape(cache.keys(0), DType::kBF16, {3, 2, 10, 5});
  expect_shape(cache.values(0), DType::kBF16, {3, 2, 10, 3});
  expect_shape(cache.keys(1), DType::kF32, {3, 1, 6, 4});
  expect_shape(cache.conv_state(3), DType::kF16, {3, 7, 4});
  expect_shape(cache.recurrent_state(3), DType::kF32, {3, 3, 2, 5});
  EXPECT_GE(cache.bytes(), 2U * 3 * 2 * 10 * 8 + 2U * 4 * 3 * 6 * 4 + 4U * 3 * 30);
  EXPECT_EQ(cache.spec().layers.size(), 4U);
}

TEST(HybridCache, FillAndReorderMatchTheNaiveModel) {
  Random random;
  SCOPED_TRACE("seed " + std::to_string(random.seed));
  for (int trial = 0; trial < 150; ++trial) {
    CacheSpec spec;
    spec.rows = random.draw(1, 7);
    spec.max_len = random.draw(1, 24);
    for (int i = random.draw(1, 3); i > 0; --i) spec.layers.emplace_back(random_kv(random));
    HybridCache cache(spec);
    std::vector<NaiveLayer> expected(spec.layers.size());
    for (int i = 0; i < static_cast<int>(spec.layers.size()); ++i) {
      poison(cache.keys(i), random);
      poison(cache.values(i), random);
      read_layer(cache, i, expected[as_size(i)]);
    }
    for (int round = 0; round < 3; ++round) {
      const int rows = random.draw(1, spec.rows);
      const int tokens = random.draw(1, spec.max_len + 4);
      std::vector<std::int32_t> first;
      for (int r = 0; r < rows; ++r) {
        first.push_back(random.draw(std::max(0, tokens - spec.max_len), tokens));
      }
      std::vector<std::int32_t> source;
      for (int r = 0; r < spec.rows; ++r) source.push_back(random.draw(0, spec.rows - 1));
      if (random.draw(0, 1) == 1) {
        std::iota(source.begin(), source.end(), 0);
        std::shuffle(source.begin(), source.end(), std::mt19937(random.seed + 7U));
      }
      for (int i = 0; i < static_cast<int>(spec.layers.size()); ++i) {
        const auto& kv = std::get<KvLayer>(spec.layers[as_size(i)]);
        Tensor keys(rows, kv.kv_heads, tokens, kv.head_dim, kv.dtype, random);
        Tensor values(rows, kv.kv_heads, tokens, kv.v_head_dim, kv.dtype, random);
        cache.fill(i, keys.view, values.view, first.data());
        expected[as_size(i)].fill(keys, values, first, cache.capacity(i));
        expected[as_size(i)].reorder(source, kv.kv_heads, cache.capacity(i));
      }
      cache.reorder(source.data());
      for (int i = 0; i < static_cast<int>(spec.layers.size()); ++i) {
        NaiveLayer found;
        read_layer(cache, i, found);
        ASSERT_EQ(found.keys, expected[as_size(i)].keys) << "trial " << trial;
        ASSERT_EQ(found.values, expected[as_size(i)].values) << "trial " << trial;
      }
    }
  }
}

TEST(HybridCache, GatherIsTheInverseOfFill) {
  Random random;
  SCOPED_TRACE("seed " + std::to_string(random.seed));
  for (int trial = 0; trial < 300; ++trial) {
    CacheSpec spec;
    spec.rows = random.draw(1, 6);
    spec.max_len = random.draw(1, 24);
    const KvLayer kv = random_kv(random);
    spec.layers.emplace_back(kv);
    HybridCache cache(spec);
    poison(cache.keys(0), random);
    poison(cache.values(0), random);
    const int tokens = random.draw(1, spec.max_len + 4);
    std::vector<std::int32_t> first;
    for (int r = 0; r < spec.rows; ++r) {
      first.push_back(random.draw(std::max(0, tokens - spec.max_len), tokens));
    }
    Tensor keys(spec.rows, kv.kv_heads, tokens, kv.head_dim, kv.dtype, random);
    Tensor values(spec.rows, kv.kv_heads, tokens, kv.v_head_dim, kv.dtype, random);
    cache.fill(0, keys.view, values.view, first.data());

    // Some of the rows, in any order, moved by `shift` positions (negative: the oldest left out).
    const int rows = random.draw(1, spec.rows);
    const int shift = random.draw(0, 1) * random.draw(-tokens, 3);
    const int columns = std::max(1, tokens + shift) + random.draw(0, 2);
    std::vector<std::int32_t> slots;
    std::vector<std::int32_t> lengths;
    std::vector<std::int32_t> starts;
    for (int r = 0; r < rows; ++r) {
      slots.push_back(random.draw(0, spec.rows - 1));
      lengths.push_back(tokens - first[as_size(slots.back())]);
      starts.push_back(first[as_size(slots.back())] + shift);
    }
    Tensor keys_out(rows, kv.kv_heads, columns, kv.head_dim, kv.dtype, random);
    Tensor values_out(rows, kv.kv_heads, columns, kv.v_head_dim, kv.dtype, random);
    cache.gather(0, slots.data(), lengths.data(), starts.data(), keys_out.view, values_out.view);

    const auto expect_equal = [&](const Tensor& in, const Tensor& out) {
      const Bytes zeros(as_size(in.view.shape[3]) * size_of(kv.dtype), 0);
      for (int r = 0; r < rows; ++r) {
        const int slot = slots[as_size(r)];
        for (int h = 0; h < kv.kv_heads; ++h) {
          for (int p = 0; p < columns; ++p) {
            const int token = p - starts[as_size(r)];
            const bool held = token >= 0 && token < lengths[as_size(r)] &&
                              token >= lengths[as_size(r)] - cache.capacity(0);
            ASSERT_EQ(out.token(r, h, p),
                      held ? in.token(slot, h, first[as_size(slot)] + token) : zeros)
                << "trial " << trial << ", row " << r << ", position " << p;
          }
        }
      }
    };
    expect_equal(keys, keys_out);
    expect_equal(values, values_out);
  }
}

TEST(HybridCache, GatherLeavesTheGapsOfAViewAlone) {
  Random random;
  HybridCache cache(CacheSpec{1, 4, {KvLayer{1, 3, 3, 0, DType::kF32}}});
  std::vector<float> memory(4 * 5, -1.0F);
  TensorView view = dense_view(memory.data(), DType::kF32, 1, 1, 4, 3);
  view.stride[2] = 5;
  view.stride[1] = view.stride[0] = 20;
  const std::int32_t length = 2;
  cache.gather(0, nullptr, &length, nullptr, view, view);
  for (int p = 0; p < 4; ++p) {
    EXPECT_EQ(memory[as_size(p * 5 + 3)], -1.0F);
    EXPECT_EQ(memory[as_size(p * 5 + 4)], -1.0F);
    if (p >= 2) {
      EXPECT_EQ(memory[as_size(p * 5)], 0.0F);
    }
  }
}

TEST(HybridCache, LinearStateStartsAtZeroResetsAndReorders) {
  Random random;
  SCOPED_TRACE("seed " + std::to_string(random.seed));
  // Slots of more than the piece in which cycles are rotated.
  const LinearLayer linear{700, 4, 3, 20, 30, DType::kBF16};
  HybridCache cache(CacheSpec{5, 2, {KvLayer{1, 2, 2, 0, DType::kF32}, linear}});
  const auto slot_bytes = [](const TensorView& view, int slot) {
    const std::size_t bytes = as_size(view.stride[0]) * size_of(view.dtype);
    const auto* begin = view.as<unsigned char>() + as_size(slot) * bytes;
    return Bytes(begin, begin + bytes);
  };
  const TensorView views[] = {cache.conv_state(1), cache.recurrent_state(1)};
  for (const TensorView& view : views) {
    for (int r = 0; r < 5; ++r) {
      const Bytes found = slot_bytes(view, r);
      EXPECT_EQ(found, Bytes(found.size(), 0));
    }
    poison(view, random);
  }
  for (const std::vector<std::int32_t>& source : {std::vector<std::int32_t>{1, 2, 0, 4, 3},
                                                  {0, 1, 2, 3, 4},
                                                  {4, 4, 4, 4, 4},
                                                  {1, 2, 3, 4, 0},
                                                  {1, 0, 0, 2, 2}}) {
    for (const TensorView& view : views) poison(view, random);
    std::vector<Bytes> before;
    for (const TensorView& view : views) {
      for (int r = 0; r < 5; ++r) before.push_back(slot_bytes(view, r));
    }
    cache.reorder(source.data());
    for (int v = 0; v < 2; ++v) {
      for (int r = 0; r < 5; ++r) {
        EXPECT_EQ(slot_bytes(views[v], r), before[as_size(v * 5 + source[as_size(r)])]);
      }
    }
  }
  std::vector<Bytes> before;
  for (const TensorView& view : views) {
    for (int r = 0; r < 5; ++r) before.push_back(slot_bytes(view, r));
  }
  cache.reset(3);
  for (int v = 0; v < 2; ++v) {
    for (int r = 0; r < 5; ++r) {
      const Bytes& old = before[as_size(v * 5 + r)];
      EXPECT_EQ(slot_bytes(views[v], r), r == 3 ? Bytes(old.size(), 0) : old);
    }
  }
}

// Storage that a step overwrites for good comes back bit for bit; the rest and other slots stay.
TEST(HybridCache, SnapshotRestoresWhatAStepOverwrites) {
  Random random;
  SCOPED_TRACE(random.seed);
  HybridCache cache({3,
                     12,
                     {KvLayer{1, 4, 4, 0, DType::kF32}, KvLayer{2, 3, 5, 4, DType::kBF16},
                      LinearLayer{6, 4, 2, 3, 5, DType::kF16}}});
  const std::vector<TensorView> kept = {cache.keys(1), cache.values(1), cache.conv_state(2),
                                        cache.recurrent_state(2)};
  const std::vector<TensorView> not_kept = {cache.keys(0), cache.values(0)};
  const auto slot_bytes = [](const TensorView& view) {
    return as_size(view.stride[0]) * size_of(view.dtype);
  };
  const auto scramble = [&](const TensorView& view) {
    Bytes bytes(3 * slot_bytes(view));
    random.fill(bytes);
    std::memcpy(view.data, bytes.data(), bytes.size());
  };
  const auto bytes_of = [&](const TensorView& view, std::size_t slot) {
    const auto* begin = view.as<unsigned char>() + slot * slot_bytes(view);
    return Bytes(begin, begin + slot_bytes(view));
  };
  for (const auto& view : kept) scramble(view);
  std::vector<std::array<Bytes, 3>> before;
  for (const auto& view : kept) {
    before.push_back({bytes_of(view, 0), bytes_of(view, 1), bytes_of(view, 2)});
  }
  const HybridCache::Snapshot taken = cache.snapshot(2);
  for (const auto& view : kept) scramble(view);
  for (const auto& view : not_kept) scramble(view);
  const Bytes third = bytes_of(kept[3], 2), full = bytes_of(not_kept[0], 0);
  cache.restore(taken);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    EXPECT_EQ(bytes_of(kept[i], 0), before[i][0]) << i;
    EXPECT_EQ(bytes_of(kept[i], 1), before[i][1]) << i;
  }
  EXPECT_EQ(bytes_of(kept[3], 2), third);
  EXPECT_EQ(bytes_of(not_kept[0], 0), full);

  expect_error(ErrorCode::kInvalidArgument, "rows is 0, accepted is 1 to 3",
               [&] { cache.snapshot(0); });
  expect_error(ErrorCode::kInvalidArgument, "rows is 4", [&] { cache.snapshot(4); });
  HybridCache other({3, 12, {KvLayer{1, 4, 4, 3, DType::kF32}}});
  expect_error(ErrorCode::kInvalidArgument, "bytes for 2 rows", [&] { other.restore(taken); });
  cache.release();
  expect_error(ErrorCode::kState, "released", [&] { cache.restore(taken); });
}

TEST(HybridCache, CropRefusesWhatIsGone) {
  HybridCache full({2, 12, {KvLayer{1, 4, 4, 0, DType::kF32}}});
  full.crop(12, 0);
  full.crop(5, 3);
  expect_error(ErrorCode::kInvalidArgument, "kept is 6, accepted is 0 to length (5)",
               [&] { full.crop(5, 6); });
  expect_error(ErrorCode::kInvalidArgument, "length is 13", [&] { full.crop(13, 6); });

  HybridCache sliding({2, 12, {KvLayer{1, 4, 4, 4, DType::kF32}}});
  sliding.crop(4, 2);   // the ring has not gone round yet
  sliding.crop(9, 9);   // nothing to do
  sliding.crop(9, 8);   // a query at 8 sees 5 to 8, the ring holds 5 to 8
  sliding.crop(12, 0);  // a first token sees itself only
  expect_error(ErrorCode::kState, "the last 4 of 9 tokens", [&] { sliding.crop(9, 7); });

  HybridCache linear(
      {2, 12, {KvLayer{1, 4, 4, 0, DType::kF32}, LinearLayer{6, 4, 2, 3, 5, DType::kF32}}});
  linear.crop(7, 7);
  expect_error(ErrorCode::kState, "layer 1 keeps a recurrent state", [&] { linear.crop(7, 6); });
}

TEST(HybridCache, AddressesNeverChange) {
  Random random;
  const KvLayer kv{2, 4, 4, 3, DType::kF16};
  HybridCache cache(CacheSpec{2, 8, {kv}});
  void* const keys = cache.keys(0).data;
  void* const values = cache.values(0).data;
  Tensor prompt(2, 2, 6, 4, DType::kF16, random);
  const std::int32_t first[] = {0, 2};
  const std::int32_t swap[] = {1, 0};
  cache.fill(0, prompt.view, prompt.view, first);
  cache.reorder(swap);
  cache.reset(0);
  EXPECT_EQ(cache.keys(0).data, keys);
  EXPECT_EQ(cache.values(0).data, values);
}

// Memory of a host that counts and may run out.
struct Host {
  long held = 0;
  long calls = 0;
  bool empty = false;
  std::size_t misalign = 0;

  Allocator allocator() {
    return Allocator{
        this,
        [](void* context, std::size_t bytes) -> void* {
          auto* host = static_cast<Host*>(context);
          ++host->calls;
          if (host->empty) return nullptr;
          host->held += static_cast<long>(bytes);
          return static_cast<char*>(::operator new (bytes + 64, std::align_val_t{64})) +
                 host->misalign;
        },
        [](void* context, void* address, std::size_t bytes) {
          auto* host = static_cast<Host*>(context);
          host->held -= static_cast<long>(bytes);
          ::operator delete (static_cast<char*>(address) - host->misalign, std::align_val_t{64});
        }};
  }
};

CacheSpec small_spec() {
  return CacheSpec{
      2, 8, {KvLayer{1, 4, 4, 0, DType::kF32}, LinearLayer{3, 4, 1, 2, 2, DType::kF32}}};
}

TEST(HybridCache, MemoryIsTheHosts) {
  Host host;
  {
    HybridCache cache(small_spec(), host.allocator());
    EXPECT_EQ(host.held, static_cast<long>(cache.bytes()));
  }
  EXPECT_EQ(host.held, 0);
  HybridCache cache(small_spec(), host.allocator());
  const std::int32_t source[] = {1, 0};
  const long calls = host.calls;
  cache.reorder(source);
  EXPECT_EQ(host.calls, calls);
  cache.release();
  EXPECT_EQ(host.held, 0);
  EXPECT_EQ(cache.bytes(), 0U);
  cache.release();
  float value = 0.0F;
  const TensorView view = dense_view(&value, DType::kF32, 1, 1, 1, 4);
  const std::int32_t zero = 0;
  for (const std::function<void()>& access : std::vector<std::function<void()>>{
           [&] { cache.keys(0); }, [&] { cache.values(0); }, [&] { cache.conv_state(1); },
           [&] { cache.recurrent_state(1); }, [&] { cache.reset(0); },
           [&] { cache.reorder(source); }, [&] { cache.fill(0, view, view, nullptr); },
           [&] { cache.gather(0, nullptr, &zero, nullptr, view, view); }}) {
    expect_error(ErrorCode::kState, "has been released", access);
  }
}

TEST(HybridCache, NothingStaysAllocatedAfterAFailure) {
  Host host;
  host.empty = true;
  expect_error(ErrorCode::kOutOfMemory, "no memory for",
               [&] { HybridCache(small_spec(), host.allocator()); });
  EXPECT_EQ(host.held, 0);
  host.empty = false;
  host.misalign = 16;
  expect_error(ErrorCode::kInvalidArgument, "multiple of 64",
               [&] { HybridCache(small_spec(), host.allocator()); });
  EXPECT_EQ(host.held, 0);
  Allocator half = host.allocator();
  half.release = nullptr;
  expect_error(ErrorCode::kInvalidArgument, "only one of allocate and release",
               [&] { HybridCache(small_spec(), half); });
}

TEST(HybridCache, RejectsBadSpecs) {
  const auto expect_rejected = [](const std::string& part,
                                  const std::function<void(CacheSpec&)>& spoil) {
    CacheSpec spec = small_spec();
    spoil(spec);
    expect_error(ErrorCode::kInvalidArgument, part, [&] { HybridCache{spec}; });
  };
  const auto kv = [](CacheSpec& spec) -> KvLayer& { return std::get<KvLayer>(spec.layers[0]); };
  const auto linear = [](CacheSpec& spec) -> LinearLayer& {
    return std::get<LinearLayer>(spec.layers[1]);
  };
  expect_rejected("rows is 0, accepted is 1 to 64", [](auto& spec) { spec.rows = 0; });
  expect_rejected("rows is 65", [](auto& spec) { spec.rows = 65; });
  expect_rejected("max_len is 0", [](auto& spec) { spec.max_len = 0; });
  expect_rejected("layers is empty", [](auto& spec) { spec.layers.clear(); });
  expect_rejected("layer 0: kv_heads is 0", [&](auto& spec) { kv(spec).kv_heads = 0; });
  expect_rejected("layer 0: head_dim is -1", [&](auto& spec) { kv(spec).head_dim = -1; });
  expect_rejected("layer 0: v_head_dim is 0", [&](auto& spec) { kv(spec).v_head_dim = 0; });
  expect_rejected("layer 0: window is -2", [&](auto& spec) { kv(spec).window = -2; });
  expect_rejected("layer 0: dtype is i64", [&](auto& spec) { kv(spec).dtype = DType::kI64; });
  expect_rejected("layer 1: conv_channels is 0",
                  [&](auto& spec) { linear(spec).conv_channels = 0; });
  expect_rejected("layer 1: conv_width is 0", [&](auto& spec) { linear(spec).conv_width = 0; });
  expect_rejected("layer 1: heads is 0", [&](auto& spec) { linear(spec).heads = 0; });
  expect_rejected("layer 1: key_dim is 0", [&](auto& spec) { linear(spec).key_dim = 0; });
  expect_rejected("layer 1: value_dim is 0", [&](auto& spec) { linear(spec).value_dim = 0; });
  expect_rejected("layer 1: conv_dtype is u8",
                  [&](auto& spec) { linear(spec).conv_dtype = DType::kU8; });
  constexpr std::int32_t kHuge = std::numeric_limits<std::int32_t>::max();
  expect_rejected("more bytes than an address can reach", [&](auto& spec) {
    spec.max_len = kHuge;
    kv(spec).kv_heads = kHuge;
    kv(spec).head_dim = kHuge;
  });
  expect_rejected("more bytes than an address can reach", [&](auto& spec) {
    // Each layer fits, their sum does not: 2 rows of 2^31 * 2^27 * 4 bytes are 2^61 a tensor.
    spec.max_len = kHuge;
    kv(spec).kv_heads = 1 << 27;
    kv(spec).head_dim = 1;
    kv(spec).v_head_dim = 1;
    for (int i = 0; i < 2; ++i) spec.layers.push_back(spec.layers[0]);
  });
}

TEST(HybridCache, RejectsBadCalls) {
  HybridCache cache(small_spec());
  std::vector<float> memory(4096);
  const TensorView good = dense_view(memory.data(), DType::kF32, 2, 1, 6, 4);
  const auto expect_rejected = [](const std::string& part, const std::function<void()>& call) {
    expect_error(ErrorCode::kInvalidArgument, part, call);
  };
  expect_rejected("layer is 2, accepted is 0 to 1", [&] { cache.keys(2); });
  expect_rejected("layer is -1", [&] { cache.capacity(-1); });
  expect_rejected("layer 1 is a linear-attention layer, accepted is a KV layer",
                  [&] { cache.values(1); });
  expect_rejected("layer 0 is a KV layer, accepted is a linear-attention layer",
                  [&] { cache.conv_state(0); });
  expect_rejected("layer 1 is a linear-attention layer",
                  [&] { cache.fill(1, good, good, nullptr); });
  expect_rejected("slot is 2, accepted is 0 to 1", [&] { cache.reset(2); });
  const std::int32_t source[] = {0, -1};
  expect_rejected("source[1] is -1", [&] { cache.reorder(source); });
  expect_rejected("source is null", [&] { cache.reorder(nullptr); });

  const auto spoilt = [&](const std::function<void(TensorView&)>& spoil) {
    TensorView view = good;
    spoil(view);
    return view;
  };
  const std::int32_t lengths[] = {6, 6};
  for (const TensorView& bad :
       {spoilt([](auto& view) { view.data = nullptr; }),
        spoilt([](auto& view) { view.dtype = DType::kBF16; }),
        spoilt([](auto& view) { view.rank = 3; }), spoilt([](auto& view) { view.shape[0] = 3; }),
        spoilt([](auto& view) { view.shape[0] = 0; }),
        spoilt([](auto& view) { view.shape[1] = 2; }),
        spoilt([](auto& view) { view.shape[2] = 0; }),
        spoilt([](auto& view) { view.shape[3] = 5; }),
        spoilt([](auto& view) { view.stride[3] = 2; })}) {
    expect_rejected("layer 0: keys is", [&] { cache.fill(0, bad, good, nullptr); });
    expect_rejected("layer 0: values is", [&] { cache.fill(0, good, bad, nullptr); });
    expect_rejected("layer 0: keys is",
                    [&] { cache.gather(0, nullptr, lengths, nullptr, bad, good); });
  }
  const TensorView shorter = spoilt([](auto& view) { view.shape[2] = 5; });
  expect_rejected("accepted are equal rows and T", [&] { cache.fill(0, good, shorter, nullptr); });
  const TensorView longer = dense_view(memory.data(), DType::kF32, 2, 1, 10, 4);
  expect_rejected("first[0] is 0, accepted is 2 to 10 (a prompt of 10 positions into a slot of 8",
                  [&] { cache.fill(0, longer, longer, nullptr); });
  const std::int32_t first[] = {2, 11};
  expect_rejected("first[1] is 11", [&] { cache.fill(0, longer, longer, first); });
  const std::int32_t negative[] = {-1, 0};
  expect_rejected("first[0] is -1", [&] { cache.fill(0, good, good, negative); });

  expect_rejected("lengths is null",
                  [&] { cache.gather(0, nullptr, nullptr, nullptr, good, good); });
  expect_rejected("slots[1] is -1", [&] { cache.gather(0, source, lengths, nullptr, good, good); });
  const std::int32_t too_long[] = {9, 0};
  expect_rejected("lengths[0] is 9, accepted is 0 to max_len (8)",
                  [&] { cache.gather(0, nullptr, too_long, nullptr, longer, longer); });
  const std::int32_t late[] = {0, 1};
  expect_rejected("first[1] is 1 and lengths[1] 6, accepted is a sum of at most T (6)",
                  [&] { cache.gather(0, nullptr, lengths, late, good, good); });
}

}  // namespace
}  // namespace segki
