#include "sok/device_store.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "detail/check.h"
#include "detail/device_store_call.h"
#include "detail/held_rows.h"
#include "detail/records_to_host.h"
#include "detail/scratch.h"
#include "detail/slot_set.h"
#include "detail/table_state.h"
#include "sok/device_words.h"
#include "sok/error.h"
#include "sok/host_memory.h"

namespace sok {
namespace {

using State = DeviceTable::State;

// The table as it stands, for as long as this lives. Missed decay may have to be written down, which only a writer may do.
class Whole {
 public:
  Whole(State* state, const Cuda& cuda) {
    reading_.emplace(state, cuda);
    if (!state->HasDecay()) return;
    reading_.reset();
    writing_.emplace(state, cuda);
  }

 private:
  std::optional<TableReading> reading_;
  std::optional<TableWriting> writing_;
};

int64_t SlotsOf(const State& state, const State::SlotSet& set) { return set.rule.slot_floats(state.config.dim); }

}  // namespace

// Those of some keys that are this rank's, and the rows that were made for them.
struct DeviceStore::Placed {
  std::vector<uint64_t> keys;
  std::vector<int64_t> source;  // where they stood; empty: they are all
  const uint32_t* rows = nullptr;
};

DeviceStore::DeviceStore(TableConfig config, int64_t budget_bytes, int64_t rows_at_a_time, HostBytes host_bytes,
                         std::unique_ptr<DeviceAllocator> owner)
    : owner_(std::move(owner)),
      table_(std::make_unique<DeviceTable>(std::move(config), budget_bytes, owner_.get())),
      stream_(std::make_unique<Stream>()),
      rows_at_a_time_(std::max<int64_t>(1, rows_at_a_time)),
      host_bytes_(host_bytes == nullptr ? AvailableHostBytes : host_bytes) {}
DeviceStore::~DeviceStore() = default;

void DeviceStore::HoldCopies() {
  State& state = *table_->state();
  state.holds_copies = true;
  state.index->TakeNoSpareRows();
}

int64_t DeviceStore::size() const {
  Call call(*this);
  table_->ThrowIfBadToHost(call.cuda);
  return table_->SizeToHost(call.cuda);
}

int64_t DeviceStore::memory_bytes() const { return table_->memory_bytes(); }

PolicyCounts DeviceStore::policy_counts() const {
  PolicyCounts counts;
  counts.made = size() + gone_;
  return counts;
}

void DeviceStore::Reserve(const Cpu&, int64_t n, bool rows) {
  Call call(*this);
  table_->Reserve(call.cuda, n, rows);
}

void DeviceStore::CheckKeys(const uint64_t* keys, int64_t n) const {
  if (config().hashed) return;
  for (int64_t i = 0; i < n; ++i) config().CheckKey(keys[i]);
}

// ---- out

void DeviceStore::VisitRows(
    Call* call, const RowFilter& filter,
    const std::function<void(const uint64_t* keys, const uint32_t* rows, int64_t n)>& visit) const {
  State& state = call->state;
  for (int64_t first = 0; first < state.num_rows(); first += rows_at_a_time_) {
    const int64_t count = std::min(rows_at_a_time_, state.num_rows() - first);
    call->scratch.Reset();
    // Bytes of marks are looked at before the whole index is.
    const bool is_any =
        filter.marks == nullptr || state.changes.CountToHost(call->cuda, &call->scratch, filter, first, count) > 0;
    if (!is_any) continue;
    auto* keys = call->scratch.Get<uint64_t>(count);
    auto* rows = call->scratch.Get<uint32_t>(count);
    uint32_t n = 0;
    CopyToHost(call->cuda, &n, state.List(call->cuda, &call->scratch, first, count, keys, rows, filter), sizeof(n));
    state.Settle(call->cuda, &call->scratch, rows, n);
    if (n > 0) visit(keys, rows, n);
  }
}

std::vector<uint64_t> DeviceStore::Keys() const {
  std::vector<uint64_t> words;
  Export({SerialExecutor()}, "", [&](int64_t n, int64_t) {
    words.resize(static_cast<size_t>(n));
    return ExportTarget{words.data(), nullptr, nullptr, nullptr};
  });
  return words;
}

void DeviceStore::Export(const Cpu&, const std::string& slot_set,
                         const std::function<ExportTarget(int64_t, int64_t)>& allocate) const {
  Call call(*this);
  table_->ThrowIfBadToHost(call.cuda);
  const Whole whole(&call.state, call.cuda);
  const State::SlotSet* set = slot_set.empty() ? nullptr : &call.state.RequireSet(slot_set);
  const int64_t floats = set == nullptr ? 0 : SlotsOf(call.state, *set);
  const ExportTarget to = allocate(call.state.CountToHost(call.cuda), floats);
  int64_t at = 0;
  VisitRows(&call, {}, [&](const uint64_t* keys, const uint32_t* rows, int64_t n) {
    if (to.keys != nullptr) CopyToHost(call.cuda, to.keys + at, keys, n * int64_t{sizeof(uint64_t)});
    if (to.rows != nullptr) {
      RecordsToHost(call.cuda, &call.stage, call.state.rows.view(), rows, n, 0, dim(), to.rows + at * dim());
    }
    if (to.slots != nullptr) {
      RecordsToHost(call.cuda, &call.stage, call.state.rows.view(), rows, n, set->offset, floats,
                    to.slots + at * floats);
    }
    if (to.stamps != nullptr) std::fill_n(to.stamps + at, n, set->decay == nullptr ? -1 : set->decay->calls());
    at += n;
  });
}

int64_t DeviceStore::SlotFloats(const std::string& slot_set) const { return table_->SlotFloats(slot_set); }

void DeviceStore::Slots(const std::string& slot_set, const uint64_t* keys, int64_t n, float* slots,
                        int64_t* stamps) const {
  CheckKeys(keys, n);
  Call call(*this);
  call.state.CheckCount(n);
  const Whole whole(&call.state, call.cuda);
  const State::SlotSet& set = call.state.RequireSet(slot_set);
  auto* words = call.scratch.Get<uint64_t>(n);
  auto* rows = call.scratch.Get<uint32_t>(n);
  CopyToDevice(call.cuda, words, keys, n * int64_t{sizeof(uint64_t)});
  call.state.FindRows(call.cuda, words, n, false, false, rows, nullptr, nullptr);
  std::vector<uint32_t> found(static_cast<size_t>(n));
  CopyToHost(call.cuda, found.data(), rows, n * int64_t{sizeof(uint32_t)});
  for (int64_t i = 0; i < n; ++i) {
    if (found[static_cast<size_t>(i)] < kBadRow) continue;
    throw InvalidArgument(Label() + ": key " + config().KeyText(keys[i]) + " has no row.");
  }
  call.state.Settle(call.cuda, &call.scratch, rows, n);
  RecordsToHost(call.cuda, &call.stage, call.state.rows.view(), rows, n, set.offset, SlotsOf(call.state, set), slots);
  std::fill_n(stamps, n, set.decay == nullptr ? -1 : set.decay->calls());
}

std::vector<TableStore::SlotSetInfo> DeviceStore::SetsOf(const State& state) {
  std::vector<SlotSetInfo> sets;
  for (const auto& set : state.sets)
    sets.push_back({set->name, set->rule, set->decay == nullptr ? 0 : set->decay->calls(), {}});
  return sets;
}

std::vector<TableStore::SlotSetInfo> DeviceStore::SlotSets() const {
  State& state = *table_->state();
  const std::shared_lock<std::shared_mutex> lock(state.mutex);
  return SetsOf(state);
}

void DeviceStore::ReadAll(const Cpu&, RowSink* sink) const {
  Call call(*this);
  table_->ThrowIfBadToHost(call.cuda);
  const Whole whole(&call.state, call.cuda);
  ReadRows(&call, sink, /*changes=*/false);
}

void DeviceStore::ReadRows(Call* call, RowSink* sink, bool changes) const {
  State& state = call->state;
  std::vector<SlotSetInfo> infos = SetsOf(state);
  for (size_t s = 0; s < infos.size(); ++s) {
    State::SlotSet& set = *state.sets[s];
    if (set.decay == nullptr) continue;
    if (changes) infos[s].missed = set.decay->RunsAfter(set.calls_at_base);
    if (state.changes.is_saving() && !state.has_snapshot) set.calls_read = set.decay->calls();
  }
  const int64_t rows_per_batch = sink->Begin(state.CountToHost(call->cuda), infos);
  if (changes) sink->Erased(GoneKeys(call));
  const RowFilter filter = changes ? state.changes.saved() : RowFilter{};
  VisitRows(call, filter, [&](const uint64_t* keys, const uint32_t* rows, int64_t n) {
    for (int64_t at = 0; at < n; at += rows_per_batch) {
      const int64_t count = std::min(rows_per_batch, n - at);
      const RowTarget to = sink->Allocate(count);
      CopyToHost(call->cuda, to.keys, keys + at, count * int64_t{sizeof(uint64_t)});
      RecordsToHost(call->cuda, &call->stage, state.rows.view(), rows + at, count, 0, dim(), to.rows);
      for (size_t s = 0; s < state.sets.size(); ++s) {
        const State::SlotSet& set = *state.sets[s];
        const int64_t floats = SlotsOf(state, set);
        if (floats == 0) continue;
        RecordsToHost(call->cuda, &call->stage, state.rows.view(), rows + at, count, set.offset, floats, to.slots[s]);
      }
      sink->Commit();
    }
  });
}

// ---- in

DeviceStore::Placed DeviceStore::Place(Call* call, const uint64_t* keys, int64_t n, bool notes) {
  Placed placed;
  for (int64_t i = 0; i < n; ++i) {
    if (config().partition().OwnerOf(keys[i]) != config().rank) continue;
    placed.keys.push_back(keys[i]);
    placed.source.push_back(i);
  }
  const auto count = static_cast<int64_t>(placed.keys.size());
  if (count == n) placed.source = {};
  call->state.CheckCount(count);
  auto* words = call->scratch.Get<uint64_t>(count);
  auto* rows = call->scratch.Get<uint32_t>(count);
  CopyToDevice(call->cuda, words, placed.keys.data(), count * int64_t{sizeof(uint64_t)});
  call->state.Place(call->cuda, &call->scratch, words, count, rows, notes);
  placed.rows = rows;
  return placed;
}

void DeviceStore::Store(Call* call, const Placed& placed, int64_t first, int64_t floats, const float* values,
                        int64_t stride) {
  const auto n = static_cast<int64_t>(placed.keys.size());
  if (n == 0 || floats == 0) return;
  const int64_t at_a_time = std::min(n, StageRows(floats));
  call->stage.Reset();
  auto* stage = call->stage.Get<float>(at_a_time * floats);
  const bool is_packed = placed.source.empty() && stride == floats;
  std::vector<float> packed(is_packed ? 0 : static_cast<size_t>(at_a_time * floats));
  for (int64_t at = 0; at < n; at += at_a_time) {
    const int64_t count = std::min(at_a_time, n - at);
    const float* from = values + at * floats;
    if (!is_packed) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t source = placed.source.empty() ? at + i : placed.source[static_cast<size_t>(at + i)];
        std::copy_n(values + source * stride, floats, packed.data() + i * floats);
      }
      from = packed.data();
    }
    CopyToDevice(call->cuda, stage, from, count * floats * int64_t{sizeof(float)});
    ScatterRecords(call->cuda, call->state.rows.view(), placed.rows + at, count, first, floats, stage);
  }
}

