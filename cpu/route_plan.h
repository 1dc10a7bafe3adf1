// What RouteKeys knows between its steps, and those steps that bring a table's keys to parts that fit a cache and back.
#pragma once

#include <atomic>
#include <cstdint>

#include "pieces.h"
#include "sok/exchange.h"
#include "sok/scratch.h"

namespace sok {

constexpr int kMaxParts = 16;                // of a table
constexpr int64_t kKeysPerChunk = 32 << 10;  // of a KeyChunk, at most
constexpr uint32_t kFirst = 0x80000000u;     // of an index: no key before has that place

// A table's keys are one part, or several by hash if they are many. Each part is deduplicated by itself.
struct Part {
  int table;
  int64_t n;            // keys that fall into it
  int64_t fixed_n;      // of these, first, those of features that come by rows in any case
  int64_t num_keys;     // distinct ones
  int64_t num_fixed;    // of these, first, those of such features
  uint64_t* keys;       // [n], in order; then the distinct ones first
  uint32_t* home;       // [n]: each key's number in the part, then its place in the answers; kFirst where it is new
  uint32_t* place;      // [n] of distinct keys: owner, then place
  int64_t* counts;      // [world]
  int64_t* first_word;  // [world], in the message of that rank's keys of this table
};

// A stretch of the keys of one feature.
struct KeyChunk {
  int feature;
  int64_t begin, end;
  int64_t at[kMaxParts];  // how many fall into each part, then where the first of them lies among the table's keys
};

// How keys of features that may come by sums travel. Open: it takes the number of distinct ones to say.
enum class Choice { kRows, kSums, kOpen };

struct TableKeys {
  Choice choice;
  int64_t n;          // keys to tell apart
  int64_t free_keys;  // of features that may come by sums
  int64_t pieces;     // of theirs, at least
  int64_t max_pieces;
  int64_t limit;                // more distinct ones than this, and sums are the choice
  std::atomic<int64_t>* found;  // how many distinct ones there are, so far
  int features_begin, features_free,
      features_end;  // in Plan::features_of; from features_free on those that may be summed
  int parts_begin, parts_end;
  int64_t chunks_begin, chunks_free, chunks_end;
  int shift;  // a hash's part is hash >> shift; 64: there is one part
  uint64_t* keys;
  uint32_t* home;
};

struct Plan {
  int world, num_tables, num_features, num_parts;
  const RouteTable* tables;
  const RouteFeature* features;
  int* features_of;  // table after table
  TableKeys* of_table;
  Part* parts;
  int64_t num_chunks;
  KeyChunk* chunks;  // table after table, in the order of features_of
  PieceCount cut;
  const int64_t* counts;
  const int64_t* pieces;
};

inline bool MaySum(const RouteFeature& feature) { return feature.row_splits != nullptr; }

// Makes of_table and features_of, as far as the features say.
void SortFeatures(Scratch* scratch, Plan* plan);

// Makes the parts, of those keys that may come by rows: `choice` of the tables has been made, as far as it can be. Throws
// InvalidArgument for 2^31 keys or more in one table.
void MakeParts(const Cpu& cpu, Scratch* scratch, Plan* plan);

// Numbers the distinct keys of a part. slots [Numbering::SlotsFor(part->n)].
void Deduplicate(const Plan& plan, Part* part, uint32_t* slots);

// Brings the places of a chunk's keys from their parts to the index of their feature.
void WriteIndex(const Plan& plan, const KeyChunk& chunk);

}  // namespace sok
