#include "sok/embedding_table.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <utility>

#include "sok/error.h"
#include "sok/partition.h"
#include "sok/unique.h"

namespace sok {
namespace {

constexpr int64_t kLookupCycles = 100;  // per key: two cache misses, mostly hidden by prefetching
constexpr uint32_t kNoRow = HashTable::kNoRow;

// The `use` of a search that wants row numbers only.
struct Nothing {
  void operator()(int64_t, int64_t) const {}
};

void CopyRow(float* to, const float* from, int64_t dim) {
  switch (dim) {  // constant sizes become a few vector moves
    case 8:
      std::memcpy(to, from, 8 * sizeof(float));
      break;
    case 16:
      std::memcpy(to, from, 16 * sizeof(float));
      break;
    case 32:
      std::memcpy(to, from, 32 * sizeof(float));
      break;
    default:
      std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(float));
  }
}

bool AllFinite(const float* x, int64_t n) {
  float sum = 0.0f;  // x * 0 is zero for a finite x, NaN for anything else
  for (int64_t i = 0; i < n; ++i) sum += x[i] * 0.0f;
  return sum == 0.0f;
}

}  // namespace

// One optimizer's share of every record, and what it remembers beside the records.
struct EmbeddingTable::SlotSet {
  std::string name;
  UpdateRule rule;  // of the last call
  int64_t offset = 0;
  AlphaHistory history;                             // decaying rules only
  std::vector<std::unique_ptr<uint32_t[]>> stamps;  // [slabs][rows_per_slab]: call up to which a row is current
};

EmbeddingTable::EmbeddingTable(TableConfig config)
    : config_([&config] {
        auto check = [&](bool ok, const std::string& text) {
          if (!ok) throw InvalidArgument("table '" + config.name + "': " + text);
        };
        check(config.dim >= 1, "dim must be at least 1. Received: " + std::to_string(config.dim) + ".");
        check(config.capacity >= 1 && config.capacity < INT64_C(0xFFFFFFFF),
              "capacity must lie in [1, 2^32 - 2]. Received: " + std::to_string(config.capacity) + ".");
        check(config.world_size >= 1 && config.rank >= 0 && config.rank < config.world_size,
              "rank must lie in [0, world_size). Received: rank " + std::to_string(config.rank) + " of " +
                  std::to_string(config.world_size) + ".");
        if (config.initializer.kind == InitKind::kBank) {
          check(config.initializer.bank_rows >= 1 &&
                    static_cast<int64_t>(config.initializer.bank.size()) == config.initializer.bank_rows * config.dim,
                "the initializer's bank must have shape [P, dim] with P >= 1");
        }
        return std::move(config);
      }()),
      rows_(config_.dim, config_.capacity) {
  if (config_.hashed) {
    index_ = std::make_unique<HashTable>(config_.capacity);
  } else {
    in_use_.assign(static_cast<size_t>((config_.capacity + 63) / 64), 0);
  }
}

EmbeddingTable::~EmbeddingTable() = default;

std::string EmbeddingTable::Label() const {
  return "table '" + config_.name + "' (rank " + std::to_string(config_.rank) + " of " +
         std::to_string(config_.world_size) + ")";
}

std::string EmbeddingTable::KeyText(uint64_t key) const {
  return config_.is_unsigned ? std::to_string(key) : std::to_string(static_cast<int64_t>(key));
}

int EmbeddingTable::OwnerOf(uint64_t key) const { return Owner(key, config_.world_size, config_.is_unsigned); }

bool EmbeddingTable::IsLegal(uint64_t key) const {
  // A negative key is huge as an unsigned word, so one comparison serves both.
  return config_.hashed || key < static_cast<uint64_t>(config_.capacity) * static_cast<uint64_t>(config_.world_size);
}

void EmbeddingTable::CheckKey(uint64_t key) const {
  if (IsLegal(key)) return;
  throw InvalidArgument(Label() + ": key " + KeyText(key) + " is outside [0, " +
                        std::to_string(config_.capacity * config_.world_size) +
                        ") = [0, capacity per worker * workers). A table with use_hashtable=False uses keys as row "
                        "numbers; raise its capacity or use use_hashtable=True.");
}

