#include "core/cores.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "segki/error.h"

namespace segki {
namespace {

int affinity_cores() {
#if defined(__linux__)
  for (int cores = 1024; cores <= 1 << 20; cores *= 2) {
    cpu_set_t* set = CPU_ALLOC(cores);
    if (set == nullptr) {
      break;
    }
    const std::size_t bytes = CPU_ALLOC_SIZE(cores);
    const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) {
      return std::min(count, kMaxThreads);
    }
  }
#endif
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    parts.push_back(part);
  }
  return parts;
}

bool contains(const std::vector<std::string>& list, const std::string& wanted) {
  return std::find(list.begin(), list.end(), wanted) != list.end();
}

// This process's control group: of version 2, and of version 1's controller "cpu".
struct Groups {
  std::optional<std::string> unified;
  std::optional<std::string> cpu;
};

// Lines of /proc/self/cgroup: "0::/path" and "4:cpu,cpuacct:/path".
Groups read_groups(const std::string& root) {
  Groups groups;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) {
      groups.unified = line.substr(second + 1);
    } else if (contains(split(controllers, ','), "cpu")) {
      groups.cpu = line.substr(second + 1);
    }
  }
  return groups;
}

// Microseconds of CPU time a period over the period; 0: no limit.
double quota_of(const std::string& folder, bool unified) {
  std::string quota;
  double period = 0.0;
  if (unified) {
    std::ifstream(folder + "/cpu.max") >> quota >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  const double given = std::strtod(quota.c_str(), nullptr);  // "max" and -1: no limit
  return given > 0.0 && period > 0.0 ? given / period : 0.0;
}

int round_up_cores(double cores) {
  const int whole = static_cast<int>(std::min(cores, static_cast<double>(kMaxThreads)));
  return whole + (static_cast<double>(whole) < cores && whole < kMaxThreads ? 1 : 0);
}

// The smallest quota of `group` and the groups above it, as far as `mount` shows them. In a
// container `mounted` may be the container's own group and lie above `group`, or elsewhere.
double smallest_quota(const std::string& mount, const std::string& mounted,
                      const std::string& group, bool unified) {
  const std::string above = mounted == "/" ? "" : mounted;
  std::string below;
  if ((group + "/").compare(0, above.size() + 1, above + "/") == 0) {
    below = group.substr(above.size());
  }
  double smallest = 0.0;
  for (;;) {
    while (!below.empty() && below.back() == '/') {
      below.pop_back();
    }
    const double quota = quota_of(mount + below, unified);
    if (quota > 0.0 && (smallest == 0.0 || quota < smallest)) {
      smallest = quota;
    }
    if (below.empty()) {
      return smallest;
    }
    below.resize(below.rfind('/') == std::string::npos ? 0 : below.rfind('/'));
  }
}

std::optional<int> number(std::string_view text) {
  int value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

}  // namespace

int quota_cores(const std::string& root) {
  const Groups groups = read_groups(root);
  double smallest = 0.0;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    // id, parent, device, mounted folder, mount point, ..., "-", type, source, options
    const std::vector<std::string> fields = split(line, ' ');
    const auto dash = std::find(fields.begin(), fields.end(), "-");
    if (fields.size() < 5 || fields.end() - dash < 4) {
      continue;
    }
    const bool unified = *(dash + 1) == "cgroup2";
    const bool controls_cpu = *(dash + 1) == "cgroup" && contains(split(*(dash + 3), ','), "cpu");
    const std::optional<std::string>& group = unified ? groups.unified : groups.cpu;
    if (!(unified || controls_cpu) || !group) {
      continue;
    }
    const double quota = smallest_quota(root + fields[4], fields[3], *group, unified);
    if (quota > 0.0 && (smallest == 0.0 || quota < smallest)) {
      smallest = quota;
    }
  }
  return round_up_cores(smallest);
}

int usable_cores() {
  const int cores = affinity_cores();
  const int quota = quota_cores("");
  return quota > 0 ? std::min(cores, quota) : cores;
}

int limit_threads(int cores, const char* segki_num_threads, const char* omp_num_threads) {
  if (segki_num_threads != nullptr && *segki_num_threads != '\0') {
    const std::optional<int> wanted = number(segki_num_threads);
    if (!wanted || *wanted < 1 || *wanted > kMaxThreads) {
      throw Error(ErrorCode::kInvalidArgument,
                  "environment variable SEGKI_NUM_THREADS is '" + std::string(segki_num_threads) +
                      "', accepted 1 to " + std::to_string(kMaxThreads));
    }
    return std::min(cores, *wanted);
  }
  if (omp_num_threads != nullptr) {
    const std::string_view list(omp_num_threads);
    const std::optional<int> wanted = number(list.substr(0, list.find(',')));
    if (wanted && *wanted >= 1) {
      return std::min(cores, *wanted);
    }
  }
  return cores;
}

int default_thread_count() {
  return limit_threads(usable_cores(), std::getenv("SEGKI_NUM_THREADS"),
                       std::getenv("OMP_NUM_THREADS"));
}

}  // namespace segki
