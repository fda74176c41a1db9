// Threads: exceptions of parts, waiting, the size of the default pool and what it follows.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/cores.h"
#include "segki/segki.h"
#include "thrown.h"

namespace segki {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// CPU time of the calling thread, in milliseconds.
double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

// --- Bodies that throw.

struct Throwing {
  explicit Throwing(std::vector<std::int32_t> parts) : throwing(std::move(parts)) {}
  std::vector<std::int32_t> throwing;
  std::atomic<int> ended{0};

  static void body(void* self, std::int32_t part) {
    auto* given = static_cast<Throwing*>(self);
    const auto& parts = given->throwing;
    const bool throws = std::find(parts.begin(), parts.end(), part) != parts.end();
    if (!throws) {
      std::this_thread::sleep_for(milliseconds(2));
    }
    given->ended.fetch_add(1);
    if (throws) {
      throw std::runtime_error("part " + std::to_string(part));
    }
  }
};

void expect_thrown(const ParallelHook& hook, std::int32_t parts,
                   const std::vector<std::int32_t>& throwing) {
  Throwing given(throwing);
  try {
    hook.run(hook.context, parts, &Throwing::body, &given);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    const bool known = std::any_of(throwing.begin(), throwing.end(), [&](std::int32_t part) {
      return error.what() == "part " + std::to_string(part);
    });
    EXPECT_TRUE(known) << error.what();
  }
  EXPECT_EQ(given.ended.load(), parts);
}

TEST(ThrowingBody, ReachesTheCallerWhenAllPartsHaveEnded) {
  ThreadPool pool(3);
  const ParallelHook hook = pool.hook();
  for (const std::vector<std::int32_t>& throwing :
       std::vector<std::vector<std::int32_t>>{{0}, {1}, {2}, {0, 2}, {0, 1, 2}}) {
    for (int repeat = 0; repeat < 5; ++repeat) {
      expect_thrown(hook, 3, throwing);
      Throwing none({});
      hook.run(hook.context, 3, &Throwing::body, &none);  // the pool is as before
      EXPECT_EQ(none.ended.load(), 3);
    }
  }
}

TEST(ThrowingBody, OneThreadAndNestedRegionsAlike) {
  ThreadPool single(1);
  expect_thrown(single.hook(), 1, {0});

  ThreadPool pool(2);
  struct Outer {
    ParallelHook hook;
    static void body(void* self, std::int32_t) {
      expect_thrown(static_cast<Outer*>(self)->hook, 3, {0, 1});
    }
  } outer{pool.hook()};
  outer.hook.run(outer.hook.context, 2, &Outer::body, &outer);

  struct Escaping {
    ParallelHook hook;
    static void body(void* self, std::int32_t part) {
      const ParallelHook& hook = static_cast<Escaping*>(self)->hook;
      Throwing given(part == 1 ? std::vector<std::int32_t>{0} : std::vector<std::int32_t>{});
      hook.run(hook.context, 2, &Throwing::body, &given);
    }
  } escaping{pool.hook()};
  EXPECT_THROW(escaping.hook.run(escaping.hook.context, 2, &Escaping::body, &escaping),
               std::runtime_error);
}

// --- Waiting.

struct Late {
  Barrier barrier{2};
  std::int32_t late = 0;
  bool at_barrier = true;
  double waiting_ms = 0.0;  // CPU time of the part that waits