void EmbeddingTable::CheckKeys(const uint64_t* keys, int64_t n) const {
  if (config_.hashed) return;
  for (int64_t i = 0; i < n; ++i) CheckKey(keys[i]);
}

// A shard that stored another rank's key would hide it from every lookup: refuse.
void EmbeddingTable::CheckOwned(const uint64_t* keys, int64_t n) const {
  CheckKeys(keys, n);
  if (config_.world_size == 1) return;
  for (int64_t i = 0; i < n; ++i) {
    const int owner = OwnerOf(keys[i]);
    if (owner == config_.rank) continue;
    throw InvalidArgument(Label() + ": key " + KeyText(keys[i]) + " belongs to rank " + std::to_string(owner) +
                          " (key mod workers). Look keys of all ranks up through sok.lookup or a layer.");
  }
}

bool EmbeddingTable::InUse(int64_t row) const { return (in_use_[static_cast<size_t>(row >> 6)] >> (row & 63)) & 1; }

void EmbeddingTable::MarkInUse(int64_t row, bool used) {
  const uint64_t bit = uint64_t{1} << (row & 63);
  uint64_t& word = in_use_[static_cast<size_t>(row >> 6)];
  word = used ? word | bit : word & ~bit;
}

uint64_t EmbeddingTable::KeyOfRow(int64_t row) const {
  if (!config_.hashed) {
    return static_cast<uint64_t>(row) * static_cast<uint64_t>(config_.world_size) + static_cast<uint64_t>(config_.rank);
  }
  uint64_t found = 0;  // only error messages ask: a scan will do
  index_->ForEach([&](uint64_t key, uint32_t r) {
    if (r == row) found = key;
  });
  return found;
}

uint32_t EmbeddingTable::FindRow(uint64_t key) const {
  uint32_t row;
  FindRows(&key, 1, &row);
  return row;
}

template <class Use>
void EmbeddingTable::FindAndUse(const uint64_t* keys, int64_t n, uint32_t* rows, const Use& use) const {
  // Three blocks in flight: the buckets of the one after next, the records of the next, and the one in use. Each stage
  // asks the memory for what the next stage needs, so that the latencies of many keys overlap.
  constexpr int64_t kBlock = HashTable::kBlock;
  const HashTable::Bucket* homes[2][kBlock];
  const uint64_t world = static_cast<uint64_t>(config_.world_size);
  const int64_t num_blocks = (n + kBlock - 1) / kBlock;
  auto size_of = [&](int64_t block) { return static_cast<int>(std::min<int64_t>(kBlock, n - block * kBlock)); };
  auto prepare = [&](int64_t block) {
    if (index_) index_->Prepare(keys + block * kBlock, size_of(block), homes[block & 1]);
  };
  auto resolve = [&](int64_t block) {
    const uint64_t* from = keys + block * kBlock;
    uint32_t* to = rows + block * kBlock;
    if (index_) {
      index_->Resolve(from, homes[block & 1], size_of(block), to);
    } else {
      for (int i = 0; i < size_of(block); ++i) {
        const uint64_t row = world == 1 ? from[i] : from[i] / world;
        to[i] = InUse(static_cast<int64_t>(row)) ? static_cast<uint32_t>(row) : kNoRow;
      }
    }
    constexpr bool kTouchRows = !std::is_same_v<Use, Nothing>;
    if constexpr (kTouchRows) {
      for (int i = 0; i < size_of(block); ++i) {
        if (to[i] == kNoRow) continue;
        const char* record = reinterpret_cast<const char*>(rows_.Record(to[i]));
        for (int64_t at = 0; at < config_.dim * 4; at += 64) __builtin_prefetch(record + at);
      }
    }
  };
  if (num_blocks > 0) prepare(0);
  if (num_blocks > 1) prepare(1);
  if (num_blocks > 0) resolve(0);
  for (int64_t block = 0; block < num_blocks; ++block) {
    if (block + 2 < num_blocks) prepare(block + 2);
    if (block + 1 < num_blocks) resolve(block + 1);
    use(block * kBlock, block * kBlock + size_of(block));
  }
}

