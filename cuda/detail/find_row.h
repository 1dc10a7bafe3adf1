// How a thread searches the hash table, and how a tile of eight lanes shares out keys and copies what they have found.
#pragma once

#include "launch.h"
#include "sok/hash_table.h"
#include "vector4.h"  // SOK_UNROLL

namespace sok {

constexpr int kBucketLanes = 8;
using BucketTile = Tile<kBucketLanes>;

// Blocks for n items: of a thread for each, and of a tile.
inline int64_t GridOf(int64_t n) { return GridFor(n, kThreads); }
inline int64_t GridOfTiles(int64_t n) { return GridFor(n, kThreads / kBucketLanes); }

// The high hash bits choose the bucket, by multiplication, so any bucket count works.
__device__ __forceinline__ uint64_t HomeBucket(const HashTableView& table, uint64_t key) {
  return ((HashKey(key ^ table.seed) >> 32) * table.num_buckets) >> 32;
}

// Lane i's 16 bytes of a bucket: 0 to 4 two keys each, 5 and 6 four rows each, 7 two rows and `passed`.
__device__ __forceinline__ ulonglong2 LoadPart(const DeviceBucket* bucket, int lane) {
  return reinterpret_cast<const ulonglong2*>(bucket)[lane];
}

// The row of key, or kNoRow, by one thread alone: measured on an H200, eight lanes to a key spend more on telling each other
// what they see than they save. Nobody may write to the table meanwhile.
__device__ __forceinline__ uint32_t FindRow(const HashTableView& table, uint64_t key) {
  if (table.num_buckets == 0) return kNoRow;
  const uint64_t home = HomeBucket(table, key);
  uint64_t b = home;
  do {
    const DeviceBucket* bucket = table.buckets + b;
    // All at once, with `passed`, which brings the rows near, too.
    const uint32_t passed = bucket->passed;
    ulonglong2 part[DeviceBucket::kPlaces / 2];
    SOK_UNROLL
    for (int i = 0; i < DeviceBucket::kPlaces / 2; ++i) part[i] = LoadPart(bucket, i);
    unsigned places = 0;
    SOK_UNROLL
    for (int i = 0; i < DeviceBucket::kPlaces / 2; ++i) {
      places |= (part[i].x == key ? 1u : 0u) << (2 * i) | (part[i].y == key ? 1u : 0u) << (2 * i + 1);
    }
    // At most one place has the key and a row; a free one may still hold the key that was erased from it.
    for (; places != 0; places &= places - 1) {
      const uint32_t row = bucket->rows[__ffs(static_cast<int>(places)) - 1];
      if (row != kNoRow) return row;
    }
    if (passed == 0) return kNoRow;
    if (++b == table.num_buckets) b = 0;
  } while (b != home);  // of few buckets, each may have been passed
  return kNoRow;
}

// How many keys a tile takes at once: each lane searches one, and where rows are copied all lanes copy each.
constexpr int kKeysAtOnce = kBucketLanes;

// f(first, count) for n keys of a grid, a tile each: `count` of them from `first` on.
template <class F>
__device__ __forceinline__ void ForKeysAtOnce(int64_t n, const F& f) {
  for (int64_t first = GlobalThread() / kBucketLanes * kKeysAtOnce; first < n;
       first += GlobalThreads() / kBucketLanes * kKeysAtOnce) {
    f(first, n - first < kKeysAtOnce ? static_cast<int>(n - first) : kKeysAtOnce);
  }
}

}  // namespace sok
