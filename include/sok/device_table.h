// One shard of an embedding table in the memory of a CUDA device: what EmbeddingTable offers, put on streams.
//
// Keys, rows and slots lie in device memory, up to a budget. Calls are put on the caller's stream and wait there for what
// other streams still do to the table: calls that only read run side by side, calls that write run alone, in the order in
// which the host made them. So a lookup on one stream and an update on another never meet in a row. All calls may come
// from any thread of the host. Pointers are device memory, unless said otherwise.
//
// Row ids are those of EmbeddingTable: the lower half numbers the row, the upper half counts how often that number was erased, so
// that a gradient for a row that is gone is told from one for its number's next owner.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sok/combine.h"
#include "sok/device.h"
#include "sok/embedding_table.h"
#include "sok/initializer.h"
#include "sok/row_store.h"
#include "sok/scratch.h"
#include "sok/sparse_update.h"

namespace sok {

class DeviceTable {
 public:
  // budget_bytes: most device memory the table may take; 0: what the device has. owner: whose memory it is (DeviceMemory),
  // which must live longer; null: CUDA's. config.initializer.bank is host memory. A hashed table
  // takes no memory before rows appear; an identity one all of its rows'. Throws InvalidArgument as EmbeddingTable does,
  // OutOfMemory, CudaError.
  DeviceTable(TableConfig config, int64_t budget_bytes, DeviceAllocator* owner = nullptr);
  ~DeviceTable();  // waits for the device
  DeviceTable(const DeviceTable&) = delete;
  DeviceTable& operator=(const DeviceTable&) = delete;

  const TableConfig& config() const;
  std::string Label() const;

  // Rows of keys as they stand after every update that was put on a stream before, and their ids. With `insert`, a missing
  // key gets a fresh row, all or none; without, it reads as its fresh row, row id -1, and nothing is stored.
  // A key that this shard cannot hold (outside an identity table, or another rank's) reads as zeros, row id -1, and is kept
  // for ThrowIfBadToHost.
  // Waits for the stream only when inserting may make the table grow or overflow. Repeats bit for bit. Throws
  // InvalidArgument for n >= 2^31, TableFull naming the first key without room, OutOfMemory; then no key was stored.
  void Lookup(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, bool insert,
              float* rows,        // [n, dim], or null: not wanted
              int64_t* row_ids);  // [n]

  // Keys that are asked for together; several may be of one table.
  struct Asked {
    DeviceTable* table = nullptr;
    DeviceKeys keys;  // [n]
    int64_t n = 0;
    float* rows = nullptr;       // [n, dim], or null: not wanted
    int64_t* row_ids = nullptr;  // [n]
  };
  // Lookup of many, in as many launches as one table takes; of one table in the order given. With `insert` all or none of all
  // tables. Waits for the stream, once, when one of the tables may grow or overflow; those that do grow wait each. Tables
  // with an exact Adam are settled one by one. Throws as Lookup, for the first table that has no room, and InvalidArgument for
  // 2^31 - 1 keys in all.
  static void LookupGroup(const Cuda& cuda, DeviceScratch* scratch, const Asked* asked, int64_t num_asked, bool insert);

  // What a kernel reads rows from, for CombineGroup and its like: as long as a Reading lives, work put on its stream sees no
  // row move or change. Row ids of a Lookup index it by their lower half. Lives on one thread of the host, and meanwhile that
  // thread calls nothing else of the table.
  struct Reading {
    DeviceRows rows;
    int64_t num_rows = 0;
    FreshRows fresh;  // of FindGroup; else without keys
    std::shared_ptr<void> lock;
  };
  Reading Read(const Cuda& cuda);
  // Of many tables, all held at once.
  static std::vector<Reading> ReadGroup(const Cuda& cuda, const std::vector<DeviceTable*>& tables);

  // LookupGroup without `insert` for CombineGroup: row ids alone (`rows` are not looked at), and of each of what is asked the
  // Reading in which they stay what they are.
  static std::vector<Reading> FindGroup(const Cuda& cuda, DeviceScratch* scratch, const Asked* asked,
                                        int64_t num_asked);

  // Applies the rule to distinct rows. Attaches the slot set on first use. Gradients of row id -1 and of rows erased since
  // their lookup are ignored; row ids that the table never gave, and with Nonfinite::kRaise gradients that are not finite
  // (then no row changes), are kept for ThrowIfBadToHost. num_grads as in UpdateRows. Waits for the stream when a slot
  // set is attached, and with a decaying rule under kRaise. Throws InvalidArgument for a slot set of another rule, OutOfMemory; then nothing changed.
  void Apply(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule, const std::string& slot_set,
             Nonfinite nonfinite, float grad_scale,
             const int64_t* row_ids,  // [n]
             const float* grads,      // [n, dim]
             int64_t n, const int64_t* num_grads = nullptr);

