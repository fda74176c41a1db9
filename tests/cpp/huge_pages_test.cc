// Memory moved into huge pages in place: contents, other owners and odd ranges.
#include "segki/huge_pages.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace segki {
namespace {

constexpr std::size_t kMegabyte = std::size_t{1} << 20;

std::uint32_t value_at(std::size_t index) {
  return static_cast<std::uint32_t>(index * 2654435761U);
}

TEST(HugePages, ContentsStay) {
  std::vector<std::uint32_t> memory(8 * kMegabyte / sizeof(std::uint32_t) + 3);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    memory[i] = value_at(i);
  }
  const std::size_t bytes = memory.size() * sizeof(std::uint32_t);
  const std::size_t held = use_huge_pages(memory.data(), bytes);
  EXPECT_LE(held, bytes);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    ASSERT_EQ(memory[i], value_at(i)) << i;
  }
  EXPECT_LE(use_huge_pages(memory.data(), bytes), bytes);
}

TEST(HugePages, NothingIsHeldOfAnEmptyRange) {
  int value = 0;
  EXPECT_EQ(use_huge_pages(&value, 0), 0U);
  EXPECT_EQ(use_huge_pages(nullptr, 0), 0U);
}

TEST(HugePages, MemoryMayBeWrittenMeanwhile) {
  std::vector<std::atomic<std::uint32_t>> memory(4 * kMegabyte / sizeof(std::uint32_t));
  std::atomic<bool> stop{false};
  std::uint32_t rounds = 0;
  std::thread writer([&] {
    do {
      ++rounds;
      for (std::size_t i = 0; i < memory.size(); i += 97) {
        memory[i].store(rounds, std::memory_order_relaxed);
      }
    } while (!stop.load());
  });
  for (int i = 0; i < 4; ++i) {
    use_huge_pages(memory.data(), memory.size() * sizeof(memory[0]));
  }
  stop.store(true);
  writer.join();
  for (std::size_t i = 0; i < memory.size(); ++i) {
    ASSERT_EQ(memory[i].load(), i % 97 == 0 ? rounds : 0U) << i;
  }
}

#if defined(__linux__)
TEST(HugePages, HolesAndFilesAreLeftAsTheyAre) {
  const std::size_t bytes = 8 * kMegabyte;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  auto* memory = static_cast<std::byte*>(mapped);
  memory[0] = std::byte{7};
  memory[bytes - 1] = std::byte{9};
  ASSERT_EQ(munmap(memory + 3 * kMegabyte, kMegabyte), 0);
  EXPECT_LE(use_huge_pages(memory, bytes), bytes - kMegabyte);
  EXPECT_EQ(memory[0], std::byte{7});
  EXPECT_EQ(memory[bytes - 1], std::byte{9});
  munmap(memory, 3 * kMegabyte);
  munmap(memory + 4 * kMegabyte, bytes - 4 * kMegabyte);

  const int file = open("/proc/self/exe", O_RDONLY);
  ASSERT_GE(file, 0);
  void* program = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  ASSERT_NE(program, MAP_FAILED);
  use_huge_pages(program, 4096);
  EXPECT_EQ(static_cast<const char*>(program)[1], 'E');
  munmap(program, 4096);
}
#endif

}  // namespace
}  // namespace segki
