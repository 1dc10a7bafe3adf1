// One shard of an embedding table: keys, rows, optimizer slots.
//
// Every batched call locks the table once: calls that only read run side by side, calls that write have the table to
// themselves (each is parallel inside). A concurrent reader therefore never sees a torn row.
//
// Keys are 64-bit words: signed 32-bit keys sign-extended, unsigned ones zero-extended.
#pragma once

#include <atomic>
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
#include "sok/partition.h"
#include "sok/row_changes.h"
#include "sok/row_column.h"
#include "sok/row_store.h"
#include "sok/rows_by_bucket.h"
#include "sok/scratch.h"
#include "sok/sparse_update.h"
#include "sok/table_mutex.h"
#include "sok/table_store.h"

namespace sok {

class EmbeddingTable final : public TableStore {
 public:
  // Throws InvalidArgument if the configuration makes no sense.
  explicit EmbeddingTable(TableConfig config);
  ~EmbeddingTable() override;

  const TableConfig& config() const override { return config_; }
  std::string KeyText(uint64_t key) const { return config_.KeyText(key); }
  int OwnerOf(uint64_t key) const;

  // Throws InvalidArgument naming the key if an identity table cannot hold it; always fine for a hashed one.
  void CheckKey(uint64_t key) const { config_.CheckKey(key); }
  bool IsLegal(uint64_t key) const { return config_.IsLegal(key); }

  // One feature of a lookup: keys of one table, and where its answers go.
  struct Feature {
    EmbeddingTable* table = nullptr;
    const uint64_t* keys = nullptr;  // [n]
    int64_t n = 0;
    const int64_t* row_splits = nullptr;  // [segments + 1], checked by the caller; null: nothing is pooled
    int64_t segments = 0;
    const float* weights = nullptr;  // [n] or null; only with row_splits
    Combiner combiner = Combiner::kSum;
    const int64_t* place =
        nullptr;  // [n], only without row_splits: where in the outputs each answer goes; null: in order
    // [segments, dim], or [n, dim]: a segment's rows combined, or each key's row. Null, without row_splits: keys are to
    // have rows, which nobody wants to read.
    float* output = nullptr;
    int64_t* row_ids = nullptr;  // [n]; -1: the key has no row
    // If given and set to true by the lookup, the keys are the row ids, and row_ids was not written: so it is in an
    // identity table that is full, with one worker, never erased from.
    bool* keys_are_row_ids = nullptr;
  };

  // Rows of the features' keys, as they stand after every update so far; all features in one parallel loop. Empty
  // segments give zeros. With insert, a missing key gets a fresh row, all or none in each table: throws TableFull, and
  // no key of that table was stored. Without, it reads as its fresh row, row id -1, and nothing is stored.
  // Throws InvalidArgument for a key that its table cannot hold; then nothing is stored in any.
  // Waits for nothing but the tables. Repeats bit for bit.
  static void LookupGroup(const Cpu& cpu, Scratch* scratch, const Feature* features, int64_t num_features, bool insert);

  // LookupGroup of one feature that is not pooled.
  void Lookup(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, bool insert,
              const int64_t* place,  // [n]: where in the outputs each answer goes; null: in order
              float* rows,           // [n, dim]
              int64_t* row_ids);     // [n]

  // Gradients of one table's rows.
  struct Gradients {
    EmbeddingTable* table = nullptr;
    const int64_t* row_ids = nullptr;  // [n], of lookups in this table; negative ones are ignored
    const float* grads = nullptr;      // [n, dim]
    int64_t n = 0;
    bool distinct = false;  // no row id comes twice: spares the search for duplicates
  };

  // Sums duplicate row ids, then applies the rule once per distinct row; all tables in one parallel loop. Attaches the
  // slot set on first use. A gradient for a row that was erased since its lookup is ignored. Throws InvalidArgument for a
  // table given twice, for row ids that do not exist, for a set of another rule and, with Nonfinite::kRaise, for a gradient
  // that is not finite; nothing changed then in any table. Where memory ends, a table may have got the set, as yet unused.
  // An empty slot_set: gradients are checked, and no table changes.
  static void ApplyGroup(const Cpu& cpu, Scratch* scratch, const UpdateRule& rule, const std::string& slot_set,
                         Nonfinite nonfinite, const Gradients* gradients, int64_t num_tables);

