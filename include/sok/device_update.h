// Optimizer rules on a device: rows of tables change in place, by the elements of sparse_update.h and adam_decay.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sok/adam_decay.h"
#include "sok/device.h"
#include "sok/device_rows.h"
#include "sok/first_bad.h"
#include "sok/float_type.h"
#include "sok/scratch.h"
#include "sok/sparse_update.h"

namespace sok {

class DeviceMemory;

// What a kernel needs to bring rows over the calls of a decaying rule that they missed.
struct DecayArgs {
  uint32_t* stamps =
      nullptr;        // [num_rows] on the device: the call up to which a row is current; null: the rule does not decay
  int64_t calls = 0;  // so far
  float max_alpha = 0.0f;
  bool is_closed_form = false;  // else missed steps are replayed one by one
  DecayView view = {};          // its pointers are device memory
};

// One table of an update.
struct DeviceUpdate {
  DeviceRows rows;          // records: [weights | ... | slots of the rule], slots from slot_offset on
  int64_t num_rows = 0;     // row ids are below
  int64_t slot_offset = 0;  // in floats
  DecayArgs decay;
  RowNotes notes;  // of the rows that the rule is applied to
  // Of a table that counts erasures, the upper half of each row's id (DeviceTable): a gradient whose id has a lower one is
  // passed over. Null: row ids are row numbers.
  const uint32_t* erasures = nullptr;  // [num_erasures]
  int64_t num_erasures = 0;
  TableBad* bad = nullptr;  // keeps the first gradient that UpdateRows found bad; or null
};

// Gradients of an update: of one table, or of several mixed.
struct DeviceGradients {
  const int64_t* row_ids = nullptr;  // [n]
  const void* values = nullptr;      // [n, dim]
  int64_t n = 0;
  const int64_t* num = nullptr;  // [1] on the device: how many of the n there are; null: all
  int64_t dim = 0;
  const int32_t* tables = nullptr;  // [n]: the table of each; null: all are of `table`
  int64_t table = 0;
  uint64_t* first_bad = nullptr;  // [1], set to kNothingBad; or null
};

// Applies the rule once per row, in one launch for any number of tables, stretches of gradients, and dims. Row ids of a table
// must be distinct (SumRows gives them so), else results are undefined but no memory outside is touched. A negative row id
// is skipped; one that its table does not have too, and its position is reported. A gradient is multiplied with `grad_scale`
// first (the inverse of a loss scale). Nothing waits. `updates` and `gradients` are host memory, read before the call
// returns.
//
// A scaled gradient that holds a NaN or an infinity: kAllow lets it through; kSkip leaves the row as it is; kRaise leaves
// every row of every table as it is and reports the position, for the caller to see when it wants to (ThrowIfBadToHost).
// With a decaying rule, DeviceDecay::Begin gives each table's `decay`, and Append must follow on the same stream;
// who uses kRaise looks at `refused` in between, or a refused call counts as one without gradients.
// Throws InvalidArgument: dim below 1; gradients of a table that is not there; a table without stamps under a decaying
// rule; kRaise without `refused`.
void UpdateRows(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule,
                const DeviceUpdate* updates,  // [num_tables]
                int64_t num_tables,
                const DeviceGradients* gradients,  // [num_gradients]
                int64_t num_gradients, FloatType type, float grad_scale, Nonfinite nonfinite,
                uint64_t* refused);  // [1], set to kNothingBad: lowered if kRaise refuses the call; or null

// The same for one stretch of gradients, that is refused where it is bad.
void UpdateRows(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule,
                const DeviceUpdate* updates,  // [num_tables]
                int64_t num_tables,
                const int32_t* tables,   // [n]: the table of each gradient; null: all are of the first
                const int64_t* row_ids,  // [n]
                const void* grads,       // [n, dim] of `type`
                FloatType type, int64_t n,
                const int64_t* num_grads,  // [1] on the device: how many of the n there are; null: all
                int64_t dim, float grad_scale, Nonfinite nonfinite,
                uint64_t* first_bad);  // [1], set to kNothingBad; or null

// Brings the rows up to the last call of a decaying rule, for a lookup to read. Row ids may come more than once; those that
// the table does not have are left out. Nothing waits.
void SettleRows(const Cuda& cuda, const UpdateRule& rule, const DeviceUpdate& update,
                const int64_t* row_ids,  // [n]
                int64_t n, int64_t dim);

// Waits for the stream. Throws InvalidArgument naming the position and its row id if first_bad says so.
void ThrowIfBadToHost(const Cuda& cuda, const uint64_t* first_bad, const int64_t* row_ids, int64_t n);

// The calls of a decaying rule on one table so far: on the host, with a copy on the device. The caller keeps the stamps.
// Not thread-safe; all calls are put on streams in order of each other.
class DeviceDecay {
 public:
  // memory: whose budget the copy is part of; null: nobody's.
  explicit DeviceDecay(DeviceMemory* memory = nullptr);
  ~DeviceDecay();  // waits for the device
  DeviceDecay(const DeviceDecay&) = delete;
  DeviceDecay& operator=(const DeviceDecay&) = delete;

  // What UpdateRows needs for the next call, which will be by this rule. stamps: [num_rows] on the device, zeros for fresh
  // rows. Throws InvalidArgument for a rule that does not decay, OutOfMemory.
  DecayArgs Begin(const Cuda& cuda, const UpdateRule& rule, uint32_t* stamps);

  // That call has been put on the stream. Work that was put there before sees the history as it was. Begin took what it needs.
  void Append(const Cuda& cuda);

  // Many calls by a rule of the same kind have been applied elsewhere: those of the runs, up to `calls` in their counting.
  // Throws InvalidArgument for a rule that does not decay, OutOfMemory.
  void Append(const Cuda& cuda, const UpdateRule& rule, const std::vector<AlphaHistory::Run>& runs, int64_t calls);

  // What SettleRows needs, until the next Begin or Append. At least one call must have been appended.
  DecayArgs args(uint32_t* stamps) const;

  // What it takes belongs to this memory from now on, which has been swapped with the one before.
  void MoveTo(DeviceMemory* memory);

  int64_t calls() const { return history_.calls(); }
  // As of AlphaHistory.
  std::vector<AlphaHistory::Run> RunsAfter(int64_t calls) const { return history_.RunsAfter(calls); }

 private:
  struct Memory;
  // The next calls are by this rule. Whether the sums were made anew.
  bool SetRule(const UpdateRule& rule, bool anew);
  void Upload(const Cuda& cuda);

  UpdateRule rule_;  // of the last Begin
  bool has_rule_ = false;
  AlphaHistory history_;
  std::unique_ptr<DecaySums> sums_;  // null: these betas need step by step replay
  std::unique_ptr<Memory> memory_;
};

}  // namespace sok