void DeviceStore::Assign(const Cpu&, Scratch*, const uint64_t* keys, const float* rows, int64_t n) {
  CheckKeys(keys, n);
  Call call(*this);
  const TableWriting writing(&call.state, call.cuda);
  TakeStage(&call.stage, n, dim());
  Store(&call, Place(&call, keys, n), 0, dim(), rows, dim());
  // The caller's memory may be pinned, and is read until now.
  SOK_CUDA(cudaStreamSynchronize(call.cuda.stream));
}

int64_t DeviceStore::Restore(const Cpu&, Scratch*, const std::vector<SlotSetInfo>& infos, const RowValues& values) {
  CheckKeys(values.keys, values.n);
  Call call(*this);
  State& state = call.state;
  const TableWriting writing(&state, call.cuda);
  state.CheckRules(infos);
  std::vector<const State::SlotSet*> sets;
  for (const SlotSetInfo& info : infos) {
    const State::SlotSet* known = state.FindSet(info.name);
    sets.push_back(known != nullptr ? known : state.FindOrAttach(call.cuda, info.rule, info.name));
  }
  const int64_t rows_before = state.CountToHost(call.cuda);
  const Columns columns = values.columns.dim > 0 ? values.columns : Columns{dim(), 0, 0, dim()};
  int64_t floats = columns.n;
  for (const SlotSetInfo& info : infos) floats = std::max(floats, info.rule.slot_floats(columns.dim));
  TakeStage(&call.stage, values.n, floats);
  const bool notes = values.changed == nullptr ||
                     std::find(values.changed, values.changed + values.n, true) != values.changed + values.n;
  const Placed placed = Place(&call, values.keys, values.n, notes);
  Store(&call, placed, columns.to, columns.n, values.rows + columns.from, columns.dim);
  for (size_t s = 0; s < sets.size(); ++s) {
    const int64_t vectors = values.columns.dim > 0 ? infos[s].rule.slots().vectors : 0;  // whole ones all at once
    const int64_t stride = infos[s].rule.slot_floats(columns.dim), behind = vectors * columns.dim;
    for (int64_t k = 0; k < vectors; ++k) {
      const int64_t to = sets[s]->offset + k * dim() + columns.to;
      Store(&call, placed, to, columns.n, values.slots[s] + k * columns.dim + columns.from, stride);
    }
    Store(&call, placed, sets[s]->offset + vectors * dim(), stride - behind, values.slots[s] + behind, stride);
  }
  return state.CountToHost(call.cuda) - rows_before;  // waits: the caller's memory may be pinned
}

