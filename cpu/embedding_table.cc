#include "sok/embedding_table.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

#include "brought_or_break.h"
#include "remove_row.h"
#include "row_kernels.h"
#include "slot_set.h"
#include "sok/error.h"
#include "sok/host_memory.h"
#include "sok/partition.h"
#include "sok/reserve_more.h"
#include "sort_by_row.h"
#include "table_snapshot.h"
#include "tasks.h"

namespace sok {
namespace {

constexpr int64_t kLookupCycles = 100;  // per key: two cache misses, mostly hidden by prefetching
constexpr int64_t kRowsPerReadTask = 4096;

std::string Gibibytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f GiB", bytes / (1 << 30));
  return text;
}

}  // namespace

void TableConfig::Check() const {
  auto check = [&](bool ok, const std::string& text) {
    if (!ok) throw InvalidArgument("table '" + name + "': " + text);
  };
  check(dim >= 1 && dim <= kMaxDim,
        "dim must lie in [1, " + std::to_string(kMaxDim) + "]. Received: " + std::to_string(dim) + ".");
  check(capacity >= 1 && capacity < INT64_C(0xFFFFFFFF),
        "capacity must lie in [1, 2^32 - 2]. Received: " + std::to_string(capacity) + ".");
  check(world_size >= 1 && rank >= 0 && rank < world_size, "rank must lie in [0, world_size). Received: rank " +
                                                               std::to_string(rank) + " of " +
                                                               std::to_string(world_size) + ".");
  check(partition().IsValid(), "owner must be a rank in [0, " + std::to_string(world_size) +
                                   "), -1: each row on the rank of its key, or, on at most 4096 ranks, -2: of its "
                                   "bucket, or say of which ranks. " +
                                   "Received: " + std::to_string(owner) + ".");
  check(hashed || !partition().is_by_hash(), "keys that are row numbers cannot be spread by hash.");
  check(num_keys >= 0 && num_keys <= capacity * partition().num_shards(),
        "num_keys must lie in [0, capacity per worker * workers]. Received: " + std::to_string(num_keys) + ".");
  policies.Check(*this);
  check(storage.memory_bytes >= 0,
        "memory_bytes of its storage must not be negative. Received: " + std::to_string(storage.memory_bytes) + ".");
  check(storage.has_file() == !storage.path.empty(), "storage takes memory_bytes and a path, or neither.");
  check(!storage.has_file() || capacity <= RowTier::kMaxRows,
        "with rows in a file it can have " + std::to_string(RowTier::kMaxRows) +
            " rows on each worker. Received: capacity " + std::to_string(capacity) + ".");
  if (initializer.kind == InitKind::kBank) {
    check(initializer.bank_rows >= 1 && static_cast<int64_t>(initializer.bank.size()) == initializer.bank_rows * dim,
          "the initializer's bank must have shape [P, dim] with P >= 1");
  }
}

std::string TableConfig::Label() const {
  return "table '" + name + "' (rank " + std::to_string(rank) + " of " + std::to_string(world_size) + ")";
}

std::string TableConfig::KeyText(uint64_t key) const {
  return is_unsigned ? std::to_string(key) : std::to_string(static_cast<int64_t>(key));
}

void TableConfig::CheckKey(uint64_t key) const {
  if (IsLegal(key)) return;
  const std::string outside =
      Label() + ": key " + KeyText(key) + " is outside [0, " + std::to_string(num_legal()) + ")";
  if (num_keys > 0) throw InvalidArgument(outside + ", its row numbers.");
  throw InvalidArgument(outside + " = [0, capacity per worker" +
                        (owner == kByKey ? " * workers"
                         : owner < 0     ? " * " + std::to_string(partition().num_shards())
                                         : "") +
                        "). A table with use_hashtable=False uses keys as row numbers; raise its capacity or use "
                        "use_hashtable=True.");
}

void TableConfig::CheckOwned(uint64_t key) const {
  CheckKey(key);
  const int owned_by = partition().OwnerOf(key);
  if (owned_by == rank) return;
  throw InvalidArgument(Label() + ": key " + KeyText(key) + " belongs to rank " + std::to_string(owned_by) +
                        (owner >= 0                 ? ", as the whole table"
                         : partition().is_by_hash() ? " (by its hash)"
                         : owner == kByKey          ? " (key mod workers)"
                                                    : " (key mod " + std::to_string(partition().num_shards()) + ")") +
                        ". Look keys of all ranks up through sok.lookup or a layer.");
}

