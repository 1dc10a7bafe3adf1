// One shard of an embedding table: keys, rows, optimizer slots.
//
// Every batched call locks the table once: calls that only read run side by side, calls that write have the table to
// themselves (each is parallel inside). A concurrent reader therefore never sees a torn row.
//
// Keys are 64-bit words: signed 32-bit keys sign-extended, unsigned ones zero-extended.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "sok/combine.h"
#include "sok/device.h"
#include "sok/hash_table.h"
#include "sok/initializer.h"
#include "sok/row_store.h"
#include "sok/scratch.h"
#include "sok/sparse_update.h"

namespace sok {

struct TableConfig {
  std::string name;  // for messages
  int64_t dim = 0;
  int64_t capacity = 0;      // rows of this shard
  bool hashed = true;        // false: row = key / world_size
  bool is_unsigned = false;  // how keys are printed, and what `mod` means for them
  int world_size = 1;
  int rank = 0;
  Initializer initializer;
};

class EmbeddingTable {
 public:
  // Throws InvalidArgument if the configuration makes no sense.
  explicit EmbeddingTable(TableConfig config);
  ~EmbeddingTable();

  const TableConfig& config() const { return config_; }
  int64_t dim() const { return config_.dim; }

  // "table 'item' (rank 1 of 4)": how messages name this shard.
  std::string Label() const;
  std::string KeyText(uint64_t key) const;
  int OwnerOf(uint64_t key) const;

  // Throws InvalidArgument naming the key if an identity table cannot hold it; always fine for a hashed one.
  void CheckKey(uint64_t key) const;
  bool IsLegal(uint64_t key) const;

  // Rows of n keys, as they stand after every update so far. With insert, a missing key gets a fresh row, all or none:
  // throws TableFull, and nothing changed. Without, it reads as its fresh row, row id -1, and nothing is stored.
  // Waits for nothing but the table. Repeats bit for bit.
  void Lookup(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, bool insert,
              const int64_t* place,  // [n]: where in the outputs each answer goes; null: in order
              float* rows,           // [n, dim]
              int64_t* row_ids);     // [n]

  // The same, pooled: output[s] combines the rows of keys[row_splits[s] .. row_splits[s + 1]). Empty segments give zeros.
  void LookupCombine(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n,
                     const int64_t* row_splits,  // [segments + 1], checked by the caller
                     const float* weights,       // [n] or null
                     int64_t segments, Combiner combiner, bool insert,
                     float* output,      // [segments, dim]
                     int64_t* row_ids);  // [n]

  // Sums duplicate row ids (negative ones are ignored), then applies the rule once per distinct row. Attaches the slot
  // set on first use. Throws InvalidArgument for row ids that do not exist and, with Nonfinite::kRaise, for a gradient
  // that is not finite; nothing changed then.
  void Apply(const Cpu& cpu, Scratch* scratch, const UpdateRule& rule, const std::string& slot_set, Nonfinite nonfinite,
             const int64_t* row_ids,  // [n]
             const float* grads,      // [n, dim]
             int64_t n);

  int64_t size() const;

  // Keys in use, in row order (deterministic for a fixed history).
  std::vector<uint64_t> Keys() const;

  // Everything in use at one point in time, in row order: no update or erasure falls in between. allocate is called once,
  // with the number of rows and of slot floats per row (0 without a slot set), and gives where to write; null: not wanted.
  // Throws FailedPrecondition for an unknown set. An empty name means no slots.
  struct ExportTarget {
    uint64_t* keys = nullptr;   // [n]
    float* rows = nullptr;      // [n, dim]
    float* slots = nullptr;     // [n, slot_floats]
    int64_t* stamps = nullptr;  // [n]
  };
  void Export(const Cpu& cpu, const std::string& slot_set,
              const std::function<ExportTarget(int64_t n, int64_t slot_floats)>& allocate) const;

