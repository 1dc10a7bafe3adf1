// How a thread puts a key into the hash table, and which row the key gets.
#pragma once

#include "find_row.h"
#include "launch.h"
#include "sok/hash_table.h"

namespace sok {

// Bit i: place i of the bucket has no row. Others may claim places meanwhile.
__device__ __forceinline__ unsigned FreePlaces(const DeviceBucket* bucket) {
  static_assert(DeviceBucket::kPlaces == 10, "five words of rows");
  constexpr int kFirst = DeviceBucket::kPlaces;  // of the bucket's words: so many keys come before the rows
  const uint64_t* words = reinterpret_cast<const uint64_t*>(bucket);
  ulonglong2 part[3];  // 5, 6 and 7 of LoadPart
  SOK_UNROLL
  for (int i = 0; i < 3; ++i) part[i] = LoadTwoRelaxed(words + kFirst + 2 * i);
  const auto free_of = [](uint64_t rows) {  // two rows in a word
    return (static_cast<uint32_t>(rows) == kNoRow ? 1u : 0u) | (static_cast<uint32_t>(rows >> 32) == kNoRow ? 2u : 0u);
  };
  return free_of(part[0].x) | free_of(part[0].y) << 2 | free_of(part[1].x) << 4 | free_of(part[1].y) << 6 |
         free_of(part[2].x) << 8;
}

// Puts a key that the table does not have, with its row, into the first bucket that has a free place. Other threads may do
// the same with other keys: what is claimed is the row of a place; nobody reads keys meanwhile.
__device__ __forceinline__ void Place(const HashTableView& table, uint64_t key, uint32_t row) {
  for (uint64_t b = HomeBucket(table, key);;) {
    DeviceBucket* bucket = table.buckets + b;
    for (unsigned places = FreePlaces(bucket); places != 0; places &= places - 1) {
      const int place = __ffs(static_cast<int>(places)) - 1;
      if (atomicCAS(&bucket->rows[place], kNoRow, row) != kNoRow) continue;
      bucket->keys[place] = key;
      return;
    }
    atomicAdd(&bucket->passed, 1u);
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
