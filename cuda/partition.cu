#include "sok/partition.h"

#include <string>

#include "detail/launch.h"
#include "detail/sort_positions.h"
#include "sok/error.h"

namespace sok {
namespace {

__global__ void OwnersKernel(Partition partition, const uint64_t* keys, int64_t n,
                             uint32_t* owners) {  // [n]
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    owners[i] = static_cast<uint32_t>(partition.OwnerOf(keys[i]));
  }
}

__global__ void MoveKeysKernel(const uint64_t* keys, const uint32_t* sorted_positions, int64_t n, uint64_t* sorted_keys,
                               uint32_t* positions, uint32_t* places) {  // [n] or null
  for (int64_t k = GlobalThread(); k < n; k += GlobalThreads()) {
    const uint32_t i = sorted_positions[k];
    sorted_keys[k] = keys[i];
    positions[k] = i;
    if (places != nullptr) places[i] = static_cast<uint32_t>(k);
  }
}

// How many of the ascending words are below `bound`.
__device__ int64_t NumBelow(const uint32_t* words, int64_t n, int64_t bound) {
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (words[middle] < bound) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__global__ void CountOwnersKernel(const uint32_t* sorted_owners, int64_t n, int64_t world_size,
                                  int64_t* counts) {  // [world_size]
  for (int64_t rank = GlobalThread(); rank < world_size; rank += GlobalThreads()) {
    counts[rank] = NumBelow(sorted_owners, n, rank + 1) - NumBelow(sorted_owners, n, rank);
  }
}

}  // namespace

void PartitionKeys(const Cuda& cuda, DeviceScratch* scratch, const Partition& partition, const uint64_t* keys,
                   int64_t n, uint64_t* sorted_keys, uint32_t* positions, uint32_t* places, int64_t* counts) {
  const int64_t world_size = partition.world_size;
  if (n >= INT64_C(0x80000000)) {
    throw InvalidArgument("at most 2^31 - 1 keys in one call. Received: " + std::to_string(n) + ".");
  }
  if (world_size < 1) {
    throw InvalidArgument("world_size must be at least 1. Received: " + std::to_string(world_size) + ".");
  }
  if (!partition.IsValid()) {
    throw InvalidArgument("owner must be a rank of the " + std::to_string(world_size) +
                          " there are, -1 for key mod world_size, or -2 for the hash of each key. Received: " +
                          std::to_string(partition.owner) + ".");
  }
  if (n == 0) {
    SOK_CUDA(cudaMemsetAsync(counts, 0, static_cast<size_t>(world_size) * sizeof(int64_t), cuda.stream));
    return;
  }
  uint32_t* owners = scratch->Get<uint32_t>(n);
  Launch(OwnersKernel, GridFor(n, kThreads), kThreads, 0, cuda, partition, keys, n, owners);
  const uint32_t* sorted_owners;
  const uint32_t* sorted_positions;
  SortPositions(cuda, scratch, owners, n, static_cast<uint32_t>(world_size - 1), &sorted_owners, &sorted_positions);
  Launch(MoveKeysKernel, GridFor(n, kThreads), kThreads, 0, cuda, keys, sorted_positions, n, sorted_keys, positions,
         places);
  Launch(CountOwnersKernel, GridFor(world_size, kThreads), kThreads, 0, cuda, sorted_owners, n, world_size, counts);
}

}  // namespace sok