  // Slots of one set for the given keys: slots [n, num_slots * dim], stamps [n] (-1 where the rule keeps none).
  // Missed decay is included. Throws FailedPrecondition for an unknown set, InvalidArgument for an unknown key.
  int64_t SlotFloats(const std::string& slot_set) const;
  void Slots(const std::string& slot_set, const uint64_t* keys, int64_t n, float* slots, int64_t* stamps) const;

  // Stores rows (making them if needed) for the keys this rank owns; others are ignored. Optimizer slots of rows
  // that exist stay. All or none.
  void Assign(const Cpu& cpu, const uint64_t* keys,
              const float* rows,  // [n, dim]
              int64_t n);

  // Makes room in the key index for n rows in all, so that filling up to there rebuilds nothing. Memory for rows is still
  // taken as they appear. Throws InvalidArgument for more than the capacity.
  void Reserve(int64_t n);

  // Removes keys; their row numbers may be used again. Gives how many existed.
  int64_t Erase(const uint64_t* keys, int64_t n);

  // Bytes of keys, rows and bookkeeping.
  int64_t memory_bytes() const;

 private:
  struct SlotSet;
  using Lock = std::unique_lock<std::shared_mutex>;
  using SharedLock = std::shared_lock<std::shared_mutex>;

  void CheckKeys(const uint64_t* keys, int64_t n) const;
  void CheckOwned(const uint64_t* keys, int64_t n) const;

  // All below expect the lock to be held (shared for const members).
  uint32_t FindRow(uint64_t key) const;
  void FindRows(const uint64_t* keys, int64_t n, uint32_t* rows) const;
  // The same, and calls use(begin, end) for each block of positions once its records are on their way to the cache.
  template <class Use>
  void FindAndUse(const uint64_t* keys, int64_t n, uint32_t* rows, const Use& use) const;
  // Gives a row to each of the m positions listed in `missing` (ascending); all or none, then throws TableFull.
  void InsertMissing(const Cpu& cpu, const uint64_t* keys, const std::vector<int64_t>& missing, uint32_t* rows);
  void InsertHashed(const uint64_t* keys, const std::vector<int64_t>& missing, uint32_t* rows,
                    std::vector<std::pair<uint32_t, uint64_t>>* fresh);
  void Pool(const Cpu& cpu, const uint64_t* keys, const uint32_t* rows, const int64_t* row_splits, const float* weights,
            int64_t segments, Combiner combiner, float* output) const;
  bool InUse(int64_t row) const;
  void MarkInUse(int64_t row, bool used);
  uint64_t KeyOfRow(int64_t row) const;
  bool HasDecay() const;
  const float* ReadRow(uint32_t row, uint64_t key, float* buffer) const;
  SlotSet* FindOrAttach(const UpdateRule& rule, const std::string& slot_set);
  const SlotSet* FindSet(const std::string& slot_set) const;
  const SlotSet& RequireSet(const std::string& slot_set) const;
  void ReadSlots(const SlotSet& set, uint32_t row, float* slots, int64_t* stamp) const;
  void InitRow(uint32_t row, uint64_t key);
  std::vector<std::pair<uint32_t, uint64_t>> RowsInOrder() const;
  void Replay(const SlotSet& set, int64_t row, float* w, float* m, float* v) const;

  const TableConfig config_;
  mutable std::shared_mutex mutex_;
  std::unique_ptr<HashTable> index_;  // null for an identity table
  RowStore rows_;
  std::vector<uint64_t> in_use_;     // identity: one bit per row
  int64_t num_rows_ = 0;             // rows in use
  int64_t erasures_ = 0;             // calls of Erase: row numbers found before the last one may be stale
  int64_t next_row_ = 0;             // hashed: row numbers given out so far
  std::vector<uint32_t> free_rows_;  // hashed: erased row numbers
  std::vector<std::unique_ptr<SlotSet>> sets_;
};

}  // namespace sok
