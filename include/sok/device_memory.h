// Where a table's device memory comes from, and how much of it there may be.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace sok {

// A budget over CUDA's allocator. Not thread-safe.
class DeviceMemory {
 public:
  // label: how messages name the table. budget_bytes: 0: as much as the device has.
  explicit DeviceMemory(std::string label, int64_t budget_bytes = 0)
      : label_(std::move(label)), budget_bytes_(budget_bytes) {}

  // Uninitialised, at least 256-byte aligned. Throws OutOfMemory naming the table, what the memory is for, how much was
  // asked for, how much the table has and may have.
  void* Allocate(int64_t bytes, const char* what);
  // Nothing on any stream may use p any more. Null is fine.
  void Free(void* p, int64_t bytes);

  // What was allocated from this belongs to `other` from now on, and the other way round; `mine` and `theirs` bytes stay.
  void Swap(DeviceMemory* other, int64_t mine, int64_t theirs) {
    std::swap(in_use_, other->in_use_);
    in_use_ += mine - theirs;
    other->in_use_ += theirs - mine;
  }

  int64_t in_use() const { return in_use_; }
  int64_t budget_bytes() const { return budget_bytes_; }

 private:
  const std::string label_;
  const int64_t budget_bytes_;
  int64_t in_use_ = 0;
};

}  // namespace sok