  // What ApplyGroup by a rule of one's own would give, and forgets it. Returns why it should not be done: the rule makes
  // NaN or infinity of a row, its slots and its gradient, which are finite; empty: no such row. Costs as much as the update.
  static std::string TryGroup(const Cpu& cpu, Scratch* scratch, const UpdateRule& rule, const std::string& slot_set,
                              const Gradients* gradients, int64_t num_tables);

  // Rows by row id, as they stand after every step (Gather), and what they are to be (Scatter); slots stay. Ids that are
  // negative, or of rows erased since their lookup, read as zeros and are passed over. Between the two nobody else should
  // update these rows. Ids must be distinct. Throw InvalidArgument for row ids that do not exist; nothing changed then.
  void Gather(const Cpu& cpu, const int64_t* row_ids, int64_t n, float* rows);  // rows [n, dim]
  void Scatter(const Cpu& cpu, const int64_t* row_ids, int64_t n, const float* rows);

  // TableStore, in which all of them are described.
  int64_t size() const override;
  std::vector<uint64_t> Keys() const override;
  void Export(const Cpu& cpu, const std::string& slot_set,
              const std::function<ExportTarget(int64_t n, int64_t slot_floats)>& allocate) const override;
  int64_t SlotFloats(const std::string& slot_set) const override;
  void Slots(const std::string& slot_set, const uint64_t* keys, int64_t n, float* slots,
             int64_t* stamps) const override;
  void Assign(const Cpu& cpu, Scratch* scratch, const uint64_t* keys,
              const float* rows,  // [n, dim]
              int64_t n) override;
  std::vector<SlotSetInfo> SlotSets() const override;
  void ReadAll(const Cpu& cpu, RowSink* sink) const override;
  void BeginSave(SnapshotOf snapshot = SnapshotOf::kNothing) override;
  void EndSave(const std::string& base) override;
  void ReadSnapshot(const Cpu& cpu, RowSink* sink) override;
  void ReadChanges(const Cpu& cpu, RowSink* sink) const override;
  void SkipCalls(const std::string& save, const std::vector<SlotSetInfo>& sets) override;
  ChangeInfo Changes() const override;
  int64_t Restore(const Cpu& cpu, Scratch* scratch, const std::vector<SlotSetInfo>& sets,
                  const RowValues& values) override;
  void Swap(TableStore* other) override;
  void Reserve(const Cpu& cpu, int64_t n, bool rows = true) override;
  int64_t Erase(const uint64_t* keys, int64_t n) override;
  int64_t memory_bytes() const override;
  void EndStep(const Cpu& cpu) override;

  // Throws what Swap with it would, of their configurations and saves.
  void CheckSwap(const EmbeddingTable& other) const;

  // From now on a table over a file keeps versions (docs/design/versions.md). Rows that it has are written anew. Throws
  // FailedPrecondition for a table that cannot, being without a file.
  void KeepVersions();
  // The version that BeginSave has begun, whose records are on the disk when this returns. Holds the lock for some rows at a
  // time; beside training it rests in between. shard: the file that will name it. Valid until EndSave.
  struct Version {
    uint32_t number = 0;
    std::string log, shard;
    RowLogShape shape;
    std::vector<SlotSetInfo> sets;
    std::vector<int64_t> offsets,
        stamps;  // of each set in a record: its slots, and up to which call they are current; -1: always
    std::vector<uint64_t> bits;  // of rows in use
    int64_t row_numbers = 0, num_rows = 0;
    uint64_t digest = 0;
  };
  const Version& WriteVersion(const std::string& shard, bool is_beside = false);

  // Brings records that were current at call `stamp` up to the last call of their set.
  class Settler {
   public:
    virtual ~Settler() = default;
    virtual void Settle(uint32_t stamp, int64_t dim, float* weights, float* slots) const = 0;
  };
  // set: with all its calls in `missed`.
  static std::unique_ptr<Settler> SettlerOf(const SlotSetInfo& set);

