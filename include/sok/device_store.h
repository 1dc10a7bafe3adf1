// A DeviceTable as a TableStore: what is not a lookup or an update, with pointers to the memory of this process. Works on
// a stream of its own, through buffers of bounded size, and has happened when a call returns.
//
// What a device does not offer throws FailedPrecondition: saving by changes and snapshots (BeginSave with one, ReadChanges,
// ReadSnapshot), swapping.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sok/device_table.h"
#include "sok/table_store.h"

namespace sok {

class DeviceStore final : public TableStore {
 public:
  // As DeviceTable's constructor, on the current device.
  DeviceStore(TableConfig config, int64_t budget_bytes);
  ~DeviceStore() override;

  DeviceTable& table() { return *table_; }

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
  int64_t memory_bytes() const override;

 private:
  class Call;  // the stream and its scratch, for one caller at a time

  const std::unique_ptr<DeviceTable> table_;
  struct Stream;
  const std::unique_ptr<Stream> stream_;
};

}  // namespace sok