void TableConfig::ThrowFull(uint64_t key) const {
  std::string text =
      Label() + ": full: all " + std::to_string(capacity) + " rows are in use and key " + KeyText(key) +
      " is new. This shard has stored nothing of this step. Raise max_vocabulary_size_per_gpu (the capacity of "
      "each worker's shard).";
  const std::string here = " This shard holds ", workers = std::to_string(world_size);
  if (world_size > 1 && owner == kByKey) {
    text += here + "the keys of which key mod " + workers + " is " + std::to_string(rank) +
            ". If other ranks have room, keys are unevenly spread: make the table with "
            "placement=sok.row_wise(hash=True), which spreads them by their hash.";
  } else if (world_size > 1 && owner >= 0) {
    text += here + "the whole table, as table_wise(" + std::to_string(owner) +
            "): sok.row_wise() spreads it over all " + workers + " workers.";
  }
  throw TableFull(text);
}

EmbeddingTable::EmbeddingTable(TableConfig config)
    : config_([&config] {
        config.Check();
        return std::move(config);
      }()),
      rows_(config_.dim, config_.capacity, config_.storage, config_.Label(),
            config_.name + ".r" + std::to_string(config_.rank)),
      erased_(rows_) {
  if (config_.hashed) {
    index_ = std::make_unique<HashTable>(config_.capacity);
  } else {
    in_use_.assign(static_cast<size_t>((config_.capacity + 63) / 64), 0);
    unused_.assign(static_cast<size_t>(((config_.capacity - 1) >> kCountShift) + 1), 1u << kCountShift);
    const int64_t beyond = static_cast<int64_t>(unused_.size() << kCountShift) - config_.capacity;
    unused_.back() -= static_cast<uint32_t>(beyond);
  }
  if (config_.policies.any()) MakeHistory();
  if (config_.policies.when_full) {
    by_bucket_ = std::make_unique<RowsByBucket>(rows_);
    KeepKeys();
  }
}

EmbeddingTable::~EmbeddingTable() = default;

int EmbeddingTable::OwnerOf(uint64_t key) const { return config_.partition().OwnerOf(key); }

void EmbeddingTable::CheckKeys(const uint64_t* keys, int64_t n) const {
  if (config_.hashed) return;
  for (int64_t i = 0; i < n; ++i) CheckKey(keys[i]);
}

void EmbeddingTable::CheckOwned(const uint64_t* keys, int64_t n) const {
  CheckKeys(keys, n);
  if (config_.world_size == 1) return;
  for (int64_t i = 0; i < n; ++i) config_.CheckOwned(keys[i]);
}

void EmbeddingTable::MarkInUse(int64_t row, bool used) {
  const uint64_t bit = uint64_t{1} << (row & 63);
  uint64_t& word = in_use_[static_cast<size_t>(row >> 6)];
  unused_[static_cast<size_t>(row >> kCountShift)] += ((word & bit) != 0) - static_cast<uint32_t>(used);
  word = used ? word | bit : word & ~bit;
}

uint64_t EmbeddingTable::KeyOfRow(int64_t row) const {
  if (!config_.hashed) {
    const uint64_t shards = static_cast<uint64_t>(config_.partition().num_shards());
    return static_cast<uint64_t>(row) * shards + (shards > 1 ? static_cast<uint64_t>(config_.rank) : 0);
  }
  uint64_t found = 0;  // only error messages ask: a scan will do
  index_->ForEach([&](uint64_t key, uint32_t r) {
    if (r == row) found = key;
  });
  return found;
}

int64_t EmbeddingTable::size() const {
  SharedLock lock(mutex_);
  return num_rows_;
}

std::vector<std::pair<uint32_t, uint64_t>> EmbeddingTable::RowsInOrder() const {
  std::vector<std::pair<uint32_t, uint64_t>> rows;
  rows.reserve(static_cast<size_t>(num_rows_));
  if (config_.hashed) {
    index_->ForEach([&](uint64_t key, uint32_t row) { rows.emplace_back(row, key); });
    SortByRow(&rows);
  } else {
    for (int64_t row = 0; row < config_.capacity; ++row)
      if (InUse(row)) rows.emplace_back(static_cast<uint32_t>(row), KeyOfRow(row));
  }
  return rows;
}