  // Moving rows to a table that is placed otherwise, maybe on other ranks: what the shards of a save would carry.
  //
  // As ReadAll, of these keys in their order; changed [n]: whether the save that was begun has them among its changes. Throws
  // InvalidArgument for a key without a row.
  void ReadKeys(const Cpu& cpu, const uint64_t* keys, int64_t n, const RowTarget& target, bool* changed) const;
  // Keys that were erased, of the changes of the save that was begun.
  std::vector<uint64_t> SavedErased() const;
  // These keys count as erased since the save before, if they are this rank's and have no row.
  void NoteErased(const uint64_t* keys, int64_t n);
  // Takes the place of another table, whose rows it has: gradients of lookups in that one are ignored. Its counts from then on
  // are those given, of candidates nothing.
  void Succeed(const EmbeddingTable& before, const PolicyCounts& counts);

  // Throws InvalidArgument if the set belongs to another rule.
  void CheckRule(const UpdateRule& rule, const std::string& slot_set) const;

  // Of tables with policies. Histories [n] of keys, of rows and of candidates; zeros of others.
  void Histories(const uint64_t* keys, int64_t n, RowHistory* histories) const;
  PolicyCounts policy_counts() const override;
  int64_t collisions() const override;
  // Keys and rows [dim] that have left since the last call, ascending by key as words. keeps: those that leave from now on are kept for the next one.
  struct Evicted {
    std::vector<uint64_t> keys;
    std::vector<float> rows;
  };
  Evicted TakeEvicted(bool keeps);
  // Whether an update so far was by a rule that moves rows without a gradient, as the decay of exact Adam does.
  bool MovesUntouchedRows() const;
  // Reads those rows of keys [n] into memory that lie in the file alone, for calls to come; keys without a row are passed over. Gives how
  // many it has read: with those that are in memory, and stay, at most MostAhead. It changes no answer, and says of nothing that goes wrong: that is for whoever needs the row.
  // Other calls run meanwhile: no read is waited for with the lock held. batches: for how many at a time this is done.
  int64_t ReadAhead(const Cpu& cpu, const uint64_t* keys, int64_t n, int64_t batches) override;
  // Of the rows that there is room for an equal part for each of these batches, and for the one that is in its step.
  static int64_t MostAhead(int64_t room, int64_t batches) { return room / (batches + 1); }
  // Of a table with a file; of another one only its memory is not zero.
  StorageCounts storage_counts() const override;
  EmbeddingTable* OnHost() override { return this; }
  // From the first call on it gives the keys and row numbers that have lost their rows since the call before, whatever took them
  // but Swap. For whoever has copies of rows elsewhere.
  struct Lost {
    uint64_t key;
    uint32_t row;
  };
  std::vector<Lost> TakeLost();
  // Whether the end of this step looks at weights, or hands some over.
  bool ReadsRowsAtEndOf(int64_t step) const;
  // EndStep, but what it leaves to do is done, or raised, by the next lookup for training, or save; and whether there is anything.
  void EndStepLater();
  bool HasStepToEnd() const { return unfinished_ != 0; }
  // What is counted of keys without rows, as a table; null: nothing is. Rows [2] of these keys are their histories, bit for bit; or,
  // of a Bloom filter, those of KeyOfBucket are the cells of a bucket. Whoever writes it counts for this table.
  const std::shared_ptr<EmbeddingTable>& counted() const { return candidates_ ? candidates_ : filter_; }

 private:
  friend struct TableForTests;
  static constexpr int kCountShift = 12;  // identity tables count unused rows in stretches of 4,096
  static constexpr int64_t kEpochMask = INT32_MAX;

  struct SlotSet;
  struct Snapshot;
  struct Task;
  struct Stretch;
  using Lock = std::unique_lock<TableMutex>;
  using SharedLock = std::shared_lock<TableMutex>;

  void CheckKeys(const uint64_t* keys, int64_t n) const;
  void CheckOwned(const uint64_t* keys, int64_t n) const;

