// Many reads of a file in flight: Linux's io_uring, by its system calls.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

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
  // Who has something to read. Tags are below depth().
  struct Reader {
    virtual ~Reader() = default;
    virtual bool Next(unsigned tag, Request* request) = 0;  // for a tag that is free; false: that was all
    virtual void Done(unsigned tag, int result) = 0;        // bytes read, or an error as a negative number
  };
  // Reads until there is nothing left, as many at a time as there are tags. Takes no memory. Not thread-safe. Throws FileError.
  void Run(int file, Reader* reader);
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
  std::vector<unsigned> free_tags_;
};

}  // namespace sok