void DeviceStore::SkipCalls(const std::string& save, const std::vector<SlotSetInfo>& sets) {
  Call call(*this);
  const TableWriting writing(&call.state, call.cuda);
  call.state.SkipCalls(call.cuda, save, sets);
}

int64_t DeviceStore::Erase(const uint64_t* keys, int64_t n) {
  CheckKeys(keys, n);
  Call call(*this);
  call.state.CheckCount(n);
  const TableWriting writing(&call.state, call.cuda);
  auto* words = call.scratch.Get<uint64_t>(n);
  CopyToDevice(call.cuda, words, keys, n * int64_t{sizeof(uint64_t)});
  const int64_t rows_before = call.state.CountToHost(call.cuda);
  call.state.Erase(call.cuda, &call.scratch, words, n);
  const int64_t erased = rows_before - call.state.CountToHost(call.cuda);
  gone_ += erased;
  return erased;
}

std::vector<int64_t> DeviceStore::RowIds(const uint64_t* keys, int64_t n) const {
  Call call(*this);
  call.state.CheckCount(n);
  auto* words = call.scratch.Get<uint64_t>(n);
  auto* ids = call.scratch.Get<int64_t>(n);
  CopyToDevice(call.cuda, words, keys, n * int64_t{sizeof(uint64_t)});
  table_->Lookup(call.cuda, &call.scratch, words, n, /*insert=*/false, nullptr, ids);
  std::vector<int64_t> found(static_cast<size_t>(n));
  CopyToHost(call.cuda, found.data(), ids, n * int64_t{sizeof(int64_t)});
  return found;
}