std::vector<uint64_t> EmbeddingTable::Keys() const {
  SharedLock lock(mutex_);
  std::vector<uint64_t> keys;
  for (const auto& [row, key] : RowsInOrder()) keys.push_back(key);
  return keys;
}

void EmbeddingTable::Export(const Cpu& cpu, const std::string& slot_set,
                            const std::function<ExportTarget(int64_t, int64_t)>& allocate) const {
  SharedLock lock(mutex_);
  CheckWhole();
  const SlotSet* set = slot_set.empty() ? nullptr : &RequireSet(slot_set);
  const int64_t dim = config_.dim, slot_floats = set == nullptr ? 0 : set->rule.slot_floats(dim);
  const std::vector<std::pair<uint32_t, uint64_t>> rows = RowsInOrder();
  const int64_t n = static_cast<int64_t>(rows.size()), num_tasks = (n + kRowsPerReadTask - 1) / kRowsPerReadTask;
  const ExportTarget to = allocate(n, slot_floats);
  constexpr int64_t kRows = 1 + kMaxSlots;  // what comes out, and scratch of ReadRow
  std::vector<float> buffers(static_cast<size_t>(MaxWorkers(cpu, num_tasks) * kRows * dim));
  constexpr int64_t kBytesAtOnce = int64_t{8} << 20;  // of a table with a file
  Records records;
  const float* const* all = nullptr;
  int64_t first = 0;
  auto read = [&](int64_t worker, int64_t some) {
    const int64_t task = first + some, begin = task * kRowsPerReadTask;
    float* buffer = buffers.data() + worker * kRows * dim;
    const int64_t end = std::min(n, begin + kRowsPerReadTask);
    for (int64_t i = begin; i < end; ++i) {
      const auto [row, key] = rows[static_cast<size_t>(i)];
      const float* record = all == nullptr ? rows_.Record(row) : all[i - first * kRowsPerReadTask];
      if (to.keys != nullptr) to.keys[i] = key;
      if (to.rows != nullptr) {
        const float* weights = ReadRow(row, key, buffer, buffer + dim, record);
        std::memcpy(to.rows + i * dim, weights, static_cast<size_t>(dim) * sizeof(float));
      }
      if (to.stamps != nullptr) ReadSlots(*set, row, record, buffer, to.slots + i * slot_floats, to.stamps + i);
    }
  };
  const bool peeks = rows_.tier() != nullptr && (to.rows != nullptr || to.stamps != nullptr);
  const int64_t task_bytes = kRowsPerReadTask * rows_.floats() * static_cast<int64_t>(sizeof(float));
  const int64_t at_once = peeks ? std::max<int64_t>(1, kBytesAtOnce / task_bytes) : num_tasks;
  for (; first < num_tasks; first += at_once) {
    const int64_t tasks = std::min(at_once, num_tasks - first), begin = first * kRowsPerReadTask;
    records.rows.clear();
    for (int64_t i = begin; peeks && i < std::min(n, begin + tasks * kRowsPerReadTask); ++i)
      records.rows.push_back(rows[static_cast<size_t>(i)].first);
    if (peeks) all = PeekAll(cpu, &records);
    ForTasks(cpu, tasks, tasks * kRowsPerReadTask * (kLookupCycles + dim), read);
  }
}

const EmbeddingTable::SlotSet& EmbeddingTable::RequireSet(const std::string& slot_set) const {
  const SlotSet* set = FindSet(slot_set);
  if (set != nullptr) return *set;
  std::string known;
  for (const auto& s : sets_) known += (known.empty() ? "'" : ", '") + s->name + "'";
  throw FailedPrecondition(Label() + ": no optimizer has used slot set '" + slot_set +
                           "' yet. Known: " + (known.empty() ? "none" : known) + ".");
}

int64_t EmbeddingTable::SlotFloats(const std::string& slot_set) const {
  SharedLock lock(mutex_);
  return RequireSet(slot_set).rule.slot_floats(config_.dim);
}