void EmbeddingTable::FindRows(const uint64_t* keys, int64_t n, uint32_t* rows) const {
  FindAndUse(keys, n, rows, Nothing{});
}

bool EmbeddingTable::HasDecay() const {
  return std::any_of(sets_.begin(), sets_.end(), [](const auto& set) { return set->rule.decays(); });
}

void EmbeddingTable::Replay(const SlotSet& set, int64_t row, float* w, float* m, float* v) const {
  const uint32_t stamp =
      set.stamps[static_cast<size_t>(row / rows_.rows_per_slab())][static_cast<size_t>(row % rows_.rows_per_slab())];
  ReplayDecay(set.history, set.rule, stamp, set.history.calls(), config_.dim, w, m, v);
}

// The weights of a row after every update so far. buffer: [3 * dim], used when the row has missed some.
const float* EmbeddingTable::ReadRow(uint32_t row, uint64_t key, float* buffer) const {
  if (row == kNoRow) {
    FillRow(config_.initializer, key, config_.dim, buffer);
    return buffer;
  }
  const float* record = rows_.Record(row);
  const float* weights = record;
  const int64_t dim = config_.dim;
  for (const auto& set : sets_) {
    if (!set->rule.decays()) continue;
    const auto& stamps = set->stamps[row / static_cast<uint64_t>(rows_.rows_per_slab())];
    if (stamps[row % static_cast<uint64_t>(rows_.rows_per_slab())] == set->history.calls()) continue;
    // The row itself is left alone (readers share it); the next update does this work for good.
    if (weights != buffer) std::memcpy(buffer, weights, static_cast<size_t>(dim) * sizeof(float));
    std::memcpy(buffer + dim, record + set->offset, static_cast<size_t>(2 * dim) * sizeof(float));
    Replay(*set, row, buffer, buffer + dim, buffer + 2 * dim);
    weights = buffer;
  }
  return weights;
}

void EmbeddingTable::InitRow(uint32_t row, uint64_t key) {
  float* record = rows_.Record(row);
  FillRow(config_.initializer, key, config_.dim, record);
  for (const auto& set : sets_) {
    float* slots = record + set->offset;
    std::fill(slots, slots + set->rule.num_slots() * config_.dim, set->rule.slot_init);
    if (!set->rule.decays()) continue;
    const uint64_t per_slab = static_cast<uint64_t>(rows_.rows_per_slab());
    set->stamps[row / per_slab][row % per_slab] = static_cast<uint32_t>(set->history.calls());
  }
}

void EmbeddingTable::InsertHashed(const uint64_t* keys, const std::vector<int64_t>& missing, uint32_t* rows,
                                  std::vector<std::pair<uint32_t, uint64_t>>* fresh) {
  const int64_t old_next = next_row_;
  const size_t old_free = free_rows_.size();
  size_t taken = 0;  // from the end of free_rows_, which is only cut when all went well
  auto undo = [&] {
    for (const auto& [row, key] : *fresh) index_->Erase(key);
    next_row_ = old_next;
  };
  try {
    constexpr size_t kBlock = HashTable::kBlock;
    uint64_t ahead[kBlock];
    const HashTable::Bucket* homes[kBlock];
    for (size_t k = 0; k < missing.size(); ++k) {
      if (k % kBlock == 0) {  // ask for the buckets of the next block of keys together
        const size_t block = std::min(kBlock, missing.size() - k);
        for (size_t j = 0; j < block; ++j) ahead[j] = keys[missing[k + j]];
        index_->Prepare(ahead, static_cast<int>(block), homes);
      }
      const int64_t i = missing[k];
      const bool has_free = taken < old_free;
      // With every row taken, the key may still be there (a duplicate of one just added): look before giving up.
      const bool full = !has_free && next_row_ == config_.capacity;
      const uint32_t candidate = full       ? kNoRow
                                 : has_free ? free_rows_[old_free - 1 - taken]
                                            : static_cast<uint32_t>(next_row_);
      const auto [row, added] =
          full ? std::make_pair(index_->Find(keys[i]), false) : index_->FindOrInsert(keys[i], candidate);
      if (row == kNoRow) {
        throw TableFull(Label() + ": full: all " + std::to_string(config_.capacity) + " rows are in use and key " +
                        KeyText(keys[i]) +
                        " is new. Nothing of this step was stored. Raise max_vocabulary_size_per_gpu (the capacity of "
                        "each worker's shard).");
      }
      rows[i] = row;
      if (!added) continue;
      fresh->emplace_back(row, keys[i]);
      if (has_free) {
        ++taken;
      } else {
        ++next_row_;
      }
    }
    for (const auto& [row, key] : *fresh) rows_.Touch(row);
  } catch (...) {
    undo();
    throw;
  }
  free_rows_.resize(old_free - taken);
}

