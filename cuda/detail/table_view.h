// A table as kernels of a lookup see it.
#pragma once

#include <cstdint>

#include "copy_row.h"
#include "find_row.h"
#include "launch.h"
#include "sok/initializer.h"
#include "sok/partition.h"
#include "table_state.h"

namespace sok {

// What a lookup needs of a table, by value.
struct TableView {
  HashTableView index;  // of a hashed table
  bool hashed;
  const uint32_t* in_use;      // of an identity table: one bit per row
  uint64_t num_legal, shards;  // row = key / shards
  Partition partition;
  int rank;
  DeviceRows rows;
  RowNotes notes;
  const uint32_t* erasures;  // [num_erasures], or null
  int64_t num_erasures;
  InitializerView initializer;
  int64_t dim;
};

inline TableView ViewOf(const DeviceTable::State& state) {
  TableView view{};
  view.hashed = state.config.hashed;
  if (view.hashed) view.index = state.index->view();
  view.in_use = state.in_use.data();
  view.num_legal = view.hashed ? 0 : state.config.num_legal();
  view.partition = state.config.partition();
  view.shards = static_cast<uint64_t>(view.partition.num_shards());
  view.rank = state.config.rank;
  view.rows = state.rows.view();
  view.notes = state.changes.notes();
  view.erasures = state.erasures.data();
  view.num_erasures = state.erasures.capacity();
  view.initializer = state.initializer;
  view.dim = state.config.dim;
  return view;
}

__device__ __forceinline__ int64_t RowId(const TableView& table, uint32_t row) {
  const uint32_t erasures = row < table.num_erasures ? table.erasures[row] & 0x7FFFFFFFu : 0;
  return static_cast<int64_t>((uint64_t{erasures} << 32) | row);
}

// The row of a key that this shard holds, kNoRow, or kBadRow.
__device__ __forceinline__ uint32_t Search(const TableView& table, uint64_t key) {
  if (table.hashed) {
    if (table.partition.OwnerOf(key) != table.rank) return kBadRow;
    return FindRow(table.index, key);
  }
  if (key >= table.num_legal || table.partition.OwnerOf(key) != table.rank) return kBadRow;
  const uint32_t row = static_cast<uint32_t>(table.shards == 1 ? key : key / table.shards);
  return ((table.in_use[row >> 5] >> (row & 31)) & 1) != 0 ? row : kNoRow;
}

__device__ __forceinline__ void WriteFresh(const BucketTile& tile, const TableView& table, uint64_t key, float* row) {
  const bool aligned = IsAligned16(row);
  for (int64_t block = tile.lane; 4 * block < table.dim; block += kBucketLanes) {
    float value[4];
    FreshElements(table.initializer, key, table.dim, block, value);
    if (aligned && 4 * block + 4 <= table.dim) {
      StoreFloat4(row + 4 * block, make_float4(value[0], value[1], value[2], value[3]));
    } else {
      for (int j = 0; j < 4; ++j)
        if (4 * block + j < table.dim) row[4 * block + j] = value[j];
    }
  }
}

// A key that has come new, as a lane knows it.
struct NewKey {
  uint64_t key = 0;
  uint32_t row = kNoRow;
  bool is_new = false;  // else there is nothing to write
  bool leads = false;   // of the positions with this key, the one that writes the record
};

// Row after row what came new: its record, by the position that leads, and unless `out` is null what the lookup gives.
__device__ __forceinline__ void WriteNew(const BucketTile& tile, const TableView& table, const NewKey& mine, int count,
                                         const float* defaults, int64_t num_defaults,
                                         float* out) {  // [count, dim] or null
  const unsigned new_ones = tile.Ballot(mine.is_new), leaders = tile.Ballot(mine.leads);
  if (mine.leads) table.notes.Note(mine.row);
  for (int j = 0; j < count; ++j) {
    if ((new_ones >> j & 1) == 0) continue;
    const uint64_t key = tile.Shuffle(static_cast<unsigned long long>(mine.key), j);
    const uint32_t row = tile.Shuffle(mine.row, j);
    if (out != nullptr) WriteFresh(tile, table, key, out + j * table.dim);
    if ((leaders >> j & 1) == 0) continue;
    float* record = table.rows.At(row);
    WriteFresh(tile, table, key, record);
    CopyRow(tile, defaults, num_defaults, record + table.dim);
  }
}

// Row after row what the lanes have found, each for its key: [count, dim]. kFreshToo: a key without a row reads as its fresh
// one, else nothing is written for it.
template <bool kFreshToo>
__device__ __forceinline__ void WriteRows(const BucketTile& tile, const TableView& table, uint64_t key, uint32_t row,
                                          int count, float* out) {
  for (int j = 0; j < count; ++j, out += table.dim) {
    const uint32_t row_of_all = tile.Shuffle(row, j);
    const uint64_t key_of_all = tile.Shuffle(static_cast<unsigned long long>(key), j);
    if (row_of_all == kBadRow) {
      ZeroRow(tile, table.dim, out);
    } else if (row_of_all != kNoRow) {
      CopyRow(tile, table.rows.At(row_of_all), table.dim, out);
    } else if (kFreshToo) {
      WriteFresh(tile, table, key_of_all, out);
    }
  }
}

}  // namespace sok
