#include "core/loader.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "segki/error.h"

namespace segki {
namespace {

struct CloseLibrary {
  void operator()(void* handle) const { dlclose(handle); }
};
using Library = std::unique_ptr<void, CloseLibrary>;

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw Error(ErrorCode::kBackend, "backend library '" + path + "': " + reason);
}

std::string last_dl_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "unknown error of the dynamic linker";
}

}  // namespace

BackendTable open_backend_library(const std::string& path) {
  Library library(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL));
  if (!library) {
    refuse(path, last_dl_error());
  }
  void* symbol = dlsym(library.get(), kBackendEntryName);
  if (symbol == nullptr) {
    refuse(path, std::string("has no entry point '") + kBackendEntryName + "'");
  }
  const BackendTable* given = reinterpret_cast<BackendEntry>(symbol)();
  if (given == nullptr) {
    refuse(path, "reports no usable device");
  }
  if (given->api_version != kBackendApiVersion) {
    refuse(path, "has api_version " + std::to_string(given->api_version) + ", accepted " +
                     std::to_string(kBackendApiVersion));
  }
  constexpr std::size_t kSmallest = offsetof(BackendTable, embedding);
  if (given->struct_size < kSmallest) {
    refuse(path, "has struct_size " + std::to_string(given->struct_size) + ", accepted at least " +
                     std::to_string(kSmallest));
  }
  if (given->name == nullptr || given->name[0] == '\0') {
    refuse(path, "has a table without a name");
  }

  // Whole slots only: one that the given size cuts is not part of the table.
  constexpr std::size_t kSlot = sizeof(given->embedding);
  const std::size_t size = std::min<std::size_t>(given->struct_size, sizeof(BackendTable));
  BackendTable table{};
  std::memcpy(&table, given, kSmallest + (size - kSmallest) / kSlot * kSlot);
  table.struct_size = sizeof(table);
  if (table.instruction_set == nullptr) {
    table.instruction_set = "";
  }
  // The table's functions are used from now on: the library is never closed.
  static_cast<void>(library.release());
  return table;
}

}  // namespace segki