  // Gradients of one table of a group.
  struct Gradients {
    DeviceTable* table = nullptr;
    const int64_t* row_ids = nullptr;  // [n], distinct
    const float* grads = nullptr;      // [n, dim]
    int64_t n = 0;
    const int64_t* num_grads = nullptr;  // [1] on the device: how many of the n there are; null: all
  };
  // Apply of many tables, of any dims, in as many launches as one takes. With Nonfinite::kRaise no row of any table changes
  // if one gradient is bad. Waits as Apply; the exact Adam's sums go to the device table by table. Throws InvalidArgument
  // for a table given twice and for a slot set of another rule, then nothing changed; OutOfMemory, then a slot set may have
  // been attached to some of the tables, and no row changed.
  static void ApplyGroup(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule, const std::string& slot_set,
                         Nonfinite nonfinite, float grad_scale, const Gradients* gradients, int64_t num_tables);

  // Stores rows (making them if needed) for the keys this rank owns; others are ignored. Slots of rows that exist stay. Of
  // equal keys the last one counts. All or none. Throws as Lookup.
  void Assign(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys,
              const float* rows,  // [n, dim]
              int64_t n);
  // The same with slots of one set instead of weights, which are those of a fresh row where there was none; the set is
  // attached if needed. For restoring. slots: [n, slot_floats].
  void AssignSlots(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule, const std::string& slot_set,
                   const uint64_t* keys, const float* slots, int64_t n);

  // Removes keys; their row numbers may be used again. Keys that the shard does not have are passed over.
  void Erase(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n);

  // Rows in use. Waits for the stream.
  int64_t SizeToHost(const Cuda& cuda);

  // Keys and row ids in the order of rows, as of now; n must be SizeToHost's answer, with nothing in between.
  void Export(const Cuda& cuda, DeviceScratch* scratch,
              uint64_t* keys,    // [n]
              int64_t* row_ids,  // [n]
              int64_t n);        // [n]
  // Weights, or slots of one set, of the rows of `row_ids`; missed decay is included. Zeros for row id -1. Throws
  // FailedPrecondition for an unknown set.
  void Weights(const Cuda& cuda, DeviceScratch* scratch, const int64_t* row_ids, int64_t n, float* rows);
  void Slots(const Cuda& cuda, DeviceScratch* scratch, const std::string& slot_set, const int64_t* row_ids, int64_t n,
             float* slots);  // [n, slot_floats]
  // What the weights of rows are to be, by distinct row ids; slots stay. Passes over row id -1 and rows erased since.
  void SetWeights(const Cuda& cuda, DeviceScratch* scratch, const int64_t* row_ids, int64_t n,
                  const float* rows);  // [n, dim]
  int64_t SlotFloats(const std::string& slot_set);

  // Room for n rows in all: up to there nothing grows, and nothing waits. With `rows` false for their keys only. Waits for
  // the stream. Throws InvalidArgument for more than the capacity, OutOfMemory.
  void Reserve(const Cuda& cuda, int64_t n, bool rows = true);

  // Exchanges the contents (keys, rows, slot sets) with a table of the same configuration; throws InvalidArgument for
  // another one, OutOfMemory; then nothing changed. Gradients of lookups from before are ignored by both. Waits for the
  // stream.
  void Swap(const Cuda& cuda, DeviceTable* other);

  // What calls could not say when they were made: throws InvalidArgument naming the first key or gradient that was bad since
  // the last time this was asked. Waits for the stream.
  void ThrowIfBadToHost(const Cuda& cuda);

  // The same of the first of many tables that has something to tell, with one wait. The others go on keeping theirs.
  static void ThrowIfBadToHost(const Cuda& cuda, DeviceScratch* scratch, const std::vector<DeviceTable*>& tables);

  // The same as far as it is known without waiting: what this call asks the stream, a later one hears. For callers that
  // work on the table again and again, before they do.
  void ThrowIfBadIsKnown(const Cuda& cuda);

  int64_t memory_bytes() const;

  struct State;  // cuda/detail/table_state.h
  // For what else in cuda/ is made of a table.
  State* state() { return state_.get(); }

 private:
  std::unique_ptr<State> state_;
};

// Hears of bad input of many tables without waiting, for who works on them again and again. Safe from several threads.
class DeviceTableWatch {
 public:
  DeviceTableWatch();
  ~DeviceTableWatch();  // waits for what it has asked
  DeviceTableWatch(const DeviceTableWatch&) = delete;
  DeviceTableWatch& operator=(const DeviceTableWatch&) = delete;

  // What DeviceTable::ThrowIfBadToHost(tables) throws, if what a call asked the stream has come back and was bad. Asks anew.
  void ThrowIfBadIsKnown(const Cuda& cuda, DeviceScratch* scratch, const std::vector<DeviceTable*>& tables);

 private:
  struct State;
  std::mutex mutex_;
  std::unique_ptr<State> state_;  // made on first use: only then the device is known
};

}  // namespace sok