void DeviceStore::Swap(TableStore* with) {
  auto* other = dynamic_cast<DeviceStore*>(with);
  if (other == nullptr) {
    throw InvalidArgument(Label() + " is on a device, and " + with->Label() +
                          " in the memory of this process: they cannot swap rows.");
  }
  Call call(*this);
  const int64_t more = table_->SizeToHost(call.cuda) - other->table_->SizeToHost(call.cuda);
  table_->Swap(call.cuda, other->table_.get());
  gone_ += more;
  other->gone_ -= more;
}

// ---- saving by changes

std::vector<uint64_t> DeviceStore::GoneKeys(Call* call) const {
  const std::vector<uint64_t> keys = call->state.changes.Erased();
  std::vector<uint64_t> gone;
  std::vector<uint32_t> found;
  for (size_t at = 0; at < keys.size(); at += static_cast<size_t>(rows_at_a_time_)) {
    const int64_t n = std::min(rows_at_a_time_, static_cast<int64_t>(keys.size() - at));
    call->scratch.Reset();
    auto* words = call->scratch.Get<uint64_t>(n);
    auto* rows = call->scratch.Get<uint32_t>(n);
    found.resize(static_cast<size_t>(n));
    CopyToDevice(call->cuda, words, keys.data() + at, n * int64_t{sizeof(uint64_t)});
    call->state.FindRows(call->cuda, words, n, false, false, rows, nullptr, nullptr);
    CopyToHost(call->cuda, found.data(), rows, n * int64_t{sizeof(uint32_t)});
    for (size_t i = 0; i < found.size(); ++i)
      if (found[i] == HashTable::kNoRow) gone.push_back(keys[at + i]);
  }
  return gone;
}

void DeviceStore::ReadChanges(const Cpu&, RowSink* sink) const {
  Call call(*this);
  table_->ThrowIfBadToHost(call.cuda);
  const Whole whole(&call.state, call.cuda);
  if (!call.state.changes.is_saving() || call.state.changes.base().empty()) RefuseChanges();
  ReadRows(&call, sink, /*changes=*/true);
}

void DeviceStore::RefuseChanges() const {
  throw FailedPrecondition(Label() + ": there is no save that its changes could be counted from.");
}

