// The work around the collectives of a lookup in many tables: which keys go to whom, how rows that came home become
// outputs, and how gradients become what goes back (docs/design/exchange.md).
//
// Answers are floats: one message per rank, each kAnswerHeader floats and then the rows asked of it, in the order in which
// they were asked for. A *place* is where a row begins in them. Gradients have the same layout.
//
// Of a table that each rank has a copy of, keys and gradients go to all ranks, and rows come from the asker's own copy
// alone. They are the last in a message, so that gradients for another rank are its answer's and then those of the copies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sok/combine.h"
#include "sok/device.h"
#include "sok/partition.h"
#include "sok/scratch.h"

namespace sok {

// One cache line, so that the rows behind it lie as they would without it.
inline constexpr int64_t kAnswerHeader = 16;

// How the rows of a table come home to the rank that asks. Results are the same, up to the order of sums.
enum class WayHome {
  kAuto,  // whichever moves less
  kRows,  // each distinct key's row once, pooled by the asker
  kSums,  // pooled by their owners: one row per piece, which is what one rank owns of one segment
};

// Throws InvalidArgument for anything but "auto", "rows", "sums".
WayHome ParseWayHome(const std::string& name);

struct RouteTable {
  int64_t dim = 0;
  bool is_unsigned = false;
  uint64_t num_legal = 0;  // keys in [0, num_legal) are legal; 0: every key is
  int owner = kByKey;      // the rank of all keys; kByKey, kByHash: each has its own
  WayHome way = WayHome::kAuto;
  int value_bytes = 4;     // what an element of a row takes while it travels
  bool is_copy = false;    // `owner` has a copy of rows that all ranks have
  bool comes_home = true;  // false: of such a copy of another rank, from which no row comes
};

// The keys of one feature, in any of the four key dtypes.
struct RouteFeature {
  int table = 0;
  const void* keys = nullptr;  // [n], of 4 or 8 bytes
  bool is_wide = true;
  int64_t n = 0;
  int32_t* index = nullptr;             // [n], written: see WriteRoute
  const int64_t* row_splits = nullptr;  // [segments + 1] if it is pooled without weights; null: it comes by rows
  int64_t segments = 0;
  Combiner combiner = Combiner::kSum;  // with row_splits
};

// What to send. Every message names, and every answer holds, first the keys of each table that come by rows, then piece
// by piece those of each feature that comes by sums. `counts` has a line for each rank: for each table how many keys by
// rows, then for each feature two numbers, pieces and the keys in them.
struct Route {
  bool is_legal = true;  // otherwise the key below is not, and there is nothing to send
  int bad_feature = 0;
  uint64_t bad_key = 0;
  const int64_t* counts = nullptr;  // [world, CountsPerRank(num_tables, num_features)]
  const int64_t* words = nullptr;   // [world], of the message behind its counts
  const int64_t* floats = nullptr;  // [world], of the answer; rows that do not come home are not in it
  const int64_t* pieces = nullptr;  // [num_features], on all ranks; kByRows for a feature that comes by rows
  const void* plan = nullptr;       // lives in scratch, for WriteRoute
};

inline constexpr int64_t kByRows = -1;

inline int64_t CountsPerRank(int64_t num_tables, int64_t num_features) { return num_tables + 2 * num_features; }

// Finds owners, and each table's distinct keys over all features that come by rows. The choice between rows and sums
// depends on the batch alone. index is not final before WriteRoute. Throws InvalidArgument for 2^31 keys or more in
// one table, for messages of 2^31 words or more and answers of 2^31 floats or more. Does not depend on the number of threads.
Route RouteKeys(const Cpu& cpu, Scratch* scratch, const RouteTable* tables, int num_tables,
                const RouteFeature* features, int num_features, int world, int word_bytes);

// Where the pieces of a feature that comes by sums are written.
struct RoutedPieces {
  int64_t* row_splits = nullptr;  // [segments + 1], of pieces
  float* scales = nullptr;        // [pieces]: what the combiner multiplies sums with; null: not wanted
};

// Writes the keys, and where the rows will lie in the answers. For a feature by rows, for each of its keys
//   index[i] = place, with the top bit set where no key before it has that place. Of the features of a table those
//              without row_splits come first, then those with; each in order. Of a table whose rows do not come home
//              places say nothing.
// For a feature by sums, for each of its pieces, segment after segment
//   index[p] = place, with the top bit set.
// words: for each rank its message, of which this writes what is behind the counts: at word_begin[r]. First the keys by rows,
// table by table, in order of first appearance (tables of many keys: part by part, see exchange.cc); then feature by
// feature the number of keys in each piece, and all these keys. Word is int64_t or int32_t.
template <class Word>
void WriteRoute(const Cpu& cpu, Scratch* scratch, const Route& route, const int64_t* word_begin, Word* words,
                const RoutedPieces* pieces);  // [num_features]; null if nothing comes by sums

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
// of them in that order; pooled ones have no weights if RouteKeys had their row_splits, but for the scales of a feature by
// sums. Repeats bit for bit.
void CombineAnswersGrad(const Cpu& cpu, const PooledFeature* features, int num_features, const float* const* grads,
                        int64_t size, float* packed);

// The gradient of one output in its weights.
void CombineAnswersGradWeights(const Cpu& cpu, const float* answers, const PooledFeature& feature,
                               const float* grad,     // [segments, dim]
                               float* grad_weights);  // [n]

// ---- On a device

// A route of keys that lie on a device: all by rows, whatever the tables' ways. What of it the host knows, and what is there.
struct DeviceRoute {
  bool is_legal = true;  // otherwise the key below is not, and there is nothing to send
  int bad_feature = 0;
  uint64_t bad_key = 0;
  std::vector<int64_t> begin;  // [world * num_tables + 1]: where, among all distinct keys, those of (rank, table) begin
  // On the device, in scratch, for WriteRouteToHost.
  const uint64_t* keys = nullptr;   // [n] of all features, those without row_splits first, each in order
  const uint32_t* cells = nullptr;  // [n] ascending: rank * num_tables + table of the distinct keys; then of no cell
  const uint32_t* positions = nullptr;  // [n] where those keys lie
  const uint32_t* leaders = nullptr;    // [n] the first position that holds the same key
};

// Finds owners and each table's distinct keys. `tables` and `features` are host memory; of features the keys and the index are
// device memory, and of row_splits it is only looked at whether there are some. Waits for the stream. Throws InvalidArgument for
// 2^31 - 1 keys or more.
DeviceRoute RouteKeysToHost(const Cuda& cuda, DeviceScratch* scratch, const RouteTable* tables, int num_tables,
                            const RouteFeature* features, int num_features, int world);

// Writes the index of each feature as WriteRoute does, and gives the host the distinct keys, rank after rank and table after
// table, each in order of first appearance. Waits for the stream.
void WriteRouteToHost(const Cuda& cuda, DeviceScratch* scratch, const DeviceRoute& route, const RouteTable* tables,
                      int num_tables, const RouteFeature* features, int num_features,
                      const int64_t* places,  // [world * num_tables] host memory: where rows of (rank, table) will lie
                      uint64_t* keys);        // [route.begin.back()] host memory

// Combining, the same three. Whatever a PooledFeature, `grads` and `outputs` point to is device memory; the structs themselves and the
// arrays of pointers are host memory, read before the call returns. Nothing waits. Rows outside of the `size` floats read
// as zeros, and their gradients are left out. CombineAnswers has the CPU's bits. CombineAnswersGrad adds in another order
// (SumRows on a device), the same in every run; it zeros `packed`, and the features may be any.
void CombineAnswers(const Cuda& cuda, DeviceScratch* scratch, const float* answers, int64_t size,
                    const PooledFeature* features, int num_features, float* const* outputs);
void CombineAnswersGrad(const Cuda& cuda, DeviceScratch* scratch, const PooledFeature* features, int num_features,
                        const float* const* grads, int64_t size, float* packed);
void CombineAnswersGradWeights(const Cuda& cuda, DeviceScratch* scratch, const float* answers, int64_t size,
                               const PooledFeature& feature, const float* grad, float* grad_weights);

// The first two floats of each answer: status, and bytes of text. begin and headers are host memory. Waits for the stream.
void AnswerHeadersToHost(const Cuda& cuda, DeviceScratch* scratch, const float* answers,
                         const int64_t* begin,  // [world], inside the answers
                         int64_t world,
                         float* headers);  // [world, 2]

}  // namespace sok
