// Keys of pooled features by segment and owner: a *piece* is what one rank owns of one segment, and comes home as one sum.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/exchange.h"
#include "sok/scratch.h"

namespace sok {

// A stretch of segments of one feature.
struct PieceChunk {
  int feature = 0;
  int64_t begin = 0, end = 0;
  int64_t* pieces = nullptr;  // [world]
  int64_t* keys = nullptr;    // [world]
  int64_t* seen = nullptr;    // [world], the last segment that had a key of that rank
  bool is_legal = true;
};

// The pieces of all features that are to be cut.
struct PieceCount {
  PieceChunk* chunks = nullptr;  // feature after feature, in order of segments
  int64_t num_chunks = 0;
  int world = 0;
  const RouteTable* tables = nullptr;
  const RouteFeature* features = nullptr;

  bool AllLegal() const;
};

// About how many pieces the feature has on all ranks: of a thousand segments all over it they are counted.
int64_t EstimatePieces(Scratch* scratch, const RouteTable& table, const RouteFeature& f, int world);

PieceCount CountPieces(const Cpu& cpu, Scratch* scratch, const RouteTable* tables, const RouteFeature* features,
                       const int* cut, int num_cut, int world);  // cut: which features

// Where the pieces of one feature go.
struct PieceTarget {
  int32_t* index = nullptr;       // [pieces]
  int64_t* row_splits = nullptr;  // [segments + 1]; null: the feature was cut in vain
  float* scales = nullptr;        // [pieces] or null
  int64_t* length = nullptr;      // [world], in words: where the lengths for each rank begin
  int64_t* key = nullptr;         // [world], where the keys
  int64_t* place = nullptr;       // [world], in the answers
};

// targets: one for each feature that was cut, by number of the feature.
template <class Word>
void WritePieces(const Cpu& cpu, Scratch* scratch, const PieceCount& count, const PieceTarget* targets, Word* words);

}  // namespace sok
