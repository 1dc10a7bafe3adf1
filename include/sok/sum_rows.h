// Gradients per row: addends that belong to the same row id, from one lookup or several, become one sum. For many tables
// in one parallel loop.
#pragma once

#include <cstdint>
#include <functional>

#include "sok/combine.h"
#include "sok/device.h"
#include "sok/scratch.h"

namespace sok {

// The addends of one lookup. Without row_splits addend i is values[i]; with them it is the gradient of the segment that
// holds i, times what pooling multiplied its row with.
struct RowAddends {
  const int64_t* row_ids = nullptr;  // [n]; negative ones are dropped
  int64_t n = 0;
  const float* values = nullptr;        // [n, dim], or [segments, dim]
  const int64_t* row_splits = nullptr;  // [segments + 1] or null
  int64_t segments = 0;
  const float* weights = nullptr;  // [n] or null; only with row_splits
  Combiner combiner = Combiner::kSum;
};

// All addends of one table.
struct RowSums {
  int64_t dim = 0;
  const RowAddends* addends = nullptr;  // [num_addends]
  int64_t num_addends = 0;
};

struct RowSumsTarget {
  int64_t* row_ids = nullptr;  // [num_rows]
  float* sums = nullptr;       // [num_rows, dim]
};

// For each table, distinct row ids and their sums. Their order depends on the row ids alone: that of first appearance up
// to 32,768 addends. Each sum is taken in order of the addends, so results repeat bit for bit, whatever the number of threads.
// allocate(table, num_rows) is called once per table, in order, when the sizes are known.
// Throws InvalidArgument for 2^31 addends or more in one table.
void SumRows(const Cpu& cpu, Scratch* scratch, const RowSums* tables, int64_t num_tables,
             const std::function<RowSumsTarget(int64_t table, int64_t num_rows)>& allocate);

// ---- On a device

// The addends of one lookup in a table of a group. Addend i is the row of `values` of the segment that holds position i,
// times what pooling multiplied its row with.
struct DeviceAddends {
  int64_t table = 0;  // its number in the group
  // [n]; negative ones are dropped. The lower half numbers the row, and the upper one is passed on, that of the first
  // addend of a row (DeviceTable counts erasures there).
  const int64_t* row_ids = nullptr;
  const void* values = nullptr;  // segment s at values + s * values_stride, in elements
  int64_t values_stride = 0;
  DeviceSegments segments;         // where nothing was pooled: hotness 1
  const float* weights = nullptr;  // [n] or null
  Combiner combiner = Combiner::kSum;
};

// Distinct rows of all tables of a group, by table and then row id, and their sums in float32: sorted, then summed in pieces of
// 32 rows as UnsortedSegmentSum's kFixed. Repeats bit for bit. All tables have rows of the same dim. The number of sums stays
// on the device; nothing waits. `addends` and `table_rows` are host memory, read before the call returns.
// first_bad[k]: lowered to the position of a row id that its table does not have, or n + s for a segment s whose
// row_splits make no sense; such addends are dropped.
// Throws InvalidArgument for 2^31 - 1 addends or more, for tables of 2^32 - 1 rows or more together (give them in two
// calls), for dim below 1, and for a table number that is not in the group.
void SumRows(const Cuda& cuda, DeviceScratch* scratch,
             const DeviceAddends* addends,  // [num_addends]
             int64_t num_addends,
             const int64_t* table_rows,  // [num_tables]: row numbers are below
             int64_t num_tables, int64_t dim, FloatType type,
             int64_t* row_ids,      // [all addends], the first num_sums are written
             int32_t* tables,       // the same, or null
             float* sums,           // [all addends, dim]
             int64_t* num_sums,     // [1]
             uint64_t* first_bad);  // [num_addends] or null

// What a table of a group gets.
struct DeviceRowSums {
  int64_t num_rows = 0;  // row numbers are below
  int64_t dim = 0;
  int64_t* row_ids = nullptr;   // [its addends], the first num_sums are written
  float* sums = nullptr;        // [its addends, dim], the same
  int64_t* num_sums = nullptr;  // [1]
  int64_t size = 0;  // row_ids and sums have so many: behind the last sum they get -1 and zeros; 0: they stay
};

// SumRows with each table's rows in arrays of its own, and for tables of any dims: they share all but the additions. The sums
// of tables of one dim must lie whole rows apart, fewer than 2^31 - 1 (in one array). Row ids that a table does not have are
// not dropped but summed as if they were one, which comes last and has the first one's id: who gets the sums shall report it. A sum of up to 32 addends has the bits that
// it has for the table alone; those of more are grouped by where the table's addends lie among the others'.
// Throws InvalidArgument as SumRows; tables may have any number of rows together.
void SumRowsOfTables(const Cuda& cuda, DeviceScratch* scratch,
                     const DeviceAddends* addends,  // [num_addends]
                     int64_t num_addends,
                     const DeviceRowSums* tables,  // [num_tables]
                     int64_t num_tables, FloatType type,
                     uint64_t* first_bad);  // [num_addends] or null

}  // namespace sok
