// How a tile of eight lanes searches the hash table: a bucket is 128 bytes, 16 for each lane.
#pragma once

#include "launch.h"
#include "vector4.h"  // SOK_UNROLL
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

// Whether the search for key ends with this bucket, and with which row, or kNoRow; the same in all lanes.
__device__ __forceinline__ bool EndsIn(const BucketTile& tile, const ulonglong2& part, uint64_t key, uint32_t* row) {
  unsigned even = tile.Ballot(tile.lane < 5 && part.x == key);
  unsigned odd = tile.Ballot(tile.lane < 5 && part.y == key);
  // At most one place has the key and a row; a free one may still hold the key that was erased from it.
  while ((even | odd) != 0) {
    const int lane = __ffs(static_cast<int>(even | odd)) - 1;
    const bool is_even = ((even >> lane) & 1) != 0;
    const int place = 2 * lane + (is_even ? 0 : 1);
    const uint64_t two = (place & 2) == 0 ? part.x : part.y;
    const uint64_t rows = tile.Shuffle(static_cast<unsigned long long>(two), 5 + place / 4);
    *row = static_cast<uint32_t>((place & 1) == 0 ? rows : rows >> 32);
    if (*row != kNoRow) return true;
    (is_even ? even : odd) &= ~(1u << lane);
  }
  *row = kNoRow;
  return static_cast<uint32_t>(tile.Shuffle(part.y, kBucketLanes - 1)) == 0;  // `passed`
}

// How many keys a tile searches at once: it waits for their buckets together.
constexpr int kKeysAtOnce = 4;

// The rows of keys, or kNoRow; the same in all lanes. Nobody may write to the table meanwhile.
__device__ __forceinline__ void FindRows(const BucketTile& tile, const HashTableView& table,
                                         const uint64_t (&keys)[kKeysAtOnce], uint32_t (&rows)[kKeysAtOnce]) {
  uint64_t home[kKeysAtOnce];
  ulonglong2 part[kKeysAtOnce];
  SOK_UNROLL
  for (int j = 0; j < kKeysAtOnce; ++j) {
    rows[j] = kNoRow;
    home[j] = HomeBucket(table, keys[j]);
    if (table.num_buckets != 0) part[j] = LoadPart(table.buckets + home[j], tile.lane);
  }
  if (table.num_buckets == 0) return;
  SOK_UNROLL
  for (int j = 0; j < kKeysAtOnce; ++j) {
    uint64_t b = home[j];
    while (!EndsIn(tile, part[j], keys[j], &rows[j])) {
      if (++b == table.num_buckets) b = 0;
      if (b == home[j]) break;  // of few buckets, each may have been passed
      part[j] = LoadPart(table.buckets + b, tile.lane);
    }
  }
}

// The keys of a tile at once: `count` of them, at `keys`, and the last in place of those there are not. Returns this lane's.
__device__ __forceinline__ uint64_t LoadKeys(const BucketTile& tile, const uint64_t* keys, int count,
                                             uint64_t (&all)[kKeysAtOnce]) {
  const uint64_t mine = keys[tile.lane < count ? tile.lane : count - 1];
  SOK_UNROLL
  for (int j = 0; j < kKeysAtOnce; ++j) all[j] = tile.Shuffle(static_cast<unsigned long long>(mine), j);
  return mine;
}

// What this lane is to write, of what the tile has found.
__device__ __forceinline__ uint32_t OfLane(const BucketTile& tile, const uint32_t (&rows)[kKeysAtOnce]) {
  uint32_t row = rows[0];
  SOK_UNROLL
  for (int j = 1; j < kKeysAtOnce; ++j) row = tile.lane == j ? rows[j] : row;
  return row;
}

// f(first, count) for n keys of a grid, a tile each: `count` of them from `first` on.
template <class F>
__device__ __forceinline__ void ForKeysAtOnce(int64_t n, const F& f) {
  for (int64_t first = GlobalThread() / kBucketLanes * kKeysAtOnce; first < n;
       first += GlobalThreads() / kBucketLanes * kKeysAtOnce) {
    f(first, n - first < kKeysAtOnce ? static_cast<int>(n - first) : kKeysAtOnce);
  }
}

}  // namespace sok