void EmbeddingTable::ReadSlots(const SlotSet& set, uint32_t row, const float* record, float* weights, float* slots,
                               int64_t* stamp) const {
  const int64_t dim = config_.dim;
  std::copy_n(set.SlotsOf(row, record), set.rule.slot_floats(dim), slots);  // none and nowhere, of a rule without slots
  *stamp = -1;
  if (!set.rule.decays()) return;
  std::copy_n(record, dim, weights);  // settling moves them too; the row itself stays as it is
  set.Settle(row, dim, weights, slots);
  *stamp = set.history.calls();
}

void EmbeddingTable::Slots(const std::string& slot_set, const uint64_t* keys, int64_t n, float* slots,
                           int64_t* stamps) const {
  CheckKeys(keys, n);
  SharedLock lock(mutex_);
  CheckWhole();
  const SlotSet& set = RequireSet(slot_set);
  const int64_t floats = set.rule.slot_floats(config_.dim);
  const SerialExecutor executor;
  const Cpu cpu{executor};
  std::vector<float> weights(static_cast<size_t>(config_.dim));
  Records records;
  for (int64_t i = 0; i < n; ++i) {
    records.rows.push_back(FindRow(keys[i]));
    if (records.rows.back() == kNoRow) throw InvalidArgument(Label() + ": key " + KeyText(keys[i]) + " has no row.");
  }
  const float* const* all = PeekAll(cpu, &records);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t row = records.rows[static_cast<size_t>(i)];
    ReadSlots(set, row, all == nullptr ? rows_.Record(row) : all[i], weights.data(), slots + i * floats, stamps + i);
  }
}

void EmbeddingTable::Assign(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const float* values, int64_t n) {
  CheckKeys(keys, n);
  uint64_t* mine = scratch->Get<uint64_t>(n);
  int64_t* source = scratch->Get<int64_t>(n);
  uint32_t* rows = scratch->Get<uint32_t>(n);
  int64_t* missing = scratch->Get<int64_t>(n);
  int64_t count = 0, num_missing = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (OwnerOf(keys[i]) != config_.rank) continue;
    mine[count] = keys[i];
    source[count++] = i;
  }
  Lock lock(mutex_);
  cpu.executor.For(count, kLookupCycles, [&](int64_t begin, int64_t end) {
    bool bad = false;
    FindRows(mine + begin, end - begin, rows + begin, &bad);
  });
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] == kNoRow) missing[num_missing++] = i;
  InsertMissing(cpu, scratch, mine, missing, num_missing, rows);
  MarkChanged(rows, count);
  CopyAside(rows, count);
  const int64_t dim = config_.dim;
  auto store = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {  // serial: the last of duplicate keys wins
      float* record = rows_.Record(rows[i]);
      // Missed decay belongs to the old weights: settle it before they are replaced, or it would move the new ones.
      for (const auto& set : sets_) {
        if (!set->rule.decays()) continue;
        set->Settle(rows[i], dim, record, record + set->offset);
        *set->Stamp(rows[i]) = static_cast<uint32_t>(set->history.calls());
      }
      std::memcpy(record, values + source[i] * dim, static_cast<size_t>(dim) * sizeof(float));
    }
  };
  ForBroughtOrBreak(cpu, rows, count, /*is_begun=*/num_missing > 0, store);
}