  static void body(void* self, std::int32_t part) {
    auto* given = static_cast<Late*>(self);
    if (part == given->late) {
      std::this_thread::sleep_for(milliseconds(300));
    }
    if (given->at_barrier) {
      const double before = cpu_ms();
      given->barrier.wait();
      if (part != given->late) {
        given->waiting_ms = cpu_ms() - before;
      }
    }
  }
};

TEST(Waiting, AtABarrierUsesNoCoreForLong) {
  ThreadPool pool(2);
  const ParallelHook hook = pool.hook();
  for (const std::int32_t late : {0, 1}) {
    Late given;
    given.late = late;
    hook.run(hook.context, 2, &Late::body, &given);
    EXPECT_LT(given.waiting_ms, 100.0);
  }
}

TEST(Waiting, ForTheEndOfARegionUsesNoCoreForLong) {
  ThreadPool pool(2);
  const ParallelHook hook = pool.hook();
  Late given;
  given.late = 1;
  given.at_barrier = false;
  const double before = cpu_ms();
  hook.run(hook.context, 2, &Late::body, &given);
  EXPECT_LT(cpu_ms() - before, 100.0);
}

// Parts come up to the barrier at random distances around the moment where a waiting one goes to
// sleep: a wake-up that is lost hangs the test.
struct Jitter {
  static constexpr int kRounds = 400;
  Barrier barrier{3};
  std::uint32_t seed = 0;
  int values[3] = {};
  std::atomic<int> wrong{0};

  static void body(void* self, std::int32_t part) {
    auto* given = static_cast<Jitter*>(self);
    std::mt19937 random(given->seed + static_cast<std::uint32_t>(part));
    for (int round = 1; round <= kRounds; ++round) {
      const auto end = std::chrono::steady_clock::now() + microseconds(random() % 400);
      while (std::chrono::steady_clock::now() < end) {
      }
      given->values[part] = round;
      given->barrier.wait();
      for (const int value : given->values) {
        given->wrong.fetch_add(value == round ? 0 : 1);
      }
      given->barrier.wait();
    }
  }
};

TEST(Waiting, LosesNoWakeUp) {
  ThreadPool pool(3);
  const ParallelHook hook = pool.hook();
  Jitter given;
  given.seed = std::random_device{}();
  hook.run(hook.context, 3, &Jitter::body, &given);
  EXPECT_EQ(given.wrong.load(), 0) << "seed " << given.seed;
}

TEST(Waiting, SleepingWorkersAreWokenAtAnyMoment) {
  ThreadPool pool(2, 20);
  const ParallelHook hook = pool.hook();
  const std::uint32_t seed = std::random_device{}();
  std::mt19937 random(seed);
  std::atomic<int> calls{0};
  for (int i = 1; i <= 2000; ++i) {
    hook.run(
        hook.context, 2,
        [](void* self, std::int32_t) { static_cast<std::atomic<int>*>(self)->fetch_add(1); },
        &calls);
    ASSERT_EQ(calls.load(), 2 * i) << "seed " << seed;
    const auto end = std::chrono::steady_clock::now() + microseconds(random() % 100);
    while (std::chrono::steady_clock::now() < end) {
    }
  }
}

// --- The default pool.

class DefaultPool : public ::testing::Test {
 protected:
  void TearDown() override { set_default_threads(before_); }

  // The thread that runs part 1 of the default pool.
  static std::thread::id second_thread() {
    const ParallelHook hook = default_parallel();
    std::thread::id found;
    hook.run(
        hook.context, 2,
        [](void* self, std::int32_t part) {
          if (part == 1) {
            *static_cast<std::thread::id*>(self) = std::this_thread::get_id();
          }
        },
        &found);
    return found;
  }

