// How a tile of eight lanes searches the hash table: a bucket is 128 bytes, 16 for each lane.
#pragma once

#include "launch.h"
#include "sok/hash_table.h"

namespace sok {

constexpr int kBucketLanes = 8;
using BucketTile = Tile<kBucketLanes>;
constexpr uint32_t kNoRow = HashTable::kNoRow;

// The high hash bits choose the bucket, by multiplication, so any bucket count works.
__device__ __forceinline__ uint64_t HomeBucket(const HashTableView& table, uint64_t key) {
  return ((HashKey(key ^ table.seed) >> 32) * table.num_buckets) >> 32;
}

// Lane i's 16 bytes of a bucket: 0 to 4 two keys each, 5 and 6 four rows each, 7 two rows and `passed`.
__device__ __forceinline__ ulonglong2 LoadPart(const DeviceBucket* bucket, int lane) {
  return reinterpret_cast<const ulonglong2*>(bucket)[lane];
}

// The row of key, or kNoRow; the same in all lanes. Nobody may write to the table meanwhile.
__device__ __forceinline__ uint32_t FindRow(const BucketTile& tile, const HashTableView& table, uint64_t key) {
  if (table.num_buckets == 0) return kNoRow;
  const uint64_t home = HomeBucket(table, key);
  uint64_t b = home;
  do {
    const ulonglong2 part = LoadPart(table.buckets + b, tile.lane);
    unsigned even = tile.Ballot(tile.lane < 5 && part.x == key);
    unsigned odd = tile.Ballot(tile.lane < 5 && part.y == key);
    // At most one place has the key and a row; a free one may still hold the key that was erased from it.
    while ((even | odd) != 0) {
      const int lane = __ffs(static_cast<int>(even | odd)) - 1;
      const bool is_even = ((even >> lane) & 1) != 0;
      const int place = 2 * lane + (is_even ? 0 : 1);
      const uint64_t two = (place & 2) == 0 ? part.x : part.y;
      const uint64_t rows = tile.Shuffle(static_cast<unsigned long long>(two), 5 + place / 4);
      const uint32_t row = static_cast<uint32_t>((place & 1) == 0 ? rows : rows >> 32);
      if (row != kNoRow) return row;
      (is_even ? even : odd) &= ~(1u << lane);
    }
    const uint32_t passed = static_cast<uint32_t>(tile.Shuffle(part.y, kBucketLanes - 1));
    if (passed == 0) return kNoRow;
    if (++b == table.num_buckets) b = 0;
  } while (b != home);  // of few buckets, each may have been passed
  return kNoRow;
}

}  // namespace sok
