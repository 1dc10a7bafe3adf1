// Arithmetic on rows of floats: the inner loops of lookups, gradients and updates, compiled once per instruction set and
// chosen at run time (cpu_features.h). All versions give the same bits: every element goes through the same operations in
// the same order, and none of them is contracted.
#pragma once

#include <cstdint>

#include "sok/adam_decay.h"
#include "sok/combine.h"
#include "sok/sparse_update.h"

namespace sok {

// Where records lie: row r at slabs[r >> shift] + (r & mask) * stride.
struct RowView {
  float* const* slabs;
  int shift;
  int64_t mask;
  int64_t stride;
};

struct RowKernels {
  // Gathers the first dim floats of rows[0 .. n) into to, asking the memory ahead; kNoRow reads as zeros. False, and nothing done, for a dim that has no loop of its own. With stream the stores go past the
  // cache, for outputs larger than it: call fence before other threads may read.
  bool (*gather)(const RowView& view, const uint32_t* rows, int64_t n, int64_t dim, bool stream, float* to);
  void (*fence)();

  // The same, pooled: out[s] = the rows of positions [row_splits[s], row_splits[s + 1]) combined, for segments
  // [first, last). rows[0] is position row_splits[first].
  bool (*pool)(const RowView& view, const uint32_t* rows, const int64_t* row_splits, int64_t first, int64_t last,
               Combiner combiner, int64_t dim, float* out);

  // pool with 64-bit row numbers.
  bool (*pool_keys)(const RowView& view, const uint64_t* keys, const int64_t* row_splits, int64_t first, int64_t last,
                    Combiner combiner, int64_t dim, float* out);

  // Whether keys[i] < limit for all i.
  bool (*all_below)(const uint64_t* keys, int64_t n, uint64_t limit);

  // Whether 0 <= x[i - 1] <= x[i] for 0 < i < n; x[0] is not negative.
  bool (*never_falls)(const int64_t* x, int64_t n);

  // rows[i] = keys[i], or kNoRow for keys[i] >= limit (at most 2^32 - 1). Whether there was one.
  bool (*narrow)(const uint64_t* keys, int64_t n, uint64_t limit, uint32_t* rows);

  // row_ids[i] = rows[i] + base, or -1 for kNoRow. How many of those there are.
  int64_t (*widen)(const uint32_t* rows, int64_t n, int64_t base, int64_t* row_ids);

  // sums[slot[i]] += values[s] * scale(s) for positions i of segments s in [0, segments), without row_splits
  // sums[slot[i]] += values[i]; in order of i. scale as in pool. Slots are numbered by first appearance, *next of them
  // before: the first time that a slot comes up its sum is set. Positions with slot kNoRow are left out. False, and
  // nothing done, for a dim that has no loop of its own.
  bool (*sum_segments)(const uint32_t* slot, const int64_t* row_splits, int64_t segments, Combiner combiner,
                       const float* values, int64_t dim, uint32_t* next, float* sums);

  // The other way of pool, without row numbers: to + (lower 31 bits of index[i]) += values[s] * scale(s), in order of i, where
  // those bits are in [first, last); where the top bit is set, nothing was there before. False, and nothing done, for a dim
  // that has no loop of its own.
  bool (*scatter)(const int32_t* index, const int64_t* row_splits, int64_t segments, Combiner combiner,
                  const float* values, int64_t dim, int64_t first, int64_t last, float* to);

  // update for records of rows row_ids[i] (lower 32 bits), none negative, asking the memory ahead.
  void (*update_rows)(const RowView& view, const UpdateRule& rule, const int64_t* row_ids, int64_t slot_offset,
                      const float* grads, int64_t count, int64_t dim);

  // out = sum_i weights[i] * rows[i] in order of i; weights null: 1. With fresh, out starts from zero.
  void (*accumulate)(const float* const* rows, const float* weights, int64_t count, int64_t dim, bool fresh,
                     float* out);

  // x *= factor.
  void (*scale)(float factor, int64_t dim, float* x);

  // sums[slot[i]] += factor[i] * source[i] in order of i; factor null: 1. Slots are numbered by first appearance: the
  // first time that a slot comes up its sum is set, not added to.
  void (*sum_by_slot)(const float* const* source, const float* factor, const uint32_t* slot, int64_t n, int64_t dim,
                      float* sums);

  // to[i] += source[i], in order of i; where fresh[i], to[i] = 0 + source[i].
  void (*add_rows)(const float* const* source, float* const* to, const uint8_t* fresh, int64_t n, int64_t dim);

  // Runs the rule on `count` records with gradients [count, dim]; slots begin at records[i] + slot_offset.
  void (*update)(const UpdateRule& rule, float* const* records, int64_t slot_offset, const float* grads, int64_t count,
                 int64_t dim);

  // Brings one row over missed steps of a rule that decays: out (may be w) = the weights now. Slots stay as they are.
  void (*read_decayed)(const UpdateRule& rule, const Decay& decay, const float* w, const float* slots, int64_t dim,
                       float* out);

  // The same in place, slots too.
  void (*settle)(const UpdateRule& rule, const Decay& decay, int64_t dim, float* w, float* slots);

  // Fresh uniform rows: records[i] = dim floats of the row of keys[i] (initializer.h), from element 4 * first_block on.
  void (*fill_uniform)(uint64_t seed, float a, float width, const uint64_t* keys, int64_t count, int64_t dim,
                       int64_t first_block, float* const* records);

  // Floats from[0 .. n) to 16 bit, and back; from and to need not be aligned.
  void (*to_half)(const float* from, int64_t n, uint16_t* to);
  void (*from_half)(const uint16_t* from, int64_t n, float* to);
  void (*to_bfloat16)(const float* from, int64_t n, uint16_t* to);
  void (*from_bfloat16)(const uint16_t* from, int64_t n, float* to);
};

// Those of ChosenIsa().
const RowKernels& ChosenRowKernels();

// One per translation unit; null where the build does not have it.
const RowKernels* GenericRowKernels();
const RowKernels* Avx2RowKernels();
const RowKernels* Avx512RowKernels();

}  // namespace sok
