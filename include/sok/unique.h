// Distinct keys, and which positions hold each: the one deduplication under unique, routing and updates.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/scratch.h"

namespace sok {

// Positions of equal keys, grouped. Groups come in an order that depends only on the keys (not on threads);
// positions inside a group ascend.
struct Groups {
  int64_t num_groups = 0;
  const uint32_t* offsets = nullptr;    // [num_groups + 1]
  const uint32_t* positions = nullptr;  // [n]; group g holds positions[offsets[g] .. offsets[g + 1])
};

// Groups the n keys; arrays live in scratch. n < 2^32 - 1, else InvalidArgument.
Groups GroupKeys(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n);

// For each group its rank in order of first appearance.
const uint32_t* FirstAppearance(const Cpu& cpu, Scratch* scratch, const Groups& groups, int64_t n);

// As tf.unique: distinct keys in order of first appearance. Gives their number.
int64_t Unique(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n,
               uint64_t* unique_keys,  // [n], the first num_unique are written
               uint32_t* inverse,      // [n]
               uint32_t* counts);      // [n] or null, the first num_unique are written

// Sums of the value rows of each group: sums[order[g]] = sum over its positions p of factor[p] * values[source[p]].
// source null: p itself; factor null: 1; order null: g.
void SumGroups(const Cpu& cpu, const Groups& groups, const float* values, const uint32_t* source, const float* factor,
               const uint32_t* order, int64_t dim,
               float* sums);  // [num_groups, dim]

}  // namespace sok