void EmbeddingTable::Reserve(const Cpu& cpu, int64_t n, bool rows) {
  if (n < 0 || n > config_.capacity) {
    throw InvalidArgument(Label() + ": can reserve 0 to " + std::to_string(config_.capacity) +
                          " rows (its capacity). Received: " + std::to_string(n) + ".");
  }
  Lock lock(mutex_);
  // The system gives addresses for any amount, and ends processes once too much of it is used: ask before.
  const int64_t num_decaying =
      std::count_if(sets_.begin(), sets_.end(), [](const auto& s) { return s->rule.decays(); });
  const int64_t beside = num_decaying * static_cast<int64_t>(sizeof(uint32_t)) +
                         (history_ != nullptr ? static_cast<int64_t>(sizeof(RowHistory)) : 0);
  const int64_t slab_bytes = rows_.slab_bytes() + rows_.rows_per_slab() * beside;
  const double bytes = (rows ? static_cast<double>(rows_.MissingSlabs(n)) * static_cast<double>(slab_bytes) : 0.0) +
                       (index_ ? static_cast<double>(index_->MissingBytes(n)) : 0.0);
  if (const int64_t available = AvailableHostBytes(); bytes > static_cast<double>(available)) {
    throw OutOfMemory(Label() + ": to reserve " + std::to_string(n) + " rows takes " + Gibibytes(bytes) +
                      " more, and this process can have " + Gibibytes(static_cast<double>(available)) +
                      ". Reserve fewer rows, or spread the table over more workers.");
  }
  if (RowTier* tier = rows_.tier(); tier != nullptr) {
    tier->SetBeside(BytesBeside() + (index_ ? index_->MissingBytes(n) : 0));
    tier->CheckRoom();
  }
  if (rows) {
    for (int64_t row = 0; row < n; row += rows_.rows_per_slab()) MakeRoom(row);
  }
  if (rows && rows_.tier() == nullptr) {
    cpu.executor.For((n + rows_.rows_per_slab() - 1) / rows_.rows_per_slab(), 1 << 20, [&](int64_t begin, int64_t end) {
      for (int64_t slab = begin; slab < end; ++slab) rows_.TakePages(slab);
    });
  }
  if (index_) index_->Reserve(n);
}

int64_t EmbeddingTable::Erase(const uint64_t* keys, int64_t n) {
  CheckKeys(keys, n);
  Lock lock(mutex_);
  CheckWhole();
  // All that takes memory comes first, so that all keys go or none does.
  std::vector<uint32_t> found(static_cast<size_t>(n));
  std::vector<uint64_t> found_keys;
  bool bad = false;  // keys of other ranks have no row here
  FindRows(keys, n, found.data(), &bad);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t row = found[static_cast<size_t>(i)];
    if (row == kNoRow) continue;
    erased_.Touch(row);
    found[found_keys.size()] = row;
    found_keys.push_back(keys[i]);
  }
  found.resize(found_keys.size());
  ReserveRemoval(found.data(), static_cast<int64_t>(found.size()));
  if (candidates_) candidates_->Erase(keys, n);

  const bool is_watched = RowsAreWatched();
  int64_t erased = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const uint32_t row = found[i];
    if (*erased_.At(row) == epoch_ + 1) continue;  // a key given twice
    *erased_.At(row) = epoch_ + 1;
    RemoveRow(row, found_keys[i], is_watched);
    ++erased;
  }
  num_rows_ -= erased;
  if (erased > 0) {
    ++losses_;
    ++epoch_;
  }
  return erased;
}

void EmbeddingTable::ReserveRemoval(const uint32_t* rows, int64_t n) {
  if (saved_.is_on()) saved_.ReserveErased(static_cast<size_t>(n));
  CopyAside(rows, n);
  if (rows_.tier() != nullptr && rows_.tier()->has_versions()) rows_.tier()->Secure(rows, n);
  if (snapshot_) ReserveMore(&snapshot_->orphans, static_cast<size_t>(n));
  if (config_.hashed) ReserveMore(&free_rows_, static_cast<size_t>(n));
  if (tells_losses_) ReserveMore(&lost_, static_cast<size_t>(n));
}

int64_t EmbeddingTable::memory_bytes() const {
  SharedLock lock(mutex_);
  int64_t bytes = rows_.memory_bytes() + BytesBeside();
  if (snapshot_) bytes += snapshot_->rows * static_cast<int64_t>(sizeof(uint32_t)) + snapshot_->copies.bytes();
  return bytes;
}

// Expects the lock to be held, at least shared.
int64_t EmbeddingTable::BytesBeside() const {
  int64_t bytes = erased_.memory_bytes() + saved_.memory_bytes() + row_keys_.memory_bytes() +
                  static_cast<int64_t>(in_use_.size() * sizeof(uint64_t) + free_rows_.capacity() * sizeof(uint32_t));
  if (index_) bytes += index_->memory_bytes();
  if (by_bucket_) bytes += by_bucket_->memory_bytes();
  for (const auto& set : sets_) bytes += set->stamps.memory_bytes() + set->beside.memory_bytes();
  if (const auto& of_others = counted()) bytes += of_others->memory_bytes();
  return bytes;
}

}  // namespace sok
