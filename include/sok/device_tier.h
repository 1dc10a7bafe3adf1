// A table whose rows are in the memory of the host, or in a file, as EmbeddingTable has them, and those in use on a device as well.
//
// The host's table decides all: which keys have rows, what they have seen, who leaves, what a save holds. The device has copies of
// rows, which lookups read and updates change; a lookup brings those that are not there first (Held). What has changed there comes
// home when somebody wants to see it, and before a row leaves the device. Which rows are there changes no result.
//
// Of the device at most `storage.device_bytes` are taken, or what it has. When they are full, rows leave that were asked for longest
// ago: those of lookups for training last, until the step ends, so that gradients find them.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sok/device_store.h"
#include "sok/embedding_table.h"
#include "sok/table_store.h"

namespace sok {

class DeviceTier final : public TableStore {
 public:
  // Throws as EmbeddingTable and DeviceTable.
  static std::unique_ptr<DeviceTier> Make(TableConfig config, int64_t rows_at_a_time = int64_t{1} << 20,
                                          std::unique_ptr<DeviceAllocator> owner = nullptr);
  ~DeviceTier() override;

  // The table on the device, for lookups without insert and updates. Its row ids are those of gradients.
  DeviceTable& device() { return device_->table(); }

  // How many keys a lookup that pools nothing should ask for at a time.
  int64_t keys_at_a_time() const;

  // Keys of a lookup.
  struct Asked {
    DeviceTier* tier = nullptr;
    DeviceTable::Asked* of =
        nullptr;  // its table is the tier's; may be given other keys: those whose rows its keys share
    const uint64_t* keys =
        nullptr;  // [of->n], in the memory of the process; null: they are copied from the device, and waited for
  };
  // Has brought the rows of what is asked to the device: all that have one, in place of LookupGroup with `insert` also those that get
  // one now. While it lives, work can be put on a stream that finds them without insert. Throws as EmbeddingTable::LookupGroup, and
  // OutOfMemory if the device has no room for the rows of this call.
  class Held {
   public:
    Held(const Cuda& cuda, const Cpu& cpu, DeviceScratch* scratch, const std::vector<Asked>& asked, bool insert);

   private:
    std::vector<std::unique_lock<std::mutex>> locks_;
  };

  // Row ids of gradients, on the device.
  struct Updated {
    DeviceTier* tier = nullptr;
    const int64_t* row_ids = nullptr;  // [n]
    int64_t n = 0;
  };
  // An update of the tables' devices by DeviceTable::ApplyGroup happens while it lives, and did if Done is called: then the hosts
  // count it. Throws InvalidArgument for a set of another rule, and for the id of a row that has left the device since its lookup;
  // OutOfMemory. Then nothing changed. Waits for the stream if a table has sent rows home.
  class Updating {
   public:
    Updating(const Cuda& cuda, const Cpu& cpu, const std::vector<Updated>& updated, const UpdateRule& rule,
             const std::string& slot_set);
    void Done();

   private:
    const Cpu cpu_;
    std::vector<DeviceTier*> tiers_;
    const UpdateRule rule_;
    const std::string slot_set_;
    std::vector<std::unique_lock<std::mutex>> locks_;
  };

  const TableConfig& config() const override { return host_->config(); }
  void EndStep(const Cpu& cpu) override;
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
  PolicyCounts policy_counts() const override;
  int64_t collisions() const override;
  EmbeddingTable* OnHost() override { return host_.get(); }
  StorageCounts storage_counts() const override;
  int64_t ReadAhead(const Cpu& cpu, const uint64_t* keys, int64_t n, int64_t batches) override;

 private:
  // A row that is on the device.
  struct Here {
    uint64_t key;
    uint32_t row;   // of the host
    uint64_t used;  // by call number `used >> 1`; odd: by a lookup for training
  };
  class HomeSink;

  DeviceTier(std::unique_ptr<EmbeddingTable> host, int64_t rows_at_a_time, std::unique_ptr<DeviceAllocator> owner);

  // All below expect mutex_ to be held. Those that are const change no answer.
  // In one order for all threads, in which `tiers` is then, each once.
  static std::vector<std::unique_lock<std::mutex>> LockAll(std::vector<DeviceTier*>* tiers);
  void Tell() const;  // throws what the end of a step has heard of an update
  void WriteHome(const Cpu& cpu) const;
  // The device's rows of keys that have none any more go. What cannot be done now is done by the next call.
  void DropLost();
  void EraseLost() const;
  // For a call on the host's table that may end a step late.
  template <class Call>
  auto OfHost(const Call& call) -> decltype(call());
  void CheckIds(const Cuda& cuda, const int64_t* row_ids, int64_t n) const;
  // Row ids [n] of the host, as a lookup in it has given them, and the keys of these rows: they are wanted on the device.
  void Want(const uint64_t* keys, const int64_t* row_ids, int64_t n);
  void KeepForStep(const int64_t* row_ids, int64_t n);  // rows that are there leave last, until the step ends
  void Bring(const Cpu& cpu);                           // what is wanted and not there
  void SetUsed(uint32_t row, uint64_t key);
  // At least so many rows leave the device, or as many as can, those of the step under way if there are no others; up to so many
  // of others. Gives how many.
  int64_t SendHome(const Cpu& cpu, int64_t least, int64_t most);
  void Forget(size_t place);  // it is no longer on the device
  void CopyToDevice(const Cpu& cpu, const uint64_t* keys, int64_t n);
  void Refresh(const Cpu& cpu, const uint64_t* keys, int64_t n);  // what the host has for those that are on the device
  void CopyAgain(const Cpu& cpu, std::vector<uint64_t> keys);     // of keys that are there, or they no longer are
  void DropKeys(std::vector<uint64_t>* keys);
  // Those of these keys of this rank whose rows are there, or are not.
  std::vector<uint64_t> Which(const Cpu& cpu, const uint64_t* keys, int64_t n, bool are_here) const;
  int64_t MostRows() const;
  bool Stays(const Here& here) const { return (here.used & 1) != 0 && here.used >> 1 >= step_began_; }

  const std::unique_ptr<EmbeddingTable> host_;
  const std::unique_ptr<DeviceStore> device_;
  mutable std::mutex mutex_;
  std::vector<Here> here_;
  std::vector<uint32_t> place_of_;      // of each row of the host, its place in here_ plus 1; 0: it is not there
  std::vector<Here> wanted_;            // of the call under way: not there
  mutable std::vector<uint64_t> lost_;  // keys whose rows the device is still to drop
  std::vector<int64_t> sent_home_;      // of each row number of the device, its last id that was sent home, or -1
  uint64_t call_ = 0, step_began_ = 0;
  mutable int64_t dropped_ = 0;  // rows since the device last forgot what it had lost
  int64_t hits_ = 0, misses_ = 0;
  mutable std::exception_ptr untold_;
};

}  // namespace sok
