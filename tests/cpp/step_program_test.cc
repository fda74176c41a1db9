#include "segki/step_program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "allocation_count.h"
#include "segki/error.h"

namespace segki {
namespace {

void expect_error(ErrorCode code, const std::string& part, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected one with: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// What the kernels of the fake backend were asked to do. Kernels are plain functions, so that it
// cannot belong to a test.
struct Calls {
  std::mutex mutex;
  std::vector<Exec> execs;
  std::atomic<int> norm_calls{0};
  std::atomic<int> argmax_calls{0};
  std::atomic<int> fail_norm_part{-1};
  std::atomic<int> fail_argmax{0};
  std::size_t norm_scratch = 0;
  std::size_t argmax_scratch = 0;
};

Calls& calls() {
  static Calls all;
  return all;
}

// out[i] = 3 * x[the next index, around] + 1 modulo 1000: every part reads what another part wrote.
std::int32_t fake_norm(const NormArgs* args, const Exec* exec) {
  ++calls().norm_calls;
  const std::int64_t size = args->x.shape[0] * args->x.shape[1];
  const auto* x = args->x.as<const float>();
  auto* out = args->out.as<float>();
  for (std::int64_t i = size * exec->part / exec->parts; i < size * (exec->part + 1) / exec->parts;
       ++i) {
    const auto value = static_cast<std::int64_t>(x[(i + 1) % size]);
    out[i] = static_cast<float>((3 * value + 1) % 1000);
  }
  return exec->part == calls().fail_norm_part ? 77 : 0;
}

// Keeps how it was called, and uses all of its scratch.
std::int32_t fake_argmax(const ArgmaxArgs*, const Exec* exec) {
  ++calls().argmax_calls;
  {
    const std::lock_guard<std::mutex> lock(calls().mutex);
    calls().execs.push_back(*exec);
  }
  if (exec->scratch != nullptr) {
    auto* scratch = static_cast<unsigned char*>(exec->scratch);
    const std::size_t bytes = std::max(calls().norm_scratch, calls().argmax_scratch);
    std::memset(scratch, exec->part + 1, bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
      if (scratch[i] != exec->part + 1) return 55;
    }
  }
  return calls().fail_argmax;
}

std::size_t fake_scratch(OpId op, const void*) {
  return op == OpId::kNorm ? calls().norm_scratch : calls().argmax_scratch;
}

BackendTable make_table(bool is_host = true) {
  BackendTable table = {};
  table.api_version = kBackendApiVersion;
  table.struct_size = sizeof(BackendTable);
  table.name = "fake";
  table.instruction_set = "none";
  table.is_host = is_host ? 1 : 0;
  table.scratch_bytes = fake_scratch;
  table.norm = fake_norm;
  table.argmax = fake_argmax;
  return table;
}

// Runs the parts one after another, last first.
struct SerialHost {
  int regions = 0;
  std::int32_t parts = 3;

  ParallelHook hook() {
    return ParallelHook{
        this, parts, 0,
        [](void* context, std::int32_t count, void (*body)(void*, std::int32_t), void* argument) {
          ++static_cast<SerialHost*>(context)->regions;
          for (std::int32_t part = count - 1; part >= 0; --part) {
            body(argument, part);
          }
        }};
  }
};

// Counts regions of a pool.
struct CountedPool {
  explicit CountedPool(int threads) : pool(threads), inner(pool.hook()) {}

  ParallelHook hook() {
    return ParallelHook{
        this, inner.parts, inner.concurrent,
        [](void* context, std::int32_t count, void (*body)(void*, std::int32_t), void* argument) {
          auto* counted = static_cast<CountedPool*>(context);
          ++counted->regions;
          counted->inner.run(counted->inner.context, count, body, argument);
        }};
  }

  ThreadPool pool;
  ParallelHook inner;
  int regions = 0;
};

struct Host {
  std::vector<std::size_t> sizes;
  long held = 0;
  bool empty = false;

  Allocator allocator() {
    return Allocator{this,
                     [](void* context, std::size_t bytes) -> void* {
                       auto* host = static_cast<Host*>(context);
                       if (host->empty) return nullptr;
                       host->sizes.push_back(bytes);
                       host->held += static_cast<long>(bytes);
                       return ::operator new (bytes, std::align_val_t{64});
                     },
                     [](void* context, void* address, std::size_t bytes) {
                       static_cast<Host*>(context)->held -= static_cast<long>(bytes);
                       ::operator delete (address, std::align_val_t{64});
                     }};
  }
};

class StepProgramTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kRows = 2;
  static constexpr std::int64_t kWidth = 37;

  void SetUp() override {
    Calls& all = calls();
    all.execs.clear();
    all.norm_calls = 0;
    all.argmax_calls = 0;
    all.fail_norm_part = -1;
    all.fail_argmax = 0;
    all.norm_scratch = 0;
    all.argmax_scratch = 0;
    first_.assign(kRows * kWidth, 0.0F);
    second_.assign(kRows * kWidth, -1.0F);
    tokens_.assign(kRows, 0);
    for (auto& value : first_) value = static_cast<float>(random_() % 1000);
    backend_table_ = make_table();
  }

  NormArgs norm(bool forward) {
    NormArgs args;
    args.x = dense_view((forward ? first_ : second_).data(), DType::kF32, kRows, kWidth);
    args.out = dense_view((forward ? second_ : first_).data(), DType::kF32, kRows, kWidth);
    args.norm.kind = NormKind::kRms;
    args.norm.eps = 1e-6F;
    return args;
  }

  ArgmaxArgs argmax() {
    ArgmaxArgs args;
    args.logits = dense_view(first_.data(), DType::kF32, kRows, kWidth);
    args.tokens = dense_view(tokens_.data(), DType::kI64, kRows);
    return args;
  }

  Backend backend() const { return Backend(&backend_table_); }

  // `pairs` times there and back, after which the result is in first_ again.
  StepProgram chain(int pairs, ParallelHook hook, Allocator allocator = {}) {
    StepProgramBuilder builder(backend(), hook, allocator);
    for (int i = 0; i < pairs; ++i) builder.add(norm(true)).add(norm(false));
    return builder.finish();
  }

  std::vector<float> expected_after(int ops) const {
    std::vector<float> x = first_;
    for (int op = 0; op < ops; ++op) {
      const std::vector<float> before = x;
      for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = static_cast<float>((3 * static_cast<std::int64_t>(before[(i + 1) % x.size()]) + 1) %
                                  1000);
      }
    }
    return x;
  }

