#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <vector>

#include "core/loader.h"
#include "segki/backend.h"
#include "segki/error.h"

namespace segki {
namespace {

constexpr const char* kBuiltIn = "cpu";

// Entries are never removed and a map's nodes never move, so that handles stay valid.
class Registry {
 public:
  static Registry& instance() {
    static Registry registry;
    return registry;
  }

  const BackendTable* find(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto found = loaded_.find(name);
    return found == loaded_.end() ? nullptr : &found->second.table;
  }

  const BackendTable* load(const std::string& path) {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, entry] : loaded_) {
      if (entry.path == path) {
        return &entry.table;
      }
    }
    const BackendTable table = open_backend_library(path);
    const auto taken = loaded_.find(table.name);
    if (taken != loaded_.end() || table.name == std::string(kBuiltIn)) {
      throw Error(ErrorCode::kBackend,
                  "backend library '" + path + "': its name '" + table.name + "' is taken by " +
                      (taken != loaded_.end() ? "'" + taken->second.path + "'"
                                              : std::string("the built-in backend")));
    }
    return &loaded_.emplace(table.name, Entry{path, table}).first->second.table;
  }

  std::vector<std::string> names() {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> result{kBuiltIn};
    for (const auto& [name, entry] : loaded_) {
      result.push_back(name);
    }
    return result;
  }

 private:
  struct Entry {
    std::string path;
    BackendTable table;
  };

  std::mutex mutex_;
  std::map<std::string, Entry> loaded_;
};

}  // namespace

Backend backend(const std::string& name) {
  if (name == kBuiltIn) {
    return cpu_backend(cpu_instruction_sets().front());
  }
  if (const BackendTable* table = Registry::instance().find(name)) {
    return Backend(table);
  }
  std::string known;
  for (const std::string& other : backend_names()) {
    known += (known.empty() ? "'" : ", '") + other + "'";
  }
  throw Error(ErrorCode::kBackend, "backend: unknown name '" + name + "', known are " + known);
}

Backend load_backend(const std::string& path) {
  std::error_code failure;
  // Canonical, so that one library has one name, and so that no search path is looked at.
  const std::filesystem::path file = std::filesystem::canonical(path, failure);
  if (failure) {
    throw Error(ErrorCode::kBackend, "backend library '" + path + "': " + failure.message());
  }
  return Backend(Registry::instance().load(file.string()));
}

std::vector<std::string> backend_names() { return Registry::instance().names(); }

}  // namespace segki