void DeviceStore::BeginSave(SnapshotOf snapshot) {
  Call call(*this);
  State& state = call.state;
  if (snapshot != SnapshotOf::kNothing) table_->ThrowIfBadToHost(call.cuda);
  {
    const TableWriting writing(&state, call.cuda);
    if (snapshot_) {
      throw FailedPrecondition(Label() + ": an asynchronous save is under way. Wait for its result first.");
    }
    if (snapshot == SnapshotOf::kChanges && state.changes.base().empty()) RefuseChanges();
    try {
      state.changes.Begin(call.cuda, state.rows.num_rows());
    } catch (const OutOfMemory&) {
      // Nothing is noted: all rows can be saved, now and later, but not what has changed alone.
    }
    for (const auto& set : state.sets)
      if (set->decay != nullptr) set->calls_read = set->decay->calls();
  }
  if (snapshot == SnapshotOf::kNothing) return;
  try {
    auto held = std::make_unique<HeldRows>(dim());
    {
      const Whole whole(&state, call.cuda);
      CheckHostMemory(&call, snapshot == SnapshotOf::kChanges);
      ReadRows(&call, held.get(), snapshot == SnapshotOf::kChanges);
    }
    const TableWriting writing(&state, call.cuda);
    state.has_snapshot = true;
    snapshot_ = std::move(held);
  } catch (const std::bad_alloc&) {
    ForgetSave(&call);
    throw OutOfMemory(Label() + ": no memory for an asynchronous save, which copies its rows to the host.");
  } catch (...) {
    ForgetSave(&call);
    throw;
  }
}

// Memory that is asked for is often given, and missed only when it is written to, which ends the process: so it is counted
// before. Several workers of a machine may all count on the same.
void DeviceStore::CheckHostMemory(Call* call, bool changes) const {
  const State& state = call->state;
  int64_t floats = dim();
  for (const auto& set : state.sets) floats += SlotsOf(state, *set);
  call->scratch.Reset();
  const int64_t rows =
      changes ? state.changes.CountToHost(call->cuda, &call->scratch, state.changes.saved(), 0, state.num_rows())
              : state.CountToHost(call->cuda);
  const int64_t bytes = rows * (int64_t{sizeof(uint64_t)} + floats * int64_t{sizeof(float)}), available = host_bytes_();
  if (bytes <= available) return;
  throw OutOfMemory(Label() + ": no memory for an asynchronous save, which copies its rows to the host: " +
                    std::to_string(bytes) + " bytes, and " + std::to_string(available) +
                    " are available. Save without `asynchronous`, or what has changed alone (`incremental`).");
}

void DeviceStore::ForgetSave(Call* call) {
  const TableWriting writing(&call->state, call->cuda);
  call->state.changes.End(call->cuda, "");
}

void DeviceStore::EndSave(const std::string& base) {
  std::shared_ptr<HeldRows> gone;  // not under the locks: much memory takes a while to give back
  Call call(*this);
  const TableWriting writing(&call.state, call.cuda);
  if (call.state.changes.is_saving() && !base.empty()) {
    for (const auto& set : call.state.sets) set->calls_at_base = set->calls_read;
  }
  call.state.changes.End(call.cuda, base);
  call.state.has_snapshot = false;
  gone = std::move(snapshot_);
}

void DeviceStore::ReadSnapshot(const Cpu&, RowSink* sink) {
  // Ours too until it is read, whatever EndSave does. The device has no part in it.
  const std::shared_ptr<HeldRows> held = [this] {
    const std::lock_guard<std::mutex> lock(stream_->mutex);
    if (snapshot_ && snapshot_->IsFirst()) return snapshot_;
    throw FailedPrecondition(Label() + ": there is no snapshot to read.");
  }();
  held->GiveTo(sink);
}

TableStore::ChangeInfo DeviceStore::Changes() const {
  Call call(*this);
  const State& state = call.state;
  const TableReading reading(&call.state, call.cuda);
  ChangeInfo info;
  info.is_on = state.changes.is_on();
  info.base = state.changes.base();
  info.rows = state.changes.CountToHost(call.cuda, &call.scratch);
  info.erased = state.changes.num_erased();
  info.copied_bytes = snapshot_ ? snapshot_->bytes() : 0;
  info.sets = SetsOf(state);
  for (size_t s = 0; s < info.sets.size(); ++s) {
    const State::SlotSet& set = *state.sets[s];
    if (set.decay != nullptr) info.sets[s].missed = set.decay->RunsAfter(set.calls_at_base);
  }
  return info;
}

}  // namespace sok