  std::mt19937 random_{std::random_device{}()};
  std::vector<float> first_;
  std::vector<float> second_;
  std::vector<std::int64_t> tokens_;
  BackendTable backend_table_ = {};
};

TEST_F(StepProgramTest, RunsItsOpsInOrder) {
  SerialHost host;
  StepProgramBuilder builder(backend(), host.hook());
  StepProgram program = builder.add(norm(true)).add(argmax()).add(norm(false)).finish();
  EXPECT_EQ(program.size(), 3U);
  EXPECT_EQ(program.op_names(), (std::vector<std::string>{"norm", "argmax", "norm"}));
  EXPECT_EQ(program.scratch_bytes(), 0U);
  const std::vector<float> expected = expected_after(2);
  program.run();
  EXPECT_EQ(first_, expected);
  EXPECT_EQ(host.regions, 3);
  EXPECT_EQ(calls().norm_calls, 2 * host.parts);
  EXPECT_EQ(calls().argmax_calls, host.parts);
}

TEST_F(StepProgramTest, OneRegionARunOnAConcurrentHost) {
  for (const int threads : {2, 3, 4, 7}) {
    CountedPool host(threads);
    StepProgram program = chain(20, host.hook());
    for (int run = 1; run <= 30; ++run) {
      const std::vector<float> expected = expected_after(40);
      program.run();
      ASSERT_EQ(first_, expected) << threads << " threads, run " << run;
      ASSERT_EQ(host.regions, run);
    }
  }
}

TEST_F(StepProgramTest, OnePartNeedsNoRegion) {
  CountedPool host(1);
  StepProgram program = chain(3, host.hook());
  const std::vector<float> expected = expected_after(6);
  program.run();
  EXPECT_EQ(first_, expected);
  EXPECT_EQ(host.regions, 0);
}

TEST_F(StepProgramTest, FollowsTheSizeOfTheDefaultPool) {
  const std::int32_t before = default_parallel().parts;
  calls().norm_scratch = 1000;
  Host memory;
  {
    set_default_threads(1);
    StepProgramBuilder builder(backend(), {}, memory.allocator());
    StepProgram program = builder.add(argmax()).add(norm(true)).add(norm(false)).finish();
    EXPECT_EQ(program.scratch_bytes(), 1024U);
    std::size_t most = 1;
    for (const int threads : {1, 3, 3, 2, 1, 4}) {
      SetUp();
      calls().norm_scratch = 1000;
      set_default_threads(threads);
      const std::vector<float> expected = expected_after(2);
      program.run();
      EXPECT_EQ(first_, expected) << threads << " threads";
      EXPECT_EQ(calls().execs.size(), static_cast<std::size_t>(threads));
      for (const Exec& exec : calls().execs) EXPECT_EQ(exec.parts, threads);
      most = std::max(most, static_cast<std::size_t>(threads));
      EXPECT_EQ(program.scratch_bytes(), most * 1024);
    }
    memory.empty = true;
    set_default_threads(5);
    expect_error(ErrorCode::kOutOfMemory, "no memory for 5120 bytes", [&] { program.run(); });
    set_default_threads(4);
    SetUp();
    calls().norm_scratch = 1000;
    const std::vector<float> expected = expected_after(2);
    program.run();
    EXPECT_EQ(first_, expected);
  }
  EXPECT_EQ(memory.held, 0);
  set_default_threads(before);
}

TEST_F(StepProgramTest, ADeviceGetsOpsInOrderOnItsStream) {
  backend_table_ = make_table(false);
  calls().argmax_scratch = 100;
  Host memory;
  SerialHost host;
  StepProgramBuilder builder(backend(), host.hook(), memory.allocator());
  StepProgram program = builder.add(norm(true)).add(norm(false)).add(argmax()).finish();
  EXPECT_EQ(program.scratch_bytes(), 128U);
  const std::vector<float> expected = expected_after(2);
  int stream = 0;
  program.run(&stream);
  EXPECT_EQ(first_, expected);
  EXPECT_EQ(host.regions, 0);
  ASSERT_EQ(calls().execs.size(), 1U);
  EXPECT_EQ(calls().execs[0].stream, &stream);
  EXPECT_EQ(calls().execs[0].part, 0);
  EXPECT_EQ(calls().execs[0].parts, 1);

  StepProgramBuilder without(backend());
  without.add(argmax());
  expect_error(ErrorCode::kInvalidArgument, "allocator is the C++ heap", [&] { without.finish(); });
}

TEST_F(StepProgramTest, EachPartHasItsOwnScratch) {
  calls().norm_scratch = 1000;
  calls().argmax_scratch = 70;
  Host memory;
  {
    CountedPool host(4);
    StepProgramBuilder builder(backend(), host.hook(), memory.allocator());
    StepProgram program = builder.add(argmax()).add(norm(true)).add(argmax()).finish();
    EXPECT_EQ(memory.sizes, std::vector<std::size_t>{4 * 1024});
    EXPECT_EQ(program.scratch_bytes(), 4U * 1024);
    program.run();
    ASSERT_EQ(calls().execs.size(), 8U);
    std::vector<std::pair<std::int32_t, std::uintptr_t>> found;
    for (const Exec& exec : calls().execs) {
      const auto address = reinterpret_cast<std::uintptr_t>(exec.scratch);
      EXPECT_EQ(address % 64, 0U);
      EXPECT_EQ(exec.parts, 4);
      found.emplace_back(exec.part, address);
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    ASSERT_EQ(found.size(), 4U);
    for (std::size_t i = 1; i < 4; ++i) EXPECT_GE(found[i].second, found[i - 1].second + 1000);
    StepProgram moved = std::move(program);
    moved.run();
  }
  EXPECT_EQ(memory.held, 0);
}

TEST_F(StepProgramTest, OutOfMemoryLeavesTheBuilderAsItWas) {
  calls().norm_scratch = 64;
  Host memory;
  memory.empty = true;
  SerialHost host;
  StepProgramBuilder builder(backend(), host.hook(), memory.allocator());
  builder.add(norm(true)).add(norm(false));
  expect_error(ErrorCode::kOutOfMemory, "no memory for 192 bytes", [&] { builder.finish(); });
  memory.empty = false;
  EXPECT_EQ(builder.finish().size(), 2U);

  calls().norm_scratch = std::numeric_limits<std::size_t>::max() - 3;
  builder.add(norm(true));
  expect_error(ErrorCode::kOutOfMemory, "more than an address can reach",
               [&] { builder.finish(); });
}

TEST_F(StepProgramTest, TheFirstFailureIsReportedAndNothingHangs) {
  CountedPool concurrent(4);
  SerialHost serial;
  ThreadPool single(1);
  for (const ParallelHook& hook : {concurrent.hook(), serial.hook(), single.hook()}) {
    StepProgramBuilder builder(backend(), hook);
    StepProgram program =
        builder.add(argmax()).add(norm(true)).add(norm(false)).add(argmax()).finish();
    for (int repeat = 0; repeat < 20; ++repeat) {
      SetUp();
      calls().fail_norm_part = repeat % hook.parts;
      expect_error(ErrorCode::kBackend, "op 1 (norm) of backend \"fake\" failed with code 77",
                   [&] { program.run(); });
      EXPECT_EQ(calls().argmax_calls, hook.parts);  // the one after the failure did not run
      EXPECT_LE(calls().norm_calls, hook.parts);
    }
    SetUp();
    const std::vector<float> expected = expected_after(2);
    program.run();
    EXPECT_EQ(first_, expected);
    calls().fail_argmax = -5;
    expect_error(ErrorCode::kBackend, "op 0 (argmax) of backend \"fake\" failed with code -5",
                 [&] { program.run(); });
  }
}

TEST_F(StepProgramTest, UnsupportedOpsAreRefusedWhenAdded) {
  backend_table_.norm = nullptr;
  StepProgramBuilder builder(backend());
  expect_error(ErrorCode::kUnsupported, "backend \"fake\" has no kernel for norm",
               [&] { builder.add(norm(true)); });
  builder.add(argmax());
  EXPECT_EQ(builder.finish().size(), 1U);

  // An older backend's table ends before argmax.
  backend_table_ = make_table();
  backend_table_.struct_size = offsetof(BackendTable, argmax);
  StepProgramBuilder older(backend());
  expect_error(ErrorCode::kUnsupported, "has no kernel for argmax", [&] { older.add(argmax()); });
  EXPECT_EQ(older.add(norm(true)).finish().size(), 1U);
}

TEST_F(StepProgramTest, BadArgumentsAreRefusedWhenAdded) {
  StepProgramBuilder builder(backend());
  NormArgs bad = norm(true);
  bad.out = TensorView();
  expect_error(ErrorCode::kInvalidArgument, "out", [&] { builder.add(bad); });
  expect_error(ErrorCode::kState, "no op was added", [&] { builder.finish(); });

  SerialHost host;
  host.parts = 0;
  StepProgramBuilder no_parts(backend(), host.hook());
  no_parts.add(norm(true));
  expect_error(ErrorCode::kInvalidArgument, "parallel.parts is 0", [&] { no_parts.finish(); });
}

TEST_F(StepProgramTest, TheBuilderIsEmptyAfterwardsAndKeepsCopies) {
  SerialHost host;
  StepProgramBuilder builder(backend(), host.hook());
  NormArgs args = norm(true);
  builder.add(args);
  args = NormArgs();
  builder.add(norm(false));
  StepProgram program = builder.finish();
  expect_error(ErrorCode::kState, "no op was added", [&] { builder.finish(); });
  builder.add(argmax());
  StepProgram other = builder.finish();
  EXPECT_EQ(other.op_names(), std::vector<std::string>{"argmax"});
  const std::vector<float> expected = expected_after(2);
  program.run();
  EXPECT_EQ(first_, expected);
}

TEST_F(StepProgramTest, ProfileRunsOnce) {
  CountedPool concurrent(3);
  SerialHost serial;
  ThreadPool single(1);
  for (const ParallelHook& hook : {concurrent.hook(), serial.hook(), single.hook()}) {
    StepProgram program = chain(4, hook);
    const std::vector<float> expected = expected_after(8);
    const std::vector<double> seconds = program.profile();
    EXPECT_EQ(first_, expected);
    ASSERT_EQ(seconds.size(), 8U);
    for (const double value : seconds) EXPECT_GE(value, 0.0);
  }
}

// The pool runs the parts of a nested region one after another: a barrier between them would wait
// forever.
TEST_F(StepProgramTest, RunsInsideARegionOfItsOwnPool) {
  ThreadPool pool(3);
  const ParallelHook hook = pool.hook();
  StepProgram program = chain(4, hook);
  const std::vector<float> expected = expected_after(8);
  hook.run(
      hook.context, 2,
      [](void* argument, std::int32_t part) {
        if (part == 1) static_cast<StepProgram*>(argument)->run();
      },
      &program);
  EXPECT_EQ(first_, expected);
}

TEST_F(StepProgramTest, RunAllocatesNothing) {
  calls().norm_scratch = 64;
  CountedPool concurrent(3);
  SerialHost serial;
  for (const ParallelHook& hook : {concurrent.hook(), serial.hook(), ParallelHook()}) {
    StepProgram program = chain(4, hook);
    program.run();
    const long before = testing::allocation_count();
    for (int i = 0; i < 10; ++i) program.run();
    EXPECT_EQ(testing::allocation_count(), before);
  }
}

}  // namespace
}  // namespace segki