  // All below expect the lock to be held (shared for const members).
  uint32_t FindRow(uint64_t key) const;
  // rows of keys, or kNoRow; *bad becomes true for a key that this shard cannot hold.
  void FindRows(const uint64_t* keys, int64_t n, uint32_t* rows, bool* bad) const;
  // The halves of a lookup, of the keys that `task` covers. Find writes their rows, their row ids, and how many have none;
  // it changes nothing in the table, so that it may run ahead. Read writes what the rows hold, after every update so far.
  // With kSome, what InsertMissing is to give rows after it is left out; with kAll, that has been. buffer: [kBlock, dim].
  enum class Made { kNone, kSome, kAll };
  void Find(const Feature& feature, Task* task, uint32_t* rows) const;
  // are_here: all its rows are in memory.
  void Read(const Feature& feature, const Task& task, const uint32_t* rows, Made made, bool are_here, float* buffer);
  // Read for tasks of one feature, on several threads; brings their rows into memory.
  void ReadTasks(const Cpu& cpu, const Feature& feature, const Task* tasks, int64_t num_tasks, const uint32_t* rows,
                 Made made, float* buffers);
  // The ids of the rows of `task`; how many have none.
  int64_t WriteRowIds(const Feature& feature, const Task& task, const uint32_t* rows) const;
  // Brings rows up to the last call of every decaying set, for good. Threads may settle the same rows at the same time,
  // but nobody else may look at the table meanwhile. Logically const: it changes no answer.
  void SettleRows(const uint32_t* rows, int64_t n) const;
  void Locate(const uint32_t* rows, int64_t n, bool decays, const float** records) const;
  static void CollectMissing(const Cpu& cpu, Scratch* scratch, const Task* tasks, int64_t num_tasks,
                             const uint32_t* rows, int64_t** missing, int64_t* count);
  // LookupGroup, but for tables that become full: each feature gets its rows, or none.
  static void LookupFeatures(const Cpu& cpu, Scratch* scratch, const Feature* features, int64_t num_features,
                             bool insert);
  static std::vector<EmbeddingTable*> TightTables(const Feature* features, int64_t num_features);
  static void AddMissing(const Cpu& cpu, Scratch* scratch, const std::vector<Feature>& features);
  static void FinishFeature(const Cpu& cpu, Scratch* scratch, const Feature& feature, Task* tasks, int64_t num_tasks,
                            int64_t losses, uint32_t* rows, float* buffers);
  // Of a table with a file, brings the first of these rows into memory, as many as it has room for at a time (RowTier::Bring), and gives
  // how many; of another one all are there. Logically const. Throws DamagedFile, FileError, and FailedPrecondition for a table that an
  // error has left half changed.
  int64_t Bring(const Cpu& cpu, const uint32_t* rows, int64_t n, RowUse use) const;
  // Calls body(begin, end) for parts of these rows that are in memory, in order, until all have been.
  template <class Body>
  void ForBrought(const Cpu& cpu, const uint32_t* rows, int64_t n, RowUse use, const Body& body) const {
    if (rows_.tier() == nullptr) return body(int64_t{0}, n);
    for (int64_t begin = 0; begin < n;) {
      const int64_t count = Bring(cpu, rows + begin, n - begin, use);
      body(begin, begin + count);
      begin += count;
    }
  }
  // ForBrought for rows that are written to. What goes wrong once a part was written, or with `is_begun`, leaves the table half
  // changed: no call uses it from then on.
  template <class Body>
  void ForBroughtOrBreak(const Cpu& cpu, const uint32_t* rows, int64_t n, bool is_begun, const Body& body);
  int64_t BytesBeside()
      const;  // of the memory: all but rows, and what a save in the background takes for as long as it goes on
  [[noreturn]] void ThrowUnreadable(const RowTier::Unreadable& row) const;
  // Where the records of rows are, in memory or in `aside`; null for a table in memory.
  struct Records {
    std::vector<uint32_t> rows;
    std::vector<float> aside;
    std::vector<const float*> all;
  };
  std::vector<uint32_t> RowsOfKeys(const uint64_t* keys, int64_t n) const;  // takes the lock itself
  const float* const* PeekAll(const Cpu& cpu, Records* records) const;
  // Throws what has gone wrong where rows were read without being brought in, by a call that has the table to itself.
  void CheckPeeks() const;
  // For a tier with versions; more: a set that is about to come.
  RowTier::Facts FactsForTier(const SlotSet* more = nullptr) const;
  void CheckVersions() const;  // throws FailedPrecondition where KeepVersions does
  void StartVersions();
  // Whether histories are parts of records, so that a row whose count changes has to be brought in to be written to.
  bool CountsInRecords() const;
  // Of such a table, those of these rows that no batch has held begin to age with update `now`.
  void BeginToAge(const Cpu& cpu, const std::vector<std::pair<uint32_t, uint64_t>>& some, int64_t now);
  void BeginVersion();
  void CheckSwapLocked(const EmbeddingTable& other) const;
  void CheckWhole() const;  // throws FailedPrecondition for a table that an error has left half changed
  // Gives a row to each of the m positions listed in `missing` (ascending); all or none, then throws TableFull. With
  // `fresh` false the caller writes the whole record of new rows, and their stamps.
  // kInherits: new rows begin as those that their keys have shared.
  enum class Fresh { kNo, kInitial, kInherits };
  void InsertMissing(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const int64_t* missing, int64_t m,
                     uint32_t* rows, Fresh fresh = Fresh::kInitial);
  struct MadeRow {
    uint32_t row;
    uint64_t key;
  };
  struct MadeRows {  // in scratch memory
    MadeRow* rows = nullptr;
    int64_t n = 0;
  };
  MadeRows InsertHashed(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const int64_t* missing, int64_t m,
                        uint32_t* rows);
  MadeRows InsertIdentity(Scratch* scratch, const uint64_t* keys, const int64_t* missing, int64_t m, uint32_t* rows);
  // Of the m positions in `missing`, those whose keys may have rows come first, both parts in order; gives how many they are.
  // Counts the others. Expects the table to be locked by this thread alone, as do those below.
  int64_t Admit(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t* missing, int64_t m);
  // Whether a Bloom filter has counted keys often enough, the present step included; and what it counts at the end of that.
  void FilterPasses(Scratch* scratch, const uint64_t* keys, int64_t n, bool* passes) const;
  void CountRefused(const Cpu& cpu);
  // Rows for the m positions in `missing`, whose keys have none of their own: those that they share, which are made if they are
  // missing. FindShared makes none, and gives how many of the keys it has found one for.
  void ShareRows(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const int64_t* missing, int64_t m,
                 uint32_t* rows);
  int64_t FindShared(const uint64_t* keys, int64_t n, uint32_t* rows) const;
  void Inherit(const Cpu& cpu, const MadeRow* made, int64_t n);
  // What a step leaves to do at its end. What could not be done, for want of memory or for a file, is done before anybody counts
  // in the next step, or else raised there: by a lookup, all workers hear of it.
  void FinishStep(const Cpu& cpu, int64_t now);
  void FinishLate(const Cpu& cpu) {
    if (const int64_t late = unfinished_; late != 0) FinishStep(cpu, late);
  }
  // Removes rows that leave, of which somebody may want the weights; gives how many.
  int64_t RemoveLeaving(std::vector<std::pair<uint32_t, uint64_t>> leaving, bool has_ids);
  // The present step holds these rows. Threads may count the same ones at the same time.
  void CountRows(const uint32_t* rows, int64_t n);
  RowHistory* HistoryOf(int64_t row) const;
  // Rows that have to leave after update `now`; what no batch has held yet begins to age.
  std::vector<std::pair<uint32_t, uint64_t>> Leaving(const Cpu& cpu, const Policies& policies, int64_t now);
  // Those of the others that have to leave since their buckets have too many.
  void AddCrowded(int64_t now, std::vector<std::pair<uint32_t, uint64_t>>* leaving);
  // Those that full buckets give up.
  std::vector<std::pair<uint32_t, uint64_t>> LeavingFull(int64_t now) const;
  // Rows of distinct keys go. In two steps, of which the second takes no memory.
  void MakeHistory();
  void ReserveRemoval(const uint32_t* rows, int64_t n);
  bool RowsAreWatched() const;
  void RemoveRow(uint32_t row, uint64_t key, bool is_watched);
  void ForgetRow(uint32_t row, uint64_t key, bool is_watched);  // the same for a row that nobody has seen
  void TakeBack(const MadeRows& made);                          // rows that InsertMissing has made and could not fill
  // What was counted of keys that have just been given rows goes to these, if they are fresh; then it is forgotten, in two steps,
  // of which the second takes no memory.
  void TakeHistories(const MadeRow* made, int64_t n);
  void ReserveForgetting(const uint64_t* keys, const int64_t* missing, int64_t m);
  void ForgetCandidates(const MadeRow* made, int64_t n);
  void MakeRoom(int64_t row);
  void InitRows(const MadeRow* fresh, int64_t n);
  bool KeysAreRowIds(const Feature& feature) const;
  // Row ids: the row in the lower half, above it as much of the epoch as keeps them from being negative.
  int64_t FirstRowId() const { return (epoch_ & kEpochMask) << 32; }
  int64_t RowId(uint32_t row) const { return row == HashTable::kNoRow ? -1 : FirstRowId() | row; }
  // The last epoch that could have given this id; negative: none has.
  int64_t EpochOf(int64_t id) const { return epoch_ - ((epoch_ - (id >> 32)) & kEpochMask); }
  bool CheckGradients(const Gradients& gradients, int64_t begin, int64_t end, Nonfinite nonfinite, bool* stale) const;
  [[noreturn]] void RaiseBadGradient(const Gradients& gradients, Nonfinite nonfinite) const;
  static void SumDuplicates(const Cpu& cpu, Scratch* scratch, Gradients* gradients, int64_t num_tables);
  bool IsGone(int64_t id) const;
  void DropStale(Scratch* scratch, Gradients* gradients) const;
  // The rows of ids, kNoRow of those that are gone. Throws InvalidArgument.
  std::vector<uint32_t> RowsOfIds(const int64_t* row_ids, int64_t n) const;
  template <class Body>
  static void ForStretches(const Cpu& cpu, Scratch* scratch, const Gradients* gradients, const Stretch* stretches,
                           int64_t count, int64_t cost, const Body& body);
  void Update(const Gradients& gradients, int64_t begin, int64_t end, SlotSet* set, Nonfinite nonfinite, float* aside);
  // The same by a rule of one's own. aside: see FloatsAside; or null, then whatever the rule gives is stored.
  void CallOwnRule(const Gradients& gradients, int64_t begin, int64_t end, const SlotSet& set, Nonfinite nonfinite,
                   float* aside);
  // Has a rule of one's own change copies of rows, which need so many floats; the first gradient whose row is not finite
  // afterwards, or `end`. set: null if the rule has none yet.
  int64_t TryOwnRule(const Gradients& gradients, int64_t begin, int64_t end, const UpdateRule& rule, const SlotSet* set,
                     float* aside) const;
  static int64_t FloatsAside(const UpdateRule& rule, int64_t dim);
  // The keys of rows, for a rule that reads them.
  void KeepKeys();
  uint64_t KeptKey(uint32_t row) const { return config_.hashed ? *row_keys_.At(row) : KeyOfRow(row); }
  bool InUse(int64_t row) const {
    // A table in full use pays for no bits: the counts of a million rows are one kilobyte.
    return unused_[static_cast<size_t>(row >> kCountShift)] == 0 ||
           ((in_use_[static_cast<size_t>(row >> 6)] >> (row & 63)) & 1) != 0;
  }
  void MarkInUse(int64_t row, bool used);
  uint64_t KeyOfRow(int64_t row) const;
  bool HasDecay() const;
  // A lookup for training settles rows, or counts them.
  bool ChangesWhenRead() const { return history_ != nullptr || HasDecay(); }
  bool WritesWhenRead() const { return HasDecay() || CountsInRecords(); }  // to records
  RowUse UseOfLookup() const { return WritesWhenRead() ? RowUse::kReadAndWrite : RowUse::kRead; }
  // The weights of a row after every update so far: in its record, or worked out in out [dim]. scratch: [2 * dim]. record: where it is,
  // if the caller knows.
  const float* ReadRow(uint32_t row, uint64_t key, float* out, float* scratch, const float* record = nullptr) const;
  // Throws InvalidArgument if the set belongs to another rule.
  void CheckSet(const UpdateRule& rule, const std::string& slot_set) const;
  // Steps that rows have missed were those of the set's rule so far: all rows are settled if the next one has other
  // settings.
  void SettleBefore(const Cpu& cpu, const SlotSet& set, const UpdateRule& next) const;
  // A set that is there keeps its settings.
  SlotSet* FindOrAttach(const UpdateRule& rule, const std::string& slot_set);
  const SlotSet* FindSet(const std::string& slot_set) const;
  const SlotSet& RequireSet(const std::string& slot_set) const;
  // weights: [dim], of no meaning afterwards.
  void ReadSlots(const SlotSet& set, uint32_t row, const float* record, float* weights, float* slots,
                 int64_t* stamp) const;
  std::vector<std::pair<uint32_t, uint64_t>> RowsInOrder() const;
  // The same in parts of about half a million rows at most, [0, NumParts()), in any order.
  int64_t NumParts() const;
  void RowsOfPart(int64_t part, bool changes, std::vector<std::pair<uint32_t, uint64_t>>* rows) const;
  void ReadRows(const Cpu& cpu, RowSink* sink, bool changes) const;
  void MarkChanged(const uint32_t* rows, int64_t n);
  // Before rows change: if a snapshot still needs them, it gets a copy. Threads may do this at the same time, for the same
  // rows too; when it returns, all of these may change.
  void CopyAside(const uint32_t* rows, int64_t n) const;
  std::shared_ptr<Snapshot> MakeSnapshot(SnapshotOf of);
  void SnapshotLosesRow(uint32_t row, uint64_t key);  // as its key is erased
  void CopySnapshotRows(const Cpu& cpu, const std::vector<uint32_t>& rows, const std::vector<uint32_t>& copies,
                        const RowTarget& target) const;
  // records: see PeekAll.
  void CopyAllOut(const Cpu& cpu, const std::pair<uint32_t, uint64_t>* rows, int64_t n, const RowTarget& target,
                  Records* records) const;
  void CopyOut(const std::pair<uint32_t, uint64_t>* rows, const float* const* records, int64_t n,
               const RowTarget& target, int64_t begin) const;

