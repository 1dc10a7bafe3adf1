// Of the positions of a batch that hold the same key, one speaks for all. Keys are compared where they lie in the batch, so
// no value has to mean "empty", and no thread ever waits for another.
#pragma once

#include <cstdint>

#include "launch.h"
#include "places.h"
#include "primitives.h"
#include "sok/hash_table.h"
#include "sok/scratch.h"

namespace sok {

enum class Speaker { kFirst, kLast };  // of the positions of a key

constexpr uint32_t kNobody = 0xFFFFFFFFu;

namespace {  // a kernel belongs to the file that starts it

constexpr int kElectThreads = 256;

// A table of positions, probed linearly. Takes part: positions where (rows[i] == kNoRow) is `missing`; without rows, all.
template <Speaker kSpeaker>
__global__ void ElectKernel(const uint64_t* keys, int64_t n, const uint32_t* rows, bool missing, uint32_t* positions,
                            uint32_t mask, uint64_t seed, uint32_t* place_of) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    if (rows != nullptr && (rows[i] == kNobody) != missing) {
      place_of[i] = kNobody;
      continue;
    }
    const uint64_t key = keys[i];
    const uint32_t me = static_cast<uint32_t>(i);
    for (uint32_t place = static_cast<uint32_t>(HashKey(key ^ seed)) & mask;; place = (place + 1) & mask) {
      if (place == kNobody) continue;  // means that a position takes no part
      uint32_t there = LoadRelaxed(&positions[place]);
      if (there == kNobody) there = atomicCAS(&positions[place], kNobody, me);
      if (there != kNobody && keys[there] != key) continue;
      if (kSpeaker == Speaker::kFirst && there > me && there != kNobody) atomicMin(&positions[place], me);
      if (kSpeaker == Speaker::kLast && there < me) atomicMax(&positions[place], me);
      place_of[i] = place;
      break;
    }
  }
}

// leaders[i] = the position that speaks for the key of position i; is_leader[i] says whether that is i. is_leader[n] = 0.
__global__ void LeadersKernel(const uint32_t* positions, const uint32_t* place_of, int64_t n, uint32_t* leaders,
                              uint32_t* is_leader) {
  for (int64_t i = GlobalThread(); i <= n; i += GlobalThreads()) {
    const uint32_t leader = i == n || place_of[i] == kNobody ? kNobody : positions[place_of[i]];
    if (i < n) leaders[i] = leader;
    is_leader[i] = leader == static_cast<uint32_t>(i) && i < n;
  }
}

struct Elected {
  uint32_t* leaders;  // [n]
  uint32_t* before;   // [n + 1] leaders before each position
};

template <Speaker kSpeaker>
Elected Elect(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, const uint32_t* rows,
              bool missing, uint32_t* leaders) {
  const int64_t places = PlacesFor(n);
  uint32_t* positions = scratch->Get<uint32_t>(places);
  uint32_t* place_of = scratch->Get<uint32_t>(n);
  Elected elected = {leaders != nullptr ? leaders : scratch->Get<uint32_t>(n), scratch->Get<uint32_t>(n + 1)};
  SOK_CUDA(cudaMemsetAsync(positions, 0xFF, static_cast<size_t>(places) * sizeof(uint32_t), cuda.stream));
  Launch(ElectKernel<kSpeaker>, GridFor(n, kElectThreads), kElectThreads, 0, cuda, keys, n, rows, missing, positions,
         static_cast<uint32_t>(places - 1), HashSeed(), place_of);
  Launch(LeadersKernel, GridFor(n + 1, kElectThreads), kElectThreads, 0, cuda, positions, place_of, n, elected.leaders,
         elected.before);
  ExclusiveSum(cuda, scratch, elected.before, elected.before, n + 1);
  return elected;
}

}  // namespace
}  // namespace sok
