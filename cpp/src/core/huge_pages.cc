#include "segki/huge_pages.h"

#include <algorithm>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>

#include <fstream>
#include <string>
#endif

namespace segki {

#if defined(__linux__)
namespace {

constexpr int kCollapse = 25;  // MADV_COLLAPSE; older C libraries lack the name

// Bytes of a huge page; 0 when there is none or the administrator has turned them off.
std::uintptr_t page_bytes() {
  static const std::uintptr_t bytes = []() -> std::uintptr_t {
    const std::string folder = "/sys/kernel/mm/transparent_hugepage/";
    std::string enabled;
    std::getline(std::ifstream(folder + "enabled"), enabled);
    if (enabled.empty() || enabled.find("[never]") != std::string::npos) {
      return 0;
    }
    std::uintptr_t size = 0;
    std::ifstream(folder + "hpage_pmd_size") >> size;
    return (size & (size - 1)) == 0 ? size : 0;
  }();
  return bytes;
}

}  // namespace

std::size_t use_huge_pages(const void* address, std::size_t bytes) {
  const std::uintptr_t page = page_bytes();
  if (page == 0) {
    return 0;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t end = begin + bytes;
  std::size_t held = 0;
  for (std::uintptr_t at = begin / page * page; at < end; at += page) {
    if (madvise(reinterpret_cast<void*>(at), page, kCollapse) == 0) {
      held += std::min(at + page, end) - std::max(at, begin);
    }
  }
  return held;
}
#else
std::size_t use_huge_pages(const void*, std::size_t) { return 0; }
#endif

}  // namespace segki