  const int before_ = default_threads();
};

TEST_F(DefaultPool, ChangesItsSize) {
  for (const int threads : {1, 4, 2, 3}) {
    set_default_threads(threads);
    EXPECT_EQ(default_threads(), threads);
    EXPECT_EQ(default_parallel().parts, threads);
  }
  EXPECT_TRUE(contains(error_of([] { set_default_threads(0); }), "is 0, accepted 1 to 1024"));
  EXPECT_TRUE(contains(error_of([] { set_default_threads(1025); }), "is 1025"));
  EXPECT_EQ(error_of([] { set_default_threads(-1); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(default_threads(), 3);
}

TEST_F(DefaultPool, KeepsItsThreadsWhenTheSizeStays) {
  set_default_threads(2);
  const std::thread::id thread = second_thread();
  set_default_threads(2);
  EXPECT_EQ(second_thread(), thread);
  set_default_threads(3);
  EXPECT_EQ(second_thread(), thread);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 1000; ++i) {
    set_default_threads(3);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(100));
}

TEST_F(DefaultPool, RefusesAChangeFromWithinItsRegions) {
  set_default_threads(2);
  const ParallelHook hook = default_parallel();
  std::atomic<int> refused{0};
  hook.run(
      hook.context, 2,
      [](void* self, std::int32_t) {
        const Error error = error_of([] { set_default_threads(5); });
        EXPECT_EQ(error.code(), ErrorCode::kState);
        static_cast<std::atomic<int>*>(self)->fetch_add(1);
      },
      &refused);
  EXPECT_EQ(refused.load(), 2);
  EXPECT_EQ(default_threads(), 2);
}

TEST_F(DefaultPool, AProgramGivesTheSameBitsWithAnyNumberOfThreads) {
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kHidden = 160;
  constexpr std::int64_t kWide = 500;
  const std::uint32_t seed = std::random_device{}();
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto filled = [&](std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    return values;
  };
  std::vector<float> x = filled(kRows * kHidden);
  std::vector<float> norm_weight = filled(kHidden);
  std::vector<float> gate = filled(kWide * kHidden);
  std::vector<float> up = filled(kWide * kHidden);
  std::vector<float> down = filled(kHidden * kWide);
  for (const std::string& set : cpu_instruction_sets()) {
    std::vector<float> expected;
    for (const int threads : {1, 2, 3, 4, 7, 1, 5}) {
      set_default_threads(threads);
      std::vector<float> normed(x.size(), NAN), inner(kRows * kWide, NAN), out(x.size(), NAN);
      NormArgs norm;
      norm.x = dense_view(x.data(), DType::kF32, kRows, kHidden);
      norm.weight = dense_view(norm_weight.data(), DType::kF32, kHidden);
      norm.out = dense_view(normed.data(), DType::kF32, kRows, kHidden);
      norm.norm.kind = NormKind::kRms;
      norm.norm.eps = 1e-6F;
      GatedProjectionArgs gated;
      gated.x = norm.out;
      gated.gate = dense_view(gate.data(), DType::kF32, kWide, kHidden);
      gated.up = dense_view(up.data(), DType::kF32, kWide, kHidden);
      gated.out = dense_view(inner.data(), DType::kF32, kRows, kWide);
      gated.activation = Activation::kSilu;
      ProjectionArgs last;
      last.x = gated.out;
      last.weight[0] = dense_view(down.data(), DType::kF32, kHidden, kWide);
      last.out[0] = dense_view(out.data(), DType::kF32, kRows, kHidden);
      last.count = 1;
      StepProgramBuilder builder(cpu_backend(set));
      StepProgram program = builder.add(norm).add(gated).add(last).finish();
      program.run();
      if (expected.empty()) {
        expected = out;
      }
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)), 0)
          << set << ", " << threads << " threads, seed " << seed;
      std::fill(out.begin(), out.end(), NAN);
      projection(cpu_backend(set), last);
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)), 0)
          << set << ", op by itself, " << threads << " threads, seed " << seed;
    }
  }
}

// --- What the default size follows.

TEST(Cores, AreAtLeastOneAndNoMoreThanTheMachineHas) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
}

