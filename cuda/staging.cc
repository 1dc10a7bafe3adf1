#include "detail/staging.h"

#include <cuda_runtime.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "detail/check.h"

namespace sok {
namespace {

// Pinned memory, and where in its stream the copy from it is done.
struct Block {
  char* data = nullptr;
  int64_t bytes = 0;
  cudaEvent_t copied = nullptr;
};

// The blocks of each device (an event belongs to one), kept for as long as the process lives: when it ends, CUDA may be
// gone before this is. There are as many as there were copies under way at once.
class Blocks {
 public:
  // One that no copy reads any more. Throws CudaError.
  Block Take(int device, int64_t bytes) {
    std::deque<Block>& all = of_device_[device];  // the one used longest ago first
    for (auto block = all.begin(); block != all.end(); ++block) {
      const cudaError_t status = cudaEventQuery(block->copied);
      if (status == cudaErrorNotReady) break;
      SOK_CUDA(status);
      if (block->bytes < bytes) continue;
      const Block taken = *block;
      all.erase(block);
      return taken;
    }
    constexpr int64_t kLeastBytes = 64 << 10;
    Block made;
    for (made.bytes = kLeastBytes; made.bytes < bytes;) made.bytes *= 2;
    SOK_CUDA(cudaEventCreateWithFlags(&made.copied, cudaEventDisableTiming));
    const cudaError_t status =
        cudaHostAlloc(reinterpret_cast<void**>(&made.data), static_cast<size_t>(made.bytes), cudaHostAllocPortable);
    if (status != cudaSuccess) static_cast<void>(cudaEventDestroy(made.copied));
    SOK_CUDA(status);
    return made;
  }
  void GiveBack(int device, const Block& block) { of_device_[device].push_back(block); }

  std::mutex mutex;

 private:
  std::map<int, std::deque<Block>> of_device_;
};

}  // namespace

void UploadBytes(const Cuda& cuda, const void* from, int64_t bytes, void* to) {
  static Blocks& blocks = *new Blocks;
  int device = 0;
  SOK_CUDA(cudaGetDevice(&device));
  Block block;
  {
    const std::lock_guard<std::mutex> lock(blocks.mutex);
    block = blocks.Take(device, bytes);
  }
  std::memcpy(block.data, from, static_cast<size_t>(bytes));
  cudaError_t status = cudaMemcpyAsync(to, block.data, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, cuda.stream);
  if (status == cudaSuccess) status = cudaEventRecord(block.copied, cuda.stream);
  SOK_CUDA(status);  // the block is lost then: a copy may still read it
  const std::lock_guard<std::mutex> lock(blocks.mutex);
  blocks.GiveBack(device, block);
}

}  // namespace sok
