// Errors, backend registry and loader, thread pool, barrier, bandwidth measurement.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "segki/bandwidth.h"
#include "segki/segki.h"
#include "thrown.h"

namespace segki {
namespace {

std::string stub(const std::string& variant) {
  return std::string(SEGKI_STUB_DIR) + "/libsegki_stub_" + variant + ".so";
}

// Rows of f32 values and their norm by the formula of NormSpec.
struct NormCase {
  explicit NormCase(int rows = 3, int hidden = 37)
      : x(rows * hidden), weight(hidden), out(rows * hidden, 1e30F) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = std::sin(static_cast<float>(i) + 0.5F);
    }
    for (std::size_t i = 0; i < weight.size(); ++i) {
      weight[i] = 0.5F + static_cast<float>(i % 5);
    }
    args.x = dense_view(x.data(), DType::kF32, rows, hidden);
    args.weight = dense_view(weight.data(), DType::kF32, hidden);
    args.out = dense_view(out.data(), DType::kF32, rows, hidden);
    args.norm.kind = NormKind::kRms;
    args.norm.eps = 1e-6F;
  }

  void expect_result() const {
    const std::size_t hidden = weight.size();
    for (std::size_t row = 0; row < x.size() / hidden; ++row) {
      double sum = 0.0;
      for (std::size_t i = 0; i < hidden; ++i) {
        sum += static_cast<double>(x[row * hidden + i]) * x[row * hidden + i];
      }
      const double factor = 1.0 / std::sqrt(sum / static_cast<double>(hidden) + 1e-6);
      for (std::size_t i = 0; i < hidden; ++i) {
        EXPECT_NEAR(out[row * hidden + i], x[row * hidden + i] * factor * weight[i], 1e-5);
      }
    }
  }

  std::vector<float> x, weight, out;
  NormArgs args;
};

TEST(Error, CarriesCodeAndMessage) {
  const Error error(ErrorCode::kNumeric, "row 3");
  EXPECT_EQ(error.code(), ErrorCode::kNumeric);
  EXPECT_STREQ(error.what(), "row 3");
}

TEST(Backend, UnknownNameListsTheKnownOnes) {
  const Error error = error_of([] { backend("vulkan"); });
  EXPECT_EQ(error.code(), ErrorCode::kBackend);
  EXPECT_TRUE(contains(error, "'vulkan'")) << error.what();
  EXPECT_TRUE(contains(error, "'cpu'")) << error.what();
}

TEST(Backend, CpuIsBuiltIn) {
  EXPECT_EQ(backend("cpu").name(), "cpu");
  const std::vector<std::string> names = backend_names();
  EXPECT_EQ(std::count(names.begin(), names.end(), "cpu"), 1);
  EXPECT_EQ(cpu_instruction_sets().back(), "generic");
  EXPECT_EQ(backend("cpu").table().instruction_set, cpu_instruction_sets().front());
}

TEST(Backend, StubRunsThroughTheOp) {
  const Backend loaded = load_backend(stub("backend"));
  EXPECT_EQ(loaded.name(), "stub");
  NormCase small;
  norm(loaded, small.args);
  small.expect_result();
  NormCase large(16, 4099);  // large enough to be shared out
  norm(backend("stub"), large.args);
  large.expect_result();
}

TEST(Backend, StubRunsThroughAProgram) {
  NormCase given;
  StepProgramBuilder builder(load_backend(stub("backend")));
  builder.add(given.args);
  StepProgram program = builder.finish();
  program.run();
  given.expect_result();
}