TEST(Cores, VariablesLimitTheThreads) {
  EXPECT_EQ(limit_threads(8, nullptr, nullptr), 8);
  EXPECT_EQ(limit_threads(8, nullptr, "3"), 3);
  EXPECT_EQ(limit_threads(8, nullptr, "4,2"), 4);
  EXPECT_EQ(limit_threads(8, nullptr, "64"), 8);
  EXPECT_EQ(limit_threads(8, "2", nullptr), 2);
  EXPECT_EQ(limit_threads(8, "6", "3"), 6);
  EXPECT_EQ(limit_threads(8, "64", "3"), 8);
  EXPECT_EQ(limit_threads(8, "", "3"), 3);
  for (const char* ignored : {"", "0", "-2", "many", "99999999999", "2x"}) {
    EXPECT_EQ(limit_threads(8, nullptr, ignored), 8) << ignored;
  }
  for (const char* refused : {"0", "-1", "1025", "two", "2x", "2,3", "99999999999"}) {
    const Error error = error_of([&] { limit_threads(8, refused, nullptr); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_TRUE(
        contains(error, "SEGKI_NUM_THREADS is '" + std::string(refused) + "', accepted 1 to 1024"))
        << error.what();
  }
}

// A folder with the files that say what a control group may use.
class ControlGroups : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "segki_cores_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  std::string root_;
};

TEST_F(ControlGroups, NoneMeansNoLimit) { EXPECT_EQ(quota_cores(root_), 0); }

TEST_F(ControlGroups, Version2TakesTheSmallestOfTheGroupsAbove) {
  write("/proc/self/cgroup", "0::/pod/container\n");
  write("/proc/self/mountinfo",
        "22 1 0:20 / / rw shared:1 - ext4 /dev/vda rw\n"
        "31 22 0:28 / /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw\n");
  write("/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
  EXPECT_EQ(quota_cores(root_), 0);
  write("/sys/fs/cgroup/pod/cpu.max", "350000 100000\n");
  EXPECT_EQ(quota_cores(root_), 4);
  write("/sys/fs/cgroup/pod/container/cpu.max", "50000 50000\n");
  EXPECT_EQ(quota_cores(root_), 1);
  write("/sys/fs/cgroup/pod/container/cpu.max", "1000 50000\n");
  EXPECT_EQ(quota_cores(root_), 1);
  write("/sys/fs/cgroup/pod/container/cpu.max", "900000000 50000\n");
  EXPECT_EQ(quota_cores(root_), 4);
}

TEST_F(ControlGroups, AContainerSeesItsOwnGroupAtTheMount) {
  write("/proc/self/cgroup", "0::/../other\n");
  write("/proc/self/mountinfo", "31 22 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  write("/sys/fs/cgroup/cpu.max", "150000 100000\n");
  EXPECT_EQ(quota_cores(root_), 2);
}

TEST_F(ControlGroups, Version1ReadsTheCpuController) {
  write("/proc/self/cgroup",
        "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x\n0::/\n");
  write("/proc/self/mountinfo",
        "40 31 0:35 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:36 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "42 31 0:37 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n");
  write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(quota_cores(root_), 0);
  write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "600000\n");
  EXPECT_EQ(quota_cores(root_), 6);
  // The same group where the whole tree is mounted.
  write("/proc/self/mountinfo", "41 31 0:36 / /cg/cpu rw - cgroup cgroup rw,cpu\n");
  write("/cg/cpu/docker/abc/cpu.cfs_period_us", "100000\n");
  write("/cg/cpu/docker/abc/cpu.cfs_quota_us", "210000\n");
  EXPECT_EQ(quota_cores(root_), 3);
}

// --- Tables of older backends.

TEST(OlderTable, AnOpReadsNoSlotPastItsEnd) {
  // The table ends where the readable memory does.
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* memory =
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(mprotect(static_cast<std::byte*>(memory) + page, page, PROT_NONE), 0);
  const std::size_t size = offsetof(BackendTable, argmax);
  std::byte* begin = static_cast<std::byte*>(memory) + page - size;
  std::memcpy(begin, &cpu_backend("generic").table(), size);
  auto* table = reinterpret_cast<BackendTable*>(begin);
  table->struct_size = static_cast<std::uint32_t>(size);
  float logits[4] = {1, 2, 3, 0};
  std::int64_t token = -1;
  ArgmaxArgs args;
  args.logits = dense_view(logits, DType::kF32, 1, 4);
  args.tokens = dense_view(&token, DType::kI64, 1);
  const Error error = error_of([&] { argmax(Backend(table), args); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_TRUE(contains(error, "has no kernel for this op")) << error.what();
  StepProgramBuilder builder{Backend(table)};
  EXPECT_EQ(error_of([&] { builder.add(args); }).code(), ErrorCode::kUnsupported);
  EXPECT_EQ(munmap(memory, 2 * page), 0);
}

}  // namespace
}  // namespace segki
