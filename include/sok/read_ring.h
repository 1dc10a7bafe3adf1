// Many reads of a file in flight: Linux's io_uring, by its system calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace sok {

class ReadRing {
 public:
  // Null where the system has none, or does not let this process have it.
  static std::unique_ptr<ReadRing> Make(unsigned depth);
  ~ReadRing();
  ReadRing(const ReadRing&) = delete;
  ReadRing& operator=(const ReadRing&) = delete;

  struct Request {
    char* to;
    uint32_t bytes;
    int64_t offset;
  };
  // Calls next(tag, &request) for tags below depth() that are free until it gives false, reads, and calls done(tag, result) for
  // each: bytes read, or an error as a negative number. Returns when all are done. Not thread-safe.
  void Run(int file, const std::function<bool(unsigned tag, Request*)>& next,
           const std::function<void(unsigned tag, int result)>& done);
  unsigned depth() const { return depth_; }

 private:
  ReadRing() = default;

  unsigned depth_ = 0;
  int ring_ = -1;
  void* memory_ = nullptr;  // both queues
  int64_t memory_bytes_ = 0;
  void* entries_ = nullptr;
  int64_t entries_bytes_ = 0;
  unsigned *submit_tail_ = nullptr, *submit_mask_ = nullptr, *submit_array_ = nullptr;
  unsigned *done_head_ = nullptr, *done_tail_ = nullptr, *done_mask_ = nullptr;
  void* done_entries_ = nullptr;
};

}  // namespace sok
