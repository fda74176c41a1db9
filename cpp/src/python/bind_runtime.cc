#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "python/bindings.h"
#include "segki/decode_loop.h"
#include "segki/error.h"
#include "segki/hybrid_cache.h"
#include "segki/step_program.h"
#include "segki/stop.h"

namespace nb = nanobind;

namespace segki::python {
namespace {

// An allocator made of two Python callables: `allocate(bytes) -> address` (None: no memory) and
// `release(address, bytes)`.
struct PythonMemory {
  nb::callable allocate;
  nb::callable release;

  void* take(std::size_t bytes) const {
    nb::gil_scoped_acquire gil;
    const nb::object given = allocate(bytes);
    if (given.is_none()) return nullptr;
    std::uintptr_t address = 0;
    if (!nb::try_cast(given, address)) {
      throw Error(ErrorCode::kInvalidArgument,
                  std::string("HybridCache: argument 'allocate' returned ") +
                      nb::repr(given).c_str() + ", accepted an address (int) or None");
    }
    return reinterpret_cast<void*>(address);  // NOLINT: addresses cross from Python as integers
  }

  // Called while memory is given back, where nobody can catch: an exception goes to
  // sys.unraisablehook, and one that is on its way already stays.
  void give_back(void* address, std::size_t bytes) const noexcept {
    nb::gil_scoped_acquire gil;
    const nb::error_scope on_its_way;
    try {
      release(reinterpret_cast<std::uintptr_t>(address), bytes);
    } catch (nb::python_error& raised) {
      raised.discard_as_unraisable(release);
    }
  }

  Allocator allocator() {
    return Allocator{this,
                     [](void* self, std::size_t bytes) {
                       return static_cast<const PythonMemory*>(self)->take(bytes);
                     },
                     [](void* self, void* address, std::size_t bytes) {
                       static_cast<const PythonMemory*>(self)->give_back(address, bytes);
                     }};
  }
};

// Members in this order: the cache gives its memory back before the callables go.
struct PythonCache {
  std::unique_ptr<PythonMemory> memory;
  HybridCache cache;
};

void init_cache(PythonCache* self, std::int32_t rows, std::int32_t max_len,
                const std::vector<std::variant<KvLayer, LinearLayer>>& layers, nb::object allocate,
                nb::object release) {
  CacheSpec spec{rows, max_len, layers};
  if (allocate.is_none()) {
    new (self) PythonCache{nullptr, HybridCache(std::move(spec))};
    return;
  }
  auto memory = std::make_unique<PythonMemory>(
      PythonMemory{nb::cast<nb::callable>(allocate), nb::cast<nb::callable>(release)});
  const Allocator allocator = memory->allocator();
  new (self) PythonCache{std::move(memory), HybridCache(std::move(spec), allocator)};
}

// Ctrl-C: asks Python for pending signals; what a handler raised is kept until the loop has ended
// in good order.
class SignalWatch {
 public:
  bool operator()() {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return false;
    raised_.emplace();
    return true;
  }
  void rethrow() {
    if (raised_) throw std::move(*raised_);
  }

