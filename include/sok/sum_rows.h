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

}  // namespace sok