void EmbeddingTable::InsertMissing(const Cpu& cpu, const uint64_t* keys, const std::vector<int64_t>& missing,
                                   uint32_t* rows) {
  std::vector<std::pair<uint32_t, uint64_t>> fresh;
  if (config_.hashed) {
    InsertHashed(keys, missing, rows, &fresh);
  } else {
    const uint64_t world = static_cast<uint64_t>(config_.world_size);
    for (const int64_t i : missing) rows_.Touch(static_cast<int64_t>(keys[i] / world));
    for (const int64_t i : missing) {
      rows[i] = static_cast<uint32_t>(keys[i] / world);
      if (InUse(rows[i])) continue;
      MarkInUse(rows[i], true);
      fresh.emplace_back(rows[i], keys[i]);
    }
  }
  num_rows_ += static_cast<int64_t>(fresh.size());
  const uint64_t per_slab = static_cast<uint64_t>(rows_.rows_per_slab());
  for (const auto& set : sets_) {
    if (!set->rule.decays()) continue;
    for (const auto& [row, key] : fresh) {
      auto& stamps = set->stamps[row / per_slab];
      if (!stamps) stamps = std::make_unique<uint32_t[]>(per_slab);
    }
  }
  cpu.executor.For(static_cast<int64_t>(fresh.size()), 50 + 20 * config_.dim, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      InitRow(fresh[static_cast<size_t>(i)].first, fresh[static_cast<size_t>(i)].second);
  });
}

namespace {

// Positions whose row is missing, ascending. Serial: it runs once per call over 4-byte numbers.
std::vector<int64_t> Missing(const uint32_t* rows, int64_t n) {
  std::vector<int64_t> missing;
  for (int64_t i = 0; i < n; ++i)
    if (rows[i] == kNoRow) missing.push_back(i);
  return missing;
}

void WriteRowIds(const uint32_t* rows, int64_t n, int64_t* row_ids) {
  for (int64_t i = 0; i < n; ++i) row_ids[i] = rows[i] == kNoRow ? -1 : static_cast<int64_t>(rows[i]);
}

}  // namespace