 private:
  std::optional<nb::python_error> raised_;
};

DecodeResult run_loop(DecodeLoop& loop, std::int32_t already, const nb::object& on_tokens) {
  SignalWatch watch;
  OnTokens forward;
  if (!on_tokens.is_none()) {
    forward = [&on_tokens](std::int32_t begin, std::int32_t count, const std::int64_t*,
                           std::int64_t) {
      nb::gil_scoped_acquire gil;
      const nb::object more = on_tokens(begin, count);
      return more.is_none() || nb::cast<bool>(more);
    };
  }
  DecodeResult result;
  {
    nb::gil_scoped_release unlocked;
    result = loop.run(already, forward, [&watch] { return watch(); });
  }
  watch.rethrow();
  return result;
}

}  // namespace

void bind_runtime(nb::module_& module) {
  nb::class_<KvLayer>(module, "KvLayer")
      .def(
          "__init__",
          [](KvLayer* self, std::int32_t kv_heads, std::int32_t head_dim, std::int32_t v_head_dim,
             std::int32_t window, DType dtype) {
            new (self) KvLayer{kv_heads, head_dim, v_head_dim, window, dtype};
          },
          nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("v_head_dim"), nb::arg("window"),
          nb::arg("dtype"));
  nb::class_<LinearLayer>(module, "LinearLayer")
      .def(
          "__init__",
          [](LinearLayer* self, std::int32_t conv_channels, std::int32_t conv_width,
             std::int32_t heads, std::int32_t key_dim, std::int32_t value_dim, DType conv_dtype) {
            new (self)
                LinearLayer{conv_channels, conv_width, heads, key_dim, value_dim, conv_dtype};
          },
          nb::arg("conv_channels"), nb::arg("conv_width"), nb::arg("heads"), nb::arg("key_dim"),
          nb::arg("value_dim"), nb::arg("conv_dtype"));

  nb::class_<HybridCache::Snapshot>(module, "CacheSnapshot")
      .def_ro("rows", &HybridCache::Snapshot::rows);
  nb::class_<PythonCache>(module, "HybridCache")
      .def(
          "__init__",
          [](PythonCache* self, std::int32_t rows, std::int32_t max_len, const nb::list& layers,
             nb::object allocate, nb::object release) {
            std::vector<CacheLayer> converted;
            for (nb::handle layer : layers) {
              if (nb::isinstance<LinearLayer>(layer)) {
                converted.emplace_back(nb::cast<LinearLayer>(layer));
              } else {
                converted.emplace_back(nb::cast<KvLayer>(layer));
              }
            }
            init_cache(self, rows, max_len, converted, std::move(allocate), std::move(release));
          },
          nb::arg("rows"), nb::arg("max_len"), nb::arg("layers"), nb::arg("allocate") = nb::none(),
          nb::arg("release") = nb::none())
      .def_prop_ro("bytes", [](const PythonCache& self) { return self.cache.bytes(); })
      .def_prop_ro("rows", [](const PythonCache& self) { return self.cache.spec().rows; })
      .def_prop_ro("max_len", [](const PythonCache& self) { return self.cache.spec().max_len; })
      .def("keys", [](const PythonCache& self, int layer) { return self.cache.keys(layer); })
      .def("values", [](const PythonCache& self, int layer) { return self.cache.values(layer); })
      .def("conv_state",
           [](const PythonCache& self, int layer) { return self.cache.conv_state(layer); })
      .def("recurrent_state",
           [](const PythonCache& self, int layer) { return self.cache.recurrent_state(layer); })
      .def("capacity",
           [](const PythonCache& self, int layer) { return self.cache.capacity(layer); })
      .def(
          "fill",
          [](PythonCache& self, int layer, const TensorView& keys, const TensorView& values,
             const std::vector<std::int32_t>& first) {
            if (static_cast<std::int64_t>(first.size()) != keys.shape[0]) {
              throw Error(ErrorCode::kInvalidArgument, "fill: argument 'first' has " +
                                                           std::to_string(first.size()) +
                                                           " entries, accepted one for each of " +
                                                           std::to_string(keys.shape[0]) + " rows");
            }
            self.cache.fill(layer, keys, values, first.data());
          },
          nb::arg("layer"), nb::arg("keys"), nb::arg("values"), nb::arg("first"))
      .def(
          "gather",
          [](const PythonCache& self, int layer, const TensorView& keys, const TensorView& values,
             const std::vector<std::int32_t>& lengths, const std::vector<std::int32_t>& first) {
            const auto rows = static_cast<std::size_t>(keys.shape[0]);
            if (lengths.size() != rows || first.size() != rows) {
              throw Error(ErrorCode::kInvalidArgument,
                          "gather: arguments 'lengths' and 'first' have " +
                              std::to_string(lengths.size()) + " and " +
                              std::to_string(first.size()) + " entries, accepted one for each of " +
                              std::to_string(rows) + " rows");
            }
            self.cache.gather(layer, nullptr, lengths.data(), first.data(), keys, values);
          },
          nb::arg("layer"), nb::arg("keys"), nb::arg("values"), nb::arg("lengths"),
          nb::arg("first"))
      .def("reset", [](PythonCache& self, std::int32_t slot) { self.cache.reset(slot); })
      .def("snapshot",
           [](const PythonCache& self, std::int32_t rows) { return self.cache.snapshot(rows); })
      .def("restore",
           [](PythonCache& self, const HybridCache::Snapshot& taken) { self.cache.restore(taken); })
      .def("crop", [](const PythonCache& self, std::int32_t length,
                      std::int32_t kept) { self.cache.crop(length, kept); })
      .def("reorder",
           [](PythonCache& self, const std::vector<std::int32_t>& source) {
             if (static_cast<std::int32_t>(source.size()) != self.cache.spec().rows) {
               throw Error(ErrorCode::kInvalidArgument,
                           "reorder: argument 'source' has " + std::to_string(source.size()) +
                               " entries, accepted " + std::to_string(self.cache.spec().rows));
             }
             self.cache.reorder(source.data());
           })
      .def("release", [](PythonCache& self) { self.cache.release(); });

  nb::class_<StepProgram>(module, "StepProgram")
      .def(
          "run", [](StepProgram& self) { self.run(); }, nb::call_guard<nb::gil_scoped_release>())
      .def("profile", &StepProgram::profile, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("size", &StepProgram::size)
      .def_prop_ro("scratch_bytes", &StepProgram::scratch_bytes)
      .def_prop_ro("op_names", &StepProgram::op_names);

  nb::class_<StepProgramBuilder> builder(module, "StepProgramBuilder");
  builder.def(
      "__init__",
      [](StepProgramBuilder* self, const Backend& backend) {
        new (self) StepProgramBuilder(backend);
      },
      nb::arg("backend"));
  const auto def_add = [&builder]<typename Args>(const Args*) {
    builder.def("add", [](StepProgramBuilder& self, const Args& args) { self.add(args); });
  };
  def_add(static_cast<const EmbeddingArgs*>(nullptr));
  def_add(static_cast<const NormArgs*>(nullptr));
  def_add(static_cast<const SumNormArgs*>(nullptr));
  def_add(static_cast<const ProjectionArgs*>(nullptr));
  def_add(static_cast<const GatedProjectionArgs*>(nullptr));
  def_add(static_cast<const RopeKvWriteArgs*>(nullptr));
  def_add(static_cast<const AttentionArgs*>(nullptr));
  def_add(static_cast<const LmHeadArgs*>(nullptr));
  def_add(static_cast<const ArgmaxArgs*>(nullptr));
  def_add(static_cast<const SelectTokenArgs*>(nullptr));
  def_add(static_cast<const GatedDeltaArgs*>(nullptr));
  def_add(static_cast<const RouterArgs*>(nullptr));
  def_add(static_cast<const ExpertGatedProjectionArgs*>(nullptr));
  def_add(static_cast<const ExpertProjectionArgs*>(nullptr));
  builder.def("finish", &StepProgramBuilder::finish);

  nb::enum_<StopReason>(module, "StopReason")
      .value("running", StopReason::kRunning)
      .value("eos", StopReason::kEos)
      .value("length", StopReason::kLength)
      .value("nan", StopReason::kNan);

  nb::class_<StopRule>(module, "StopRule")
      .def(nb::init<>())
      .def_rw("eos", &StopRule::eos)
      .def_rw("min_new_tokens", &StopRule::min_new_tokens)
      .def_rw("max_new_tokens", &StopRule::max_new_tokens)
      .def_rw("pad", &StopRule::pad)
      .def_rw("check_every", &StopRule::check_every);

  nb::class_<DecodeState>(module, "DecodeState")
      .def(nb::init<>())
      .def_rw("next", &DecodeState::next)
      .def_rw("lengths", &DecodeState::lengths)
      .def_rw("positions", &DecodeState::positions)
      .def_rw("generated", &DecodeState::generated)
      .def_rw("finished", &DecodeState::finished)
      .def_rw("history", &DecodeState::history)
      .def_rw("log_prob", &DecodeState::log_prob);

  nb::class_<DecodeResult>(module, "DecodeResult")
      .def_ro("steps_run", &DecodeResult::steps_run)
      .def_ro("columns", &DecodeResult::columns)
      .def_ro("lengths", &DecodeResult::lengths)
      .def_ro("reasons", &DecodeResult::reasons)
      .def_ro("interrupted", &DecodeResult::interrupted);

  nb::class_<DecodeLoop>(module, "DecodeLoop")
      .def(
          "__init__",
          [](DecodeLoop* self, StepProgram& step, StepProgram& choose, const DecodeState& state,
             const StopRule& rule) {
            new (self) DecodeLoop(
                [&step, &choose] {
                  step.run();
                  choose.run();
                },
                state, rule);
          },
          nb::arg("step"), nb::arg("choose"), nb::arg("state"), nb::arg("rule"),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def(
          "__init__",
          [](DecodeLoop* self, nb::callable replay, const DecodeState& state,
             const StopRule& rule) {
            new (self) DecodeLoop(
                [replay = std::move(replay)] {
                  nb::gil_scoped_acquire gil;
                  replay();
                },
                state, rule);
          },
          nb::arg("replay"), nb::arg("state"), nb::arg("rule"))
      .def("run", &run_loop, nb::arg("already") = 0, nb::arg("on_tokens") = nb::none());
}

}  // namespace segki::python
