// By hashing, not by sorting: a place of the table is the 4-byte position of a key, so a million keys make an 8 MB table,
// which with the keys themselves stays in the 50 MB L2 of a Hopper GPU. Each key then costs two sectors of L2; a radix sort
// of 64-bit keys with positions would move 24 bytes eight times, through memory once it outgrows L2. Skew helps: all but the
// first of a hot key's positions only read.
#include "sok/unique.h"

#include <string>

#include "detail/launch.h"
#include "detail/places.h"
#include "detail/primitives.h"
#include "sok/error.h"
#include "sok/hash_key.h"

namespace sok {
namespace {

constexpr uint32_t kEmpty = 0xFFFFFFFFu;
constexpr int64_t kCountersPerBlock = 1024;
constexpr int64_t kKeysPerCountBlock = 4096;

struct Places {
  uint32_t* position;  // [mask + 1], of one position that holds the key, or kEmpty
  uint64_t mask;
  uint64_t seed;
};

// For each position, the place of its key. With kFirst a place ends up with the key's first position.
template <bool kFirst>
__global__ void PlaceKeysKernel(const uint64_t* keys,  // [n]
                                int64_t n, Places places,
                                uint32_t* place_of,     // [n]
                                uint64_t* unique_keys,  // [n], and
                                uint32_t* number_of,    // [mask + 1]: unless kFirst, which numbers later
                                unsigned long long* num_unique) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    const uint64_t key = keys[i];
    const uint32_t mine = static_cast<uint32_t>(i);
    uint64_t place = HashKey(key ^ places.seed) & places.mask;
    while (true) {
      uint32_t* at = places.position + place;
      uint32_t held = LoadRelaxed(at);
      if (held == kEmpty) {
        held = atomicCAS(at, kEmpty, mine);
        if (held == kEmpty) {
          if (!kFirst) {
            const uint32_t number = static_cast<uint32_t>(atomicAdd(num_unique, 1ull));
            unique_keys[number] = key;
            number_of[place] = number;
          }
          break;
        }
      }
      if (keys[held] == key) {
        // A stale value read here is another position of the same key, and only larger: the minimum stays right.
        if (kFirst && mine < held) atomicMin(at, mine);
        break;
      }
      place = (place + 1) & places.mask;
    }
    place_of[i] = static_cast<uint32_t>(place);
  }
}

__global__ void FirstsKernel(Places places, const uint32_t* place_of, int64_t n,
                             uint32_t* is_first) {  // [n]
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    is_first[i] = places.position[place_of[i]] == static_cast<uint32_t>(i) ? 1 : 0;
  }
}

// A first position's number is how many first positions lie before it.
__global__ void NumberFirstsKernel(const uint64_t* keys, int64_t n, const uint32_t* is_first, const uint32_t* before,
                                   const uint32_t* place_of, uint64_t* unique_keys,
                                   uint32_t* number_of,  // [places]
                                   int64_t* num_unique) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    if (is_first[i] != 0) {
      unique_keys[before[i]] = keys[i];
      number_of[place_of[i]] = before[i];
    }
    if (i == n - 1) *num_unique = int64_t{before[i]} + is_first[i];
  }
}

// Inverse and counts. Frequent keys come up early and so have low numbers: those a block counts by itself, so that a hot
// key costs the counter in memory one addition a block and not one an appearance.
__global__ void InverseKernel(const uint32_t* place_of, const uint32_t* number_of, int64_t n, uint32_t* inverse,
                              uint32_t* counts) {  // or null
  __shared__ uint32_t low[kCountersPerBlock];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kKeysPerCountBlock;
  const int64_t end = begin + kKeysPerCountBlock < n ? begin + kKeysPerCountBlock : n;
  if (counts != nullptr) {
    for (int64_t k = threadIdx.x; k < kCountersPerBlock; k += blockDim.x) low[k] = 0;
    __syncthreads();
  }
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const uint32_t number = number_of[place_of[i]];
    inverse[i] = number;
    if (counts != nullptr) atomicAdd(number < kCountersPerBlock ? &low[number] : &counts[number], 1u);
  }
  if (counts == nullptr) return;
  __syncthreads();
  for (int64_t k = threadIdx.x; k < kCountersPerBlock; k += blockDim.x)
    if (low[k] != 0) atomicAdd(&counts[k], low[k]);
}

}  // namespace

void Unique(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, UniqueOrder order,
            uint64_t* unique_keys, uint32_t* inverse, uint32_t* counts, int64_t* num_unique) {
  if (n >= INT64_C(0x80000000)) {
    throw InvalidArgument("at most 2^31 - 1 keys in one call. Received: " + std::to_string(n) + ".");
  }
  SOK_CUDA(cudaMemsetAsync(num_unique, 0, sizeof(int64_t), cuda.stream));
  if (n == 0) return;
  const int64_t num_places = PlacesFor(n);
  const Places places = {scratch->Get<uint32_t>(num_places), static_cast<uint64_t>(num_places - 1), HashSeed()};
  uint32_t* place_of = scratch->Get<uint32_t>(n);
  uint32_t* number_of = scratch->Get<uint32_t>(num_places);
  SOK_CUDA(cudaMemsetAsync(places.position, 0xFF, static_cast<size_t>(num_places) * sizeof(uint32_t), cuda.stream));
  if (counts != nullptr) {
    SOK_CUDA(cudaMemsetAsync(counts, 0, static_cast<size_t>(n) * sizeof(uint32_t), cuda.stream));
  }
  const int64_t grid = GridFor(n, kThreads);
  auto* count = reinterpret_cast<unsigned long long*>(num_unique);
  if (order == UniqueOrder::kAny) {
    Launch(PlaceKeysKernel<false>, grid, kThreads, 0, cuda, keys, n, places, place_of, unique_keys, number_of, count);
  } else {
    uint32_t* is_first = scratch->Get<uint32_t>(n);
    uint32_t* before = scratch->Get<uint32_t>(n);
    Launch(PlaceKeysKernel<true>, grid, kThreads, 0, cuda, keys, n, places, place_of, unique_keys, number_of, count);
    Launch(FirstsKernel, grid, kThreads, 0, cuda, places, place_of, n, is_first);
    ExclusiveSum(cuda, scratch, is_first, before, n);
    Launch(NumberFirstsKernel, grid, kThreads, 0, cuda, keys, n, is_first, before, place_of, unique_keys, number_of,
           num_unique);
  }
  Launch(InverseKernel, (n + kKeysPerCountBlock - 1) / kKeysPerCountBlock, kThreads, 0, cuda, place_of, number_of, n,
         inverse, counts);
}

int64_t UniqueToHost(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, UniqueOrder order,
                     uint64_t* unique_keys, uint32_t* inverse, uint32_t* counts) {
  int64_t* num_unique = scratch->Get<int64_t>(1);
  Unique(cuda, scratch, keys, n, order, unique_keys, inverse, counts, num_unique);
  int64_t found = 0;
  SOK_CUDA(cudaMemcpyAsync(&found, num_unique, sizeof(found), cudaMemcpyDeviceToHost, cuda.stream));
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  return found;
}

}  // namespace sok
