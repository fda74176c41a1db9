// Memory from the host's allocator, given back when its owner ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <utility>

#include "segki/error.h"
#include "segki/hybrid_cache.h"

namespace segki {

constexpr std::size_t kMemoryAlignment = 64;

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

class Block {
 public:
  Block() = default;

  // `owner` begins the messages. Throws Error(kInvalidArgument) for an allocator with one function
  // or an unaligned address, Error(kOutOfMemory) for null.
  Block(Allocator allocator, std::size_t bytes, const std::string& owner)
      : allocator_(allocator), bytes_(bytes) {
    if ((allocator.allocate == nullptr) != (allocator.release == nullptr)) {
      throw Error(ErrorCode::kInvalidArgument,
                  owner +
                      ": allocator has only one of allocate and release, accepted are both or "
                      "none");
    }
    data_ = static_cast<std::byte*>(
        allocator.allocate != nullptr
            ? allocator.allocate(allocator.context, bytes)
            : ::operator new (bytes, std::align_val_t{kMemoryAlignment}, std::nothrow));
    if (data_ == nullptr) {
      throw Error(ErrorCode::kOutOfMemory,
                  owner + ": no memory for " + std::to_string(bytes) + " bytes");
    }
    if (reinterpret_cast<std::uintptr_t>(data_) % kMemoryAlignment != 0) {
      give_back();
      throw Error(ErrorCode::kInvalidArgument,
                  owner + ": the allocator gave an address that is not a multiple of 64");
    }
  }

  Block(Block&& other) noexcept
      : allocator_(other.allocator_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}

  Block& operator=(Block&& other) noexcept {
    if (this != &other) {
      give_back();
      allocator_ = other.allocator_;
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }

  ~Block() { give_back(); }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void give_back() noexcept {
    if (data_ == nullptr) return;
    if (allocator_.release != nullptr) {
      allocator_.release(allocator_.context, data_, bytes_);
    } else {
      ::operator delete (data_, std::align_val_t{kMemoryAlignment});
    }
    data_ = nullptr;
  }

  Allocator allocator_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace segki
