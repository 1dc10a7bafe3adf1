// The work around the collectives of a lookup in many tables: which keys go to whom, how rows that came home become
// outputs, and how gradients become what goes back (docs/design/exchange.md).
//
// Answers are floats: one message per rank, each kAnswerHeader floats and then the rows asked of it, table by table,
// in the order in which the keys were sent. A *place* is where a row begins in them. Gradients have the same layout.
#pragma once

#include <cstdint>

#include "sok/combine.h"
#include "sok/device.h"
#include "sok/partition.h"
#include "sok/scratch.h"

namespace sok {

// One cache line, so that the rows behind it lie as they would without it.
inline constexpr int64_t kAnswerHeader = 16;

struct RouteTable {
  int64_t dim = 0;
  bool is_unsigned = false;
  uint64_t num_legal = 0;  // keys in [0, num_legal) are legal; 0: every key is
  int owner = kByKey;      // the rank of all keys; kByKey: each has its own
};

// The keys of one feature, in any of the four key dtypes.
struct RouteFeature {
  int table = 0;
  const void* keys = nullptr;  // [n], of 4 or 8 bytes
  bool is_wide = true;
  int64_t n = 0;
  int32_t* index = nullptr;  // [n], written: see RouteKeys
};

// What to send: for each rank r and table t, counts[r * num_tables + t] keys.
struct Route {
  bool is_legal = true;  // otherwise the key below is not, and there is nothing to send
  int bad_feature = 0;
  uint64_t bad_key = 0;
  int64_t num_keys = 0;             // distinct, of all tables
  const int64_t* counts = nullptr;  // [world, num_tables]
  const void* plan = nullptr;       // lives in scratch, for WriteRoute
};

// Finds each table's distinct keys, over all features of the table, and their owners. index is not final before
// WriteRoute. Throws InvalidArgument for 2^31 keys or more in one table, and for answers of 2^31 floats or more. Does not
// depend on the number of threads.
Route RouteKeys(const Cpu& cpu, Scratch* scratch, const RouteTable* tables, int num_tables,
                const RouteFeature* features, int num_features, int world);

// Writes the keys, and for each key of each feature where its row will lie in the answers:
//   index[i] = place, with the top bit set where no earlier key of the table (feature by feature) has that place.
// words: for each rank its message, of which this writes keys only: those of rank r begin at key_begin[r], table by
// table, in order of first appearance (tables of many keys: part by part, see exchange.cc). Word is int64_t or int32_t.
template <class Word>
void WriteRoute(const Cpu& cpu, Scratch* scratch, const Route& route, const int64_t* key_begin, Word* words);

inline constexpr int32_t kPlaceMask = 0x7fffffff;

// One output: pooled vectors, or the rows themselves.
struct PooledFeature {
  const int32_t* index = nullptr;       // [n], of RouteKeys
  const int64_t* row_splits = nullptr;  // [segments + 1]; null: every key is a segment
  const float* weights = nullptr;       // [n], or null
  int64_t n = 0;
  int64_t segments = 0;
  int64_t dim = 0;
  Combiner combiner = Combiner::kSum;
};

// Whether all rows of the feature lie inside `size` floats.
bool PlacesFit(const PooledFeature& feature, int64_t size);

// outputs[f]: [segments, dim], by the rules of combine.h. Repeats bit for bit.
void CombineAnswers(const Cpu& cpu, const float* answers, const PooledFeature* features, int num_features,
                    float* const* outputs);

// The gradient of CombineAnswers in the answers. grads[f]: [segments, dim]; packed [size] in the layout of the answers,
// where every row that the index names is written: no zeros are needed before. The features are those of RouteKeys, all
// of them in that order. Repeats bit for bit.
void CombineAnswersGrad(const Cpu& cpu, const PooledFeature* features, int num_features, const float* const* grads,
                        int64_t size, float* packed);

// The gradient of one output in its weights.
void CombineAnswersGradWeights(const Cpu& cpu, const float* answers, const PooledFeature& feature,
                               const float* grad,     // [segments, dim]
                               float* grad_weights);  // [n]

}  // namespace sok