void EmbeddingTable::Lookup(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, bool insert,
                            const int64_t* place, float* out, int64_t* row_ids) {
  CheckOwned(keys, n);
  uint32_t* rows = scratch->Get<uint32_t>(n);
  const int64_t dim = config_.dim;
  auto out_row = [&](int64_t i) { return out + (place == nullptr ? i : place[i]) * dim; };
  auto gather = [&](int64_t begin, int64_t end, const int64_t* which) {
    std::vector<float> buffer(static_cast<size_t>(3 * dim));
    for (int64_t k = begin; k < end; ++k) {
      const int64_t i = which == nullptr ? k : which[k];
      row_ids[place == nullptr ? i : place[i]] = rows[i];
      std::memcpy(out_row(i), ReadRow(rows[i], keys[i], buffer.data()), static_cast<size_t>(dim) * sizeof(float));
    }
  };
  int64_t erasures;
  std::atomic<bool> any_missing{false};
  {
    SharedLock lock(mutex_);
    erasures = erasures_;
    const bool decays = HasDecay();
    cpu.executor.For(n, kLookupCycles + dim, [&](int64_t begin, int64_t end) {
      std::vector<float> buffer(static_cast<size_t>(3 * dim));
      bool missing = false;
      FindAndUse(keys + begin, end - begin, rows + begin, [&](int64_t from, int64_t to) {
        for (int64_t i = begin + from; i < begin + to; ++i) {
          row_ids[place == nullptr ? i : place[i]] = rows[i] == kNoRow ? -1 : static_cast<int64_t>(rows[i]);
          if (rows[i] == kNoRow && insert) {
            missing = true;
            continue;
          }
          const float* row =
              rows[i] == kNoRow || decays ? ReadRow(rows[i], keys[i], buffer.data()) : rows_.Record(rows[i]);
          CopyRow(out_row(i), row, dim);
        }
      });
      if (missing) any_missing.store(true, std::memory_order_relaxed);
    });
  }
  if (any_missing.load()) {
    Lock lock(mutex_);
    if (erasures != erasures_) {
      FindRows(keys, n, rows);  // row numbers found above may have been given to other keys since
      InsertMissing(cpu, keys, Missing(rows, n), rows);
      cpu.executor.For(n, kLookupCycles, [&](int64_t begin, int64_t end) { gather(begin, end, nullptr); });
    } else {
      const std::vector<int64_t> missing = Missing(rows, n);
      InsertMissing(cpu, keys, missing, rows);
      cpu.executor.For(static_cast<int64_t>(missing.size()), kLookupCycles,
                       [&](int64_t begin, int64_t end) { gather(begin, end, missing.data()); });
    }
  }
}

void EmbeddingTable::Pool(const Cpu& cpu, const uint64_t* keys, const uint32_t* rows, const int64_t* row_splits,
                          const float* weights, int64_t segments, Combiner combiner, float* output) const {
  const int64_t dim = config_.dim;
  const bool decays = HasDecay();
  const int64_t n = segments > 0 ? row_splits[segments] : 0;
  cpu.executor.For(segments, 30 + (30 + dim) * (segments > 0 ? n / segments + 1 : 1), [&](int64_t begin, int64_t end) {
    constexpr int64_t kAhead = 16;
    std::vector<float> buffer(static_cast<size_t>(3 * dim));
    for (int64_t s = begin; s < end; ++s) {
      float* out = output + s * dim;
      std::fill(out, out + dim, 0.0f);
      const int64_t first = row_splits[s], last = row_splits[s + 1];
      for (int64_t i = first; i < last; ++i) {
        if (i + kAhead < n && rows[i + kAhead] != kNoRow) __builtin_prefetch(rows_.Record(rows[i + kAhead]));
        const float* row =
            rows[i] == kNoRow || decays ? ReadRow(rows[i], keys[i], buffer.data()) : rows_.Record(rows[i]);
        if (weights == nullptr) {
          for (int64_t j = 0; j < dim; ++j) out[j] += row[j];
        } else {
          for (int64_t j = 0; j < dim; ++j) out[j] += weights[i] * row[j];
        }
      }
      const float scale = SegmentScale(combiner, weights == nullptr ? nullptr : weights + first, last - first);
      if (scale != 1.0f)
        for (int64_t j = 0; j < dim; ++j) out[j] *= scale;
    }
  });
}