  const TableConfig config_;
  mutable TableMutex mutex_;
  std::unique_ptr<HashTable> index_;  // null for an identity table
  RowStore rows_;
  bool is_broken_ = false;  // no call may use the table any more
  std::string broken_;      // why
  mutable RowTier::Failure peeks_;
  std::vector<uint64_t> in_use_;  // identity: one bit per row
  std::vector<uint32_t> unused_;  // identity: rows not in use in each stretch of 4,096; where 0, no bit is read
  int64_t num_rows_ = 0;          // rows in use
  int64_t losses_ = 0;            // of keys, to Erase or Swap: row numbers found before the last one may be stale
  // Calls of Erase that erased something. Row ids have it modulo 2^31, so one that is kept for as many of these calls is
  // taken for a new one. An id with an older epoch may mean a row that was erased since: erased_ tells in which epoch a
  // row was last, 0 if never. An id of an epoch before first_epoch_ means a row that Swap has taken away.
  int64_t epoch_ = 0;
  int64_t first_epoch_ = 0;
  RowColumn<int64_t> erased_;
  int64_t next_row_ = 0;             // hashed: row numbers given out so far
  std::vector<uint32_t> free_rows_;  // hashed: erased row numbers
  std::vector<std::unique_ptr<SlotSet>> sets_;
  bool keeps_keys_ = false;  // in row_keys_, of a hashed table
  RowColumn<uint64_t> row_keys_;
  SlotSet* history_ = nullptr;  // of sets_, if there are policies
  std::shared_ptr<EmbeddingTable> candidates_, filter_;
  std::unique_ptr<RowsByBucket> by_bucket_;  // if rows leave when buckets are full
  std::atomic<bool> wants_evicted_{false};
  Evicted taken_away_;  // since the last TakeEvicted
  bool tells_losses_ = false;
  std::vector<Lost> lost_;              // since the last TakeLost
  std::atomic<int64_t> unfinished_{0};  // the step whose end is not done; 0: none
  std::vector<uint64_t> refused_keys_;  // of the present step, with repeats: a Bloom filter counts them at its end
  std::atomic<int64_t> made_{0}, refused_{0}, evicted_{0};
  RowChanges saved_;
  std::unique_ptr<Version> version_;    // that is being written
  std::shared_ptr<Snapshot> snapshot_;  // of a save that goes on beside training; whoever reads it holds it too
};

}  // namespace sok
