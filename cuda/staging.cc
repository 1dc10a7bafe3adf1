#include "detail/staging.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "detail/check.h"

namespace sok {
namespace {

// Pinned memory, and where in its stream the copy from it or to it is done.
struct Block {
  char* data = nullptr;
  int64_t bytes = 0;
  cudaEvent_t copied = nullptr;
};

bool IsCopied(const Block& block) {
  const cudaError_t status = cudaEventQuery(block.copied);
  if (status == cudaSuccess) return true;
  if (status != cudaErrorNotReady) SOK_CUDA(status);
  static_cast<void>(cudaGetLastError());  // else who looks for errors of launches finds this one
  return false;
}

// The blocks of each device (an event belongs to one), kept for as long as the process lives: when it ends, CUDA may be
// gone before this is. There are as many as there were copies under way at once.
class Blocks {
 public:
  // One that no copy uses any more. Throws CudaError.
  Block Take(int device, int64_t bytes) {
    constexpr int kMostUnderWay = 8;  // of this size or above: a host that is ahead of its device waits
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::deque<Block>& all = of_device_[device];  // the one used longest ago first
      int under_way = 0;
      auto oldest = all.end();
      for (auto block = all.begin(); block != all.end(); ++block) {
        if (block->bytes < bytes) continue;
        if (IsCopied(*block)) return Remove(&all, block);
        if (under_way++ == 0) oldest = block;
      }
      if (under_way >= kMostUnderWay) {
        SOK_CUDA(cudaEventSynchronize(oldest->copied));
        return Remove(&all, oldest);
      }
    }
    constexpr int64_t kLeastBytes = 64 << 10;
    Block made;
    for (made.bytes = kLeastBytes; made.bytes < bytes;) made.bytes *= 2;
    SOK_CUDA(cudaEventCreateWithFlags(&made.copied, cudaEventDisableTiming));
    const cudaError_t status =
        cudaHostAlloc(reinterpret_cast<void**>(&made.data), static_cast<size_t>(made.bytes), cudaHostAllocPortable);
    if (status != cudaSuccess) Ignore(cudaEventDestroy(made.copied));
    SOK_CUDA(status);
    return made;
  }
  void GiveBack(int device, const Block& block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    of_device_[device].push_back(block);
  }

 private:
  static Block Remove(std::deque<Block>* all, std::deque<Block>::iterator block) {
    const Block taken = *block;
    all->erase(block);
    return taken;
  }

  std::mutex mutex_;
  std::map<int, std::deque<Block>> of_device_;
};

Blocks& AllBlocks() {
  static Blocks& blocks = *new Blocks;
  return blocks;
}

}  // namespace

PinnedLease::PinnedLease(int64_t bytes) {
  SOK_CUDA(cudaGetDevice(&device_));
  const Block block = AllBlocks().Take(device_, bytes);
  data_ = block.data;
  bytes_ = block.bytes;
  copied_ = block.copied;
}

PinnedLease::~PinnedLease() { AllBlocks().GiveBack(device_, {data_, bytes_, copied_}); }

void PinnedLease::Mark(const Cuda& cuda) { SOK_CUDA(cudaEventRecord(copied_, cuda.stream)); }

void PinnedLease::Wait() const { SOK_CUDA(cudaEventSynchronize(copied_)); }

void UploadBytes(const Cuda& cuda, const void* from, int64_t bytes, void* to) {
  const HostPart all = {from, bytes, 0};
  UploadParts(cuda, &all, 1, to);
}

void UploadParts(const Cuda& cuda, const HostPart* parts, int64_t num_parts, void* to) {
  const int64_t bytes = num_parts == 0 ? 0 : parts[num_parts - 1].at + parts[num_parts - 1].bytes;
  const HostPart* part = parts;
  for (int64_t begin = 0; begin < bytes; begin += kMostUploaded) {
    const int64_t end = std::min(begin + kMostUploaded, bytes);
    PinnedLease lease(end - begin);
    char* const pinned = static_cast<char*>(lease.data());
    for (; part != parts + num_parts && part->at < end; ++part) {
      const int64_t first = std::max(begin, part->at), last = std::min(end, part->at + part->bytes);
      if (last > first) {
        std::memcpy(pinned + (first - begin), static_cast<const char*>(part->from) + (first - part->at),
                    static_cast<size_t>(last - first));
      }
      if (part->at + part->bytes > end) break;  // the rest goes by the next copy
    }
    SOK_CUDA(cudaMemcpyAsync(static_cast<char*>(to) + begin, pinned, static_cast<size_t>(end - begin),
                             cudaMemcpyHostToDevice, cuda.stream));
    lease.Mark(cuda);
  }
}

}  // namespace sok