void EmbeddingTable::LookupCombine(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n,
                                   const int64_t* row_splits, const float* weights, int64_t segments, Combiner combiner,
                                   bool insert, float* output, int64_t* row_ids) {
  CheckOwned(keys, n);
  uint32_t* rows = scratch->Get<uint32_t>(n);
  auto find_all = [&] {
    cpu.executor.For(n, kLookupCycles,
                     [&](int64_t begin, int64_t end) { FindRows(keys + begin, end - begin, rows + begin); });
  };
  std::vector<int64_t> missing;
  int64_t erasures;
  bool done = false;
  {
    SharedLock lock(mutex_);
    erasures = erasures_;
    find_all();
    if (insert) missing = Missing(rows, n);
    if (missing.empty()) {
      Pool(cpu, keys, rows, row_splits, weights, segments, combiner, output);
      done = true;
    }
  }
  if (!done) {
    Lock lock(mutex_);
    if (erasures != erasures_) {
      find_all();
      missing = Missing(rows, n);
    }
    InsertMissing(cpu, keys, missing, rows);
    Pool(cpu, keys, rows, row_splits, weights, segments, combiner, output);
  }
  WriteRowIds(rows, n, row_ids);
}

const EmbeddingTable::SlotSet* EmbeddingTable::FindSet(const std::string& slot_set) const {
  for (const auto& set : sets_)
    if (set->name == slot_set) return set.get();
  return nullptr;
}

EmbeddingTable::SlotSet* EmbeddingTable::FindOrAttach(const UpdateRule& rule, const std::string& slot_set) {
  for (const auto& set : sets_) {
    if (set->name != slot_set) continue;
    if (set->rule.rule != rule.rule) {
      throw InvalidArgument(Label() + ": slot set '" + slot_set +
                            "' belongs to another rule. Give each optimizer its own name.");
    }
    set->rule = rule;
    return set.get();
  }
  auto set = std::make_unique<SlotSet>();
  set->name = slot_set;
  set->rule = rule;
  if (rule.decays()) {
    const size_t per_slab = static_cast<size_t>(rows_.rows_per_slab());
    set->stamps.resize(static_cast<size_t>(rows_.num_slabs()));
    for (size_t i = 0; i < set->stamps.size(); ++i)
      if (rows_.Has(static_cast<int64_t>(i * per_slab))) set->stamps[i] = std::make_unique<uint32_t[]>(per_slab);
  }
  sets_.reserve(sets_.size() + 1);
  if (rule.num_slots() > 0) set->offset = rows_.AddFloats(rule.num_slots() * config_.dim, rule.slot_init);
  sets_.push_back(std::move(set));
  return sets_.back().get();
}

