// Caller-owned temporary memory: kernels take what they need from here and never allocate on their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sok/recent_max.h"

namespace sok {

// A bump allocator that keeps its blocks between uses, so that a training step at a steady size allocates nothing
// and touches no fresh page. All go back to the
// system when the last hundred uses needed less than a quarter. Large blocks lie in huge pages. Not thread-safe: one per call. Memory is 64-byte aligned and
// uninitialised. Get throws OutOfMemory.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  T* Get(int64_t n) {
    if (n > kMaxBytes / static_cast<int64_t>(sizeof(T))) Refuse(n);
    const size_t bytes = (static_cast<size_t>(n < 1 ? 1 : n) * sizeof(T) + 63) & ~size_t{63};
    while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].bytes) {
      ++block_;
      used_ = 0;
    }
    if (block_ == blocks_.size()) {
      const size_t last = blocks_.empty() ? kFirstBytes / 2 : blocks_.back().bytes;
      AddBlock(bytes > 2 * last ? bytes : 2 * last);
    }
    char* p = blocks_[block_].data + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(p);
  }

  // Makes all memory available again, which ends a use; pointers given out so far die.
  void Reset() {
    Trim();
    block_ = 0;
    used_ = 0;
  }

  int64_t memory_bytes() const;

 private:
  static constexpr size_t kFirstBytes = size_t{64} << 10;
  static constexpr int64_t kKeptBytes = int64_t{1} << 20;  // in any case
  static constexpr int64_t kMaxBytes = int64_t{1} << 56;   // so that no sum of sizes wraps around

  struct Block {
    char* data;
    size_t bytes;
  };

  void AddBlock(size_t bytes);
  void Trim();
  void Free();
  [[noreturn]] static void Refuse(int64_t n);

  std::vector<Block> blocks_;
  size_t block_ = 0;
  size_t used_ = 0;
  RecentMax needed_;  // bytes, by each use
};

// The same on a device: memory for the temporaries of calls on one stream, of whoever implements it (ops/ on TensorFlow's
// allocator, cuda/detail/scratch.h on CUDA's). Memory is 256-byte aligned and uninitialised, and may be used by work on the
// stream until the owner takes it back. Not thread-safe: one per call or stream.
class DeviceScratch {
 public:
  virtual ~DeviceScratch() = default;

  // Throws OutOfMemory.
  template <class T>
  T* Get(int64_t n) {
    return static_cast<T*>(Allocate(static_cast<size_t>(n < 1 ? 1 : n) * sizeof(T)));
  }

 private:
  virtual void* Allocate(size_t bytes) = 0;
};

}  // namespace sok
