// Which rank owns a key.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/philox.h"
#include "sok/scratch.h"

namespace sok {

inline constexpr int kByKey = -1;

// Row-wise: owner = key mod world_size, never negative. Signed keys are 64-bit two's complement words.
SOK_HOST_DEVICE int Owner(uint64_t key, int world_size, bool is_unsigned) {
  const uint64_t world = static_cast<uint64_t>(world_size);
  // Powers of two divide 2^64, so the low bits say it for words of either sign, without a division.
  if ((world & (world - 1)) == 0) return static_cast<int>(key & (world - 1));
  if (is_unsigned || static_cast<int64_t>(key) >= 0) return static_cast<int>(key % world);
  const int64_t r = static_cast<int64_t>(key) % world_size;
  return static_cast<int>(r < 0 ? r + world_size : r);
}

// How the rows of a table lie on ranks: each on that of its key, or all on one (table-wise).
struct Partition {
  int world_size = 1;
  int owner = kByKey;
  bool is_unsigned = false;

  SOK_HOST_DEVICE int OwnerOf(uint64_t key) const {
    return owner == kByKey ? Owner(key, world_size, is_unsigned) : owner;
  }
  // Ranks that hold rows. The row of key k in an identity table is k / num_shards.
  int num_shards() const { return owner == kByKey ? world_size : 1; }
};

// On a device: keys sorted by the rank that owns them, those of one rank in the order they came, as an all-to-all sends
// them. Nothing waits. Repeats bit for bit. Throws InvalidArgument for n >= 2^31, for a world_size below 1 and for an owner
// outside it.
void PartitionKeys(const Cuda& cuda, DeviceScratch* scratch, const Partition& partition,
                   const uint64_t* keys,  // [n]
                   int64_t n,
                   uint64_t* sorted_keys,  // [n]
                   uint32_t* positions,    // [n]: sorted_keys[k] = keys[positions[k]]
                   uint32_t* places,       // [n] or null: sorted_keys[places[i]] = keys[i]
                   int64_t* counts);       // [world_size]: how many each rank owns

}  // namespace sok