TEST(Backend, MissingSlotIsUnsupported) {
  const Backend loaded = load_backend(stub("backend"));
  float value = 0.0F;
  std::int64_t token = 0;
  ArgmaxArgs args;
  args.logits = dense_view(&value, DType::kF32, 1, 1);
  args.tokens = dense_view(&token, DType::kI64, 1);
  const Error error = error_of([&] { argmax(loaded, args); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_TRUE(contains(error, "argmax: backend 'stub'")) << error.what();
}

TEST(Backend, FailureOfAKernelIsThrown) {
  NormCase given;
  given.args.norm.kind = NormKind::kLayer;  // which the stub refuses
  const Error error = error_of([&] { norm(load_backend(stub("backend")), given.args); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_TRUE(contains(error, "norm: backend 'stub' reports error 2")) << error.what();
}

TEST(Backend, LoadingAgainGivesTheSameTable) {
  const Backend first = load_backend(stub("backend"));
  const Backend second = load_backend(std::string(SEGKI_STUB_DIR) + "/./libsegki_stub_backend.so");
  EXPECT_EQ(&first.table(), &second.table());
  EXPECT_EQ(&first.table(), &backend("stub").table());
}

TEST(Backend, OlderTableHasNullSlots) {
  const Backend old = load_backend(stub("old"));
  EXPECT_NE(old.table().norm, nullptr);
  EXPECT_EQ(old.table().sum_norm, nullptr);
  EXPECT_EQ(old.table().select_token, nullptr);
}

TEST(Backend, RefusedLibraries) {
  const std::string accepted = std::to_string(kBackendApiVersion);
  const struct {
    std::string path;
    std::string reason;
  } cases[] = {
      {stub("other_version"),
       "api_version " + std::to_string(kBackendApiVersion + 1) + ", accepted " + accepted},
      {stub("no_entry"), "no entry point 'segki_backend_table'"},
      {stub("no_device"), "no usable device"},
      {stub("name_taken"), "name 'cpu' is taken"},
      {stub("not_there"), "No such file"},
      {"/proc/self/maps", "/proc/"},
  };
  for (const auto& refused : cases) {
    const std::vector<std::string> before = backend_names();
    const Error error = error_of([&] { load_backend(refused.path); });
    EXPECT_EQ(error.code(), ErrorCode::kBackend);
    EXPECT_TRUE(contains(error, refused.reason)) << error.what();
    EXPECT_EQ(backend_names(), before);
  }
}

struct Counts {
  explicit Counts(std::size_t parts) : calls(parts) {}
  std::vector<std::atomic<int>> calls;

  static void add(void* self, std::int32_t part) {
    static_cast<Counts*>(self)->calls[static_cast<std::size_t>(part)].fetch_add(1);
  }
};

TEST(ThreadPool, RunsEachPartOnce) {
  ThreadPool pool(3);
  EXPECT_EQ(pool.threads(), 3);
  const ParallelHook hook = pool.hook();
  EXPECT_EQ(hook.parts, 3);
  EXPECT_NE(hook.concurrent, 0);
  for (const std::int32_t parts : {0, 1, 2, 3, 5, 8, 2}) {
    Counts counts(8);
    for (int i = 0; i < 200; ++i) {
      hook.run(hook.context, parts, &Counts::add, &counts);
    }
    for (std::int32_t part = 0; part < 8; ++part) {
      EXPECT_EQ(counts.calls[static_cast<std::size_t>(part)].load(), part < parts ? 200 : 0);
    }
  }
}

TEST(ThreadPool, WakesSleepingWorkers) {
  ThreadPool pool(2, 0);
  const ParallelHook hook = pool.hook();
  Counts counts(2);
  for (int i = 0; i < 20; ++i) {
    hook.run(hook.context, 2, &Counts::add, &counts);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(counts.calls[0].load(), 20);
  EXPECT_EQ(counts.calls[1].load(), 20);
}

TEST(ThreadPool, RegionsOfSeveralCallersDoNotMix) {
  ThreadPool pool(2);
  const ParallelHook hook = pool.hook();
  std::vector<Counts> counts;
  std::vector<std::thread> callers;
  counts.reserve(4);
  for (int caller = 0; caller < 4; ++caller) {
    counts.emplace_back(2);
  }
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 200; ++i) {
        hook.run(hook.context, 2, &Counts::add, &counts[static_cast<std::size_t>(caller)]);
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  for (const Counts& each : counts) {
    EXPECT_EQ(each.calls[0].load(), 200);
    EXPECT_EQ(each.calls[1].load(), 200);
  }
}

struct Nested {
  ParallelHook hook;
  Counts counts{3};

  static void body(void* self, std::int32_t) {
    auto* nested = static_cast<Nested*>(self);
    nested->hook.run(nested->hook.context, 3, &Counts::add, &nested->counts);
  }
};

TEST(ThreadPool, NestedCallRunsInline) {
  ThreadPool pool(2);
  Nested nested{pool.hook()};
  nested.hook.run(nested.hook.context, 2, &Nested::body, &nested);
  for (const std::atomic<int>& calls : nested.counts.calls) {
    EXPECT_EQ(calls.load(), 2);
  }
}

#if !defined(__SANITIZE_THREAD__)
TEST(ThreadPool, WorksInAForkedChild) {
  ThreadPool pool(2);
  const ParallelHook hook = pool.hook();
  Counts counts(2);
  hook.run(hook.context, 2, &Counts::add, &counts);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    hook.run(hook.context, 2, &Counts::add, &counts);
    _exit(counts.calls[1].load() == 2 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  hook.run(hook.context, 2, &Counts::add, &counts);
  EXPECT_EQ(counts.calls[1].load(), 2);
}
#endif

TEST(ThreadPool, RefusesBadNumbers) {
  EXPECT_EQ(error_of([] { ThreadPool pool(-1); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([] { ThreadPool pool(1025); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([] { ThreadPool pool(1, -1); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(contains(error_of([] { set_default_threads(0); }), "is 0, accepted 1 to 1024"));
}

struct Meeting {
  static constexpr int kRounds = 500;
  Barrier barrier{4};
  int values[4] = {};  // plain: the barrier alone orders the accesses
  std::atomic<int> wrong{0};

  static void body(void* self, std::int32_t part) {
    auto* meeting = static_cast<Meeting*>(self);
    for (int round = 1; round <= kRounds; ++round) {
      meeting->values[part] = round;
      meeting->barrier.wait();
      for (const int value : meeting->values) {
        meeting->wrong.fetch_add(value == round ? 0 : 1);
      }
      meeting->barrier.wait();
    }
  }
};

TEST(Barrier, OrdersTheParts) {
  ThreadPool pool(4);
  Meeting meeting;
  const ParallelHook hook = pool.hook();
  hook.run(hook.context, 4, &Meeting::body, &meeting);
  EXPECT_EQ(meeting.wrong.load(), 0);
}

TEST(Barrier, HookTakenBeforeThePoolShrankStillMeets) {
  const int before = default_parallel().parts;
  set_default_threads(4);
  const ParallelHook hook = default_parallel();
  EXPECT_EQ(hook.parts, 4);
  set_default_threads(1);
  EXPECT_EQ(default_parallel().parts, 1);
  Meeting meeting;
  hook.run(hook.context, 4, &Meeting::body, &meeting);
  EXPECT_EQ(meeting.wrong.load(), 0);
  set_default_threads(before);
}

TEST(Barrier, RefusesNoParts) {
  EXPECT_EQ(error_of([] { Barrier barrier(0); }).code(), ErrorCode::kInvalidArgument);
}

TEST(Bandwidth, IsPlausible) {
  const double measured = read_bandwidth(std::size_t{8} << 20, 2, 0.01);
  EXPECT_GT(measured, 1e7);
  EXPECT_LT(measured, 1e14);
}

TEST(Bandwidth, RefusesBadNumbers) {
  EXPECT_TRUE(contains(error_of([] { read_bandwidth(1, 1, 1.0); }), "'bytes' is 1"));
  EXPECT_TRUE(contains(error_of([] { read_bandwidth(1 << 20, 1, 0.0); }), "'seconds'"));
  EXPECT_TRUE(contains(error_of([] { read_bandwidth(1 << 20, -1, 1.0); }), "'threads'"));
}

}  // namespace
}  // namespace segki
