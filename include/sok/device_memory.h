// Where a table's device memory comes from, and how much of it there may be.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "sok/device.h"

namespace sok {

// Somebody who owns the memory of a device, and gives tables theirs, so that nobody competes for the card. Work on one stream,
// the owner's, may use what is given at once, and what is given back serves that stream's later work.
class DeviceAllocator {
 public:
  virtual ~DeviceAllocator() = default;
  // At least 256-byte aligned. Null: there is none.
  virtual void* Allocate(int64_t bytes) = 0;
  virtual void Free(void* p) = 0;
  virtual Cuda stream() const = 0;
  // What a message says of how much there is.
  virtual std::string Room() const = 0;
};

// A budget over CUDA's stream-ordered allocator, or over another owner's. Nothing waits for a device. Not thread-safe.
class DeviceMemory {
 public:
  // label: how messages name the table. budget_bytes: 0: as much as the device has. owner: null: CUDA; else it must live
  // longer.
  explicit DeviceMemory(std::string label, int64_t budget_bytes = 0, DeviceAllocator* owner = nullptr)
      : label_(std::move(label)), budget_bytes_(budget_bytes), owner_(owner) {}

  // Uninitialised, at least 256-byte aligned, for work that is put on the stream from now on, and on others that wait for
  // that. Throws OutOfMemory naming the table, what the memory is for, how much was asked for, how much the table has and may
  // have.
  void* Allocate(const Cuda& cuda, int64_t bytes, const char* what);
  // What is on the stream may still use p, or the stream waits for it. Null is fine.
  void Free(const Cuda& cuda, void* p, int64_t bytes);
  // Nothing on any stream may use p any more. Null is fine.
  void Free(void* p, int64_t bytes);
  // Throws OutOfMemory as Allocate if so much more would not fit into the budget.
  void CheckBudget(int64_t bytes, const char* what) const;

  // What was allocated from this belongs to `other` from now on, and the other way round; `mine` and `theirs` bytes stay. Both
  // have the same owner.
  void Swap(DeviceMemory* other, int64_t mine, int64_t theirs) {
    std::swap(in_use_, other->in_use_);
    in_use_ += mine - theirs;
    other->in_use_ += theirs - mine;
  }

  int64_t in_use() const { return in_use_; }
  int64_t budget_bytes() const { return budget_bytes_; }

 private:
  std::string Asked(int64_t bytes, const char* what) const;
  void* TryAllocate(const Cuda& cuda, int64_t bytes) const;

  const std::string label_;
  const int64_t budget_bytes_;
  DeviceAllocator* const owner_;
  int64_t in_use_ = 0;
};

}  // namespace sok
