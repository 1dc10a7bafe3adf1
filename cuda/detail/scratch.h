// Scratch on a device for callers that have no allocator of their own.
#pragma once

#include <cstddef>
#include <vector>

#include "check.h"
#include "sok/device.h"
#include "sok/scratch.h"

namespace sok {

// A bump allocator on CUDA's stream-ordered one; keeps its blocks between uses, so that calls of a steady size allocate
// nothing. For work on one stream only.
class StreamScratch final : public DeviceScratch {
 public:
  explicit StreamScratch(const Cuda& cuda) : stream_(cuda.stream) {}
  StreamScratch(const StreamScratch&) = delete;
  StreamScratch& operator=(const StreamScratch&) = delete;
  ~StreamScratch() override {
    for (const Block& block : blocks_) Ignore(cudaFreeAsync(block.data, stream_));
  }

  // Makes all memory available again, for work that comes later on the stream.
  void Reset() {
    if (blocks_.size() > 1) {  // next time one block shall do
      size_t bytes = 0;
      for (const Block& block : blocks_) bytes += block.bytes;
      while (!blocks_.empty()) {
        char* data = blocks_.back().data;
        blocks_.pop_back();  // what throws has been given back all the same
        SOK_CUDA(cudaFreeAsync(data, stream_));
      }
      AddBlock(bytes);
    }
    used_ = 0;
  }

 private:
  static constexpr size_t kAlignment = 256, kFirstBytes = size_t{1} << 20;

  struct Block {
    char* data;
    size_t bytes;
  };

  void* Allocate(size_t bytes) override {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (blocks_.empty() || used_ + bytes > blocks_.back().bytes) {
      const size_t doubled = blocks_.empty() ? kFirstBytes : 2 * blocks_.back().bytes;
      AddBlock(bytes > doubled ? bytes : doubled);
      used_ = 0;
    }
    char* p = blocks_.back().data + used_;
    used_ += bytes;
    return p;
  }

  void AddBlock(size_t bytes) {
    blocks_.reserve(blocks_.size() + 1);
    void* p = nullptr;
    SOK_CUDA(cudaMallocAsync(&p, bytes, stream_));
    blocks_.push_back({static_cast<char*>(p), bytes});
  }

  cudaStream_t stream_;
  std::vector<Block> blocks_;
  size_t used_ = 0;
};

}  // namespace sok