void EmbeddingTable::Apply(const Cpu& cpu, Scratch* scratch, const UpdateRule& rule, const std::string& slot_set,
                           Nonfinite nonfinite, const int64_t* row_ids, const float* grads, int64_t n) {
  const int64_t dim = config_.dim;
  // Row ids of -1 (unseen keys read without inserting, header rows) form one group that is skipped.
  uint64_t* ids = scratch->Get<uint64_t>(n);
  for (int64_t i = 0; i < n; ++i) ids[i] = row_ids[i] < 0 ? ~uint64_t{0} : static_cast<uint64_t>(row_ids[i]);
  const Groups groups = GroupKeys(cpu, scratch, ids, n);
  auto row_of = [&](int64_t g) { return row_ids[groups.positions[groups.offsets[g]]]; };

  Lock lock(mutex_);
  const int64_t limit = config_.hashed ? next_row_ : config_.capacity;
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t row = row_of(g);
    if (row >= limit || (row >= 0 && !rows_.Has(row))) {
      throw InvalidArgument(
          Label() + ": gradient for row id " + std::to_string(row) +
          ", which this shard does not have. Row ids come from a lookup of the same table on the same worker.");
    }
  }
  auto sum_group = [&](int64_t group, float* g) {
    const uint32_t first = groups.offsets[group], last = groups.offsets[group + 1];
    std::memcpy(g, grads + int64_t{groups.positions[first]} * dim, static_cast<size_t>(dim) * sizeof(float));
    for (uint32_t i = first + 1; i < last; ++i) {
      const float* more = grads + int64_t{groups.positions[i]} * dim;
      for (int64_t j = 0; j < dim; ++j) g[j] += more[j];
    }
  };
  if (nonfinite == Nonfinite::kRaise) {
    // The sums, not the addends: finite duplicates may overflow together.
    std::vector<float> g(static_cast<size_t>(dim));
    for (int64_t group = 0; group < groups.num_groups; ++group) {
      if (row_of(group) < 0) continue;
      sum_group(group, g.data());
      if (AllFinite(g.data(), dim)) continue;
      throw InvalidArgument(Label() + ": the gradient of key " + KeyText(KeyOfRow(row_of(group))) +
                            " holds NaN or infinity; nothing was updated (nonfinite_gradients='raise').");
    }
  }
  SlotSet* set = FindOrAttach(rule, slot_set);
  const int64_t calls = set->history.calls();
  const uint64_t per_slab = static_cast<uint64_t>(rows_.rows_per_slab());

  cpu.executor.For(groups.num_groups, kLookupCycles + 10 * dim, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(static_cast<size_t>(dim));
    float* g = buffer.data();
    constexpr int64_t kAhead = 8;
    for (int64_t group = begin; group < end; ++group) {
      if (group + kAhead < end && row_of(group + kAhead) >= 0)
        __builtin_prefetch(rows_.Record(row_of(group + kAhead)), 1);
      const int64_t row = row_of(group);
      if (row < 0) continue;
      sum_group(group, g);
      if (nonfinite == Nonfinite::kSkip && !AllFinite(g, dim)) continue;
      float* w = rows_.Record(row);
      float* slots = w + set->offset;
      switch (rule.rule) {
        case Rule::kSgd:
          for (int64_t j = 0; j < dim; ++j) SgdElement(g[j], rule.lr, &w[j]);
          break;
        case Rule::kAdagrad:
          for (int64_t j = 0; j < dim; ++j) AdagradElement(g[j], rule.lr, rule.epsilon, &w[j], &slots[j]);
          break;
        case Rule::kAdam: {
          uint32_t& stamp = set->stamps[static_cast<uint64_t>(row) / per_slab][static_cast<uint64_t>(row) % per_slab];
          if (stamp != calls) Replay(*set, row, w, slots, slots + dim);
          stamp = static_cast<uint32_t>(calls + 1);
        }
          [[fallthrough]];
        case Rule::kLazyAdam:
          for (int64_t j = 0; j < dim; ++j) {
            AdamElement(g[j], rule.lr, rule.one_minus_beta_1, rule.one_minus_beta_2, rule.epsilon, &w[j], &slots[j],
                        &slots[dim + j]);
          }
          break;
      }
    }
  });
  if (rule.decays()) set->history.Append(rule.lr);
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
    std::sort(rows.begin(), rows.end());
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
  const SlotSet* set = slot_set.empty() ? nullptr : &RequireSet(slot_set);
  const int64_t dim = config_.dim, slot_floats = set == nullptr ? 0 : set->rule.num_slots() * dim;
  const std::vector<std::pair<uint32_t, uint64_t>> rows = RowsInOrder();
  const ExportTarget to = allocate(static_cast<int64_t>(rows.size()), slot_floats);
  cpu.executor.For(static_cast<int64_t>(rows.size()), kLookupCycles + dim, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(static_cast<size_t>(3 * dim));
    for (int64_t i = begin; i < end; ++i) {
      const auto [row, key] = rows[static_cast<size_t>(i)];
      if (to.keys != nullptr) to.keys[i] = key;
      if (to.rows != nullptr) CopyRow(to.rows + i * dim, ReadRow(row, key, buffer.data()), dim);
      if (to.stamps != nullptr) ReadSlots(*set, row, to.slots + i * slot_floats, to.stamps + i);
    }
  });
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
  return RequireSet(slot_set).rule.num_slots() * config_.dim;
}

void EmbeddingTable::ReadSlots(const SlotSet& set, uint32_t row, float* slots, int64_t* stamp) const {
  const int64_t dim = config_.dim;
  const float* record = rows_.Record(row);
  std::memcpy(slots, record + set.offset, static_cast<size_t>(set.rule.num_slots() * dim) * sizeof(float));
  *stamp = -1;
  if (!set.rule.decays()) return;
  std::vector<float> weights(record, record + dim);  // the replay moves them too; the row itself stays as it is
  Replay(set, row, weights.data(), slots, slots + dim);
  *stamp = set.history.calls();
}

