// How a tile of eight lanes puts a key into the hash table, and which row the key gets.
#pragma once

#include "find_row.h"
#include "launch.h"
#include "sok/hash_table.h"

namespace sok {

// Puts a key that the table does not have, with its row, into the first bucket that has a free place. Other tiles may do the
// same with other keys: what is claimed is the row of a place; nobody reads keys meanwhile.
__device__ __forceinline__ void Place(const BucketTile& tile, const HashTableView& table, uint64_t key, uint32_t row) {
  constexpr int kOdd = DeviceBucket::kPlaces - kBucketLanes;  // places behind those that a lane each looks at
  for (uint64_t b = HomeBucket(table, key);;) {
    DeviceBucket* bucket = table.buckets + b;
    const bool is_free = LoadRelaxed(&bucket->rows[tile.lane]) == kNoRow;
    const bool is_free_too = tile.lane < kOdd && LoadRelaxed(&bucket->rows[kBucketLanes + tile.lane % kOdd]) == kNoRow;
    unsigned places = tile.Ballot(is_free);
    places |= tile.Ballot(is_free_too) << kBucketLanes;
    for (; places != 0; places &= places - 1) {
      const int place = __ffs(static_cast<int>(places)) - 1;
      int mine = 0;
      if (tile.lane == 0) {
        mine = atomicCAS(&bucket->rows[place], kNoRow, row) == kNoRow;
        if (mine != 0) bucket->keys[place] = key;
      }
      if (tile.Shuffle(mine, 0) != 0) return;
    }
    if (tile.lane == 0) atomicAdd(&bucket->passed, 1u);
    if (++b == table.num_buckets) b = 0;
  }
}

// The row of the new key that has `number` new ones before it: numbers of erased rows first, the last erased one first.
__device__ __forceinline__ uint32_t RowOfNew(const DeviceHashCounters& counters, const uint32_t* free_rows,
                                             int64_t number) {
  return number < counters.num_free ? free_rows[counters.num_free - 1 - number]
                                    : static_cast<uint32_t>(counters.next_row + number - counters.num_free);
}

// What the counters are once so many keys were placed.
__device__ __forceinline__ void CountInserted(int64_t num_new, DeviceHashCounters* counters) {
  const int64_t reused = num_new < counters->num_free ? num_new : counters->num_free;
  counters->size += num_new;
  counters->num_free -= reused;
  counters->next_row += num_new - reused;
}

}  // namespace sok
