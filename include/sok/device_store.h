// A DeviceTable as a TableStore: what is not a lookup or an update, with pointers to the memory of this process. Works on
// a stream of its own, through buffers of bounded size, and has happened when a call returns.
//
// What lookups and updates found bad and could not say then (DeviceTable::ThrowIfBadToHost) is thrown by the next size, Keys,
// Export, ReadAll, ReadChanges or BeginSave with a snapshot. With a decaying rule, reading rows settles them where they are.
//
// From the first BeginSave on a byte a row notes what changes; if the table's budget has no room for that, nothing is noted,
// and its changes cannot be saved alone. A snapshot is a copy of its rows in the memory of this process, which BeginSave
// makes: it returns when all are there, and throws OutOfMemory before it copies any if the system has no room for them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sok/device_table.h"
#include "sok/table_store.h"

namespace sok {

class HeldRows;

class DeviceStore final : public TableStore {
 public:
  // How many bytes this process may still take.
  using HostBytes = int64_t (*)();

  // As DeviceTable's constructor, on the current device; the store keeps the owner alive. rows_at_a_time: how many rows are listed, on the device, for one
  // pass over the index: 40 bytes each.
  // host_bytes: for tests; null: as the system says it.
  DeviceStore(TableConfig config, int64_t budget_bytes, int64_t rows_at_a_time = int64_t{1} << 20,
              HostBytes host_bytes = nullptr, std::unique_ptr<DeviceAllocator> owner = nullptr);
  ~DeviceStore() override;

  DeviceTable& table() { return *table_; }

  // Of a hashed table that is still empty: its rows are copies of what somebody else has, who takes as many as there is memory for, and
  // makes room for others by Erase, which needs no more of it.
  void HoldCopies();

  const TableConfig& config() const override { return table_->config(); }
  int64_t size() const override;
  std::vector<uint64_t> Keys() const override;
  void Export(const Cpu& cpu, const std::string& slot_set,
              const std::function<ExportTarget(int64_t n, int64_t slot_floats)>& allocate) const override;
  int64_t SlotFloats(const std::string& slot_set) const override;
  void Slots(const std::string& slot_set, const uint64_t* keys, int64_t n, float* slots,
             int64_t* stamps) const override;
  void Assign(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const float* rows, int64_t n) override;
  std::vector<SlotSetInfo> SlotSets() const override;
  void ReadAll(const Cpu& cpu, RowSink* sink) const override;
  void BeginSave(SnapshotOf snapshot) override;
  void EndSave(const std::string& base) override;
  void ReadSnapshot(const Cpu& cpu, RowSink* sink) override;
  void ReadChanges(const Cpu& cpu, RowSink* sink) const override;
  void SkipCalls(const std::string& save, const std::vector<SlotSetInfo>& sets) override;
  ChangeInfo Changes() const override;
  int64_t Restore(const Cpu& cpu, Scratch* scratch, const std::vector<SlotSetInfo>& sets,
                  const RowValues& values) override;
  void Swap(TableStore* other) override;
  void Reserve(const Cpu& cpu, int64_t n, bool rows) override;
  int64_t Erase(const uint64_t* keys, int64_t n) override;
  // Row ids of keys [n]; -1: it has no row.
  std::vector<int64_t> RowIds(const uint64_t* keys, int64_t n) const;
  int64_t memory_bytes() const override;
  PolicyCounts policy_counts() const override;  // no policy works here: rows made

 private:
  class Call;  // the stream and its scratch, for one caller at a time
  struct Placed;
  struct Stream;

  void CheckKeys(const uint64_t* keys, int64_t n) const;
  // All below expect the table to be held.
  static std::vector<SlotSetInfo> SetsOf(const DeviceTable::State& state);
  // Every row in use that the filter has, settled, in order; what `visit` gets is on the device, and what it takes of the
  // scratch is given back.
  void VisitRows(Call* call, const RowFilter& filter,
                 const std::function<void(const uint64_t* keys, const uint32_t* rows, int64_t n)>& visit) const;
  // ReadAll or, with `changes`, ReadChanges.
  void ReadRows(Call* call, RowSink* sink, bool changes) const;
  // Keys that were erased since the save before, and have no row.
  std::vector<uint64_t> GoneKeys(Call* call) const;
  // Finds or makes rows for the keys that are this rank's, all or none, and writes floats of their records.
  Placed Place(Call* call, const uint64_t* keys, int64_t n, bool notes = true);
  void Store(Call* call, const Placed& placed, int64_t first, int64_t floats, const float* values, int64_t stride);
  [[noreturn]] void RefuseChanges() const;
  void ForgetSave(Call* call);  // it failed before it had a snapshot
  void CheckHostMemory(Call* call, bool changes) const;

  const std::unique_ptr<DeviceAllocator> owner_;
  const std::unique_ptr<DeviceTable> table_;
  const std::unique_ptr<Stream> stream_;
  const int64_t rows_at_a_time_;
  const HostBytes host_bytes_;
  std::atomic<int64_t> gone_{
      0};  // rows that were made here and are elsewhere or nowhere, less those that were made elsewhere
  std::shared_ptr<HeldRows> snapshot_;  // of a save that goes on beside training; for who has the stream
};

}  // namespace sok