void EmbeddingTable::Slots(const std::string& slot_set, const uint64_t* keys, int64_t n, float* slots,
                           int64_t* stamps) const {
  CheckKeys(keys, n);
  SharedLock lock(mutex_);
  const SlotSet& set = RequireSet(slot_set);
  const int64_t floats = set.rule.num_slots() * config_.dim;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t row = FindRow(keys[i]);
    if (row == kNoRow) throw InvalidArgument(Label() + ": key " + KeyText(keys[i]) + " has no row.");
    ReadSlots(set, row, slots + i * floats, stamps + i);
  }
}

void EmbeddingTable::Assign(const Cpu& cpu, const uint64_t* keys, const float* values, int64_t n) {
  CheckKeys(keys, n);
  std::vector<uint64_t> mine;
  std::vector<int64_t> source;
  for (int64_t i = 0; i < n; ++i) {
    if (OwnerOf(keys[i]) != config_.rank) continue;
    mine.push_back(keys[i]);
    source.push_back(i);
  }
  const int64_t count = static_cast<int64_t>(mine.size());
  std::vector<uint32_t> rows(mine.size());
  Lock lock(mutex_);
  FindRows(mine.data(), count, rows.data());
  InsertMissing(cpu, mine.data(), Missing(rows.data(), count), rows.data());
  const int64_t dim = config_.dim;
  std::vector<float> buffer(static_cast<size_t>(dim));
  for (int64_t i = 0; i < count; ++i) {  // serial: the last of duplicate keys wins
    float* record = rows_.Record(rows[static_cast<size_t>(i)]);
    // Missed decay belongs to the old weights: settle it before they are replaced, or it would move the new ones.
    for (const auto& set : sets_) {
      if (!set->rule.decays()) continue;
      const int64_t row = rows[static_cast<size_t>(i)];
      Replay(*set, row, buffer.data(), record + set->offset, record + set->offset + dim);
      const uint64_t per_slab = static_cast<uint64_t>(rows_.rows_per_slab());
      set->stamps[static_cast<uint64_t>(row) / per_slab][static_cast<uint64_t>(row) % per_slab] =
          static_cast<uint32_t>(set->history.calls());
    }
    std::memcpy(record, values + source[static_cast<size_t>(i)] * dim, static_cast<size_t>(dim) * sizeof(float));
  }
}

void EmbeddingTable::Reserve(int64_t n) {
  if (n < 0 || n > config_.capacity) {
    throw InvalidArgument(Label() + ": can reserve 0 to " + std::to_string(config_.capacity) +
                          " rows (its capacity). Received: " + std::to_string(n) + ".");
  }
  Lock lock(mutex_);
  if (index_) index_->Reserve(n);
}

int64_t EmbeddingTable::Erase(const uint64_t* keys, int64_t n) {
  CheckKeys(keys, n);
  Lock lock(mutex_);
  int64_t erased = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (OwnerOf(keys[i]) != config_.rank) continue;
    const uint32_t row = FindRow(keys[i]);
    if (row == kNoRow) continue;
    if (config_.hashed) {
      free_rows_.reserve(free_rows_.size() + 1);
      index_->Erase(keys[i]);
      free_rows_.push_back(row);
    } else {
      MarkInUse(row, false);
    }
    ++erased;
  }
  num_rows_ -= erased;
  if (erased > 0) ++erasures_;
  return erased;
}

int64_t EmbeddingTable::memory_bytes() const {
  SharedLock lock(mutex_);
  int64_t bytes = rows_.memory_bytes() + static_cast<int64_t>(in_use_.size() * sizeof(uint64_t));
  if (index_) bytes += index_->memory_bytes();
  for (const auto& set : sets_)
    for (const auto& stamps : set->stamps)
      if (stamps) bytes += rows_.rows_per_slab() * static_cast<int64_t>(sizeof(uint32_t));
  return bytes;
}

}  // namespace sok
