// Keys to rows: the reading half of EmbeddingTable.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <utility>

#include "row_kernels.h"
#include "slot_set.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "table_snapshot.h"
#include "tasks.h"

namespace sok {
namespace {

constexpr int64_t kReadBlock = 32;  // records that are read at a time
constexpr int64_t kNoSplits[1] = {0};
constexpr int64_t kKeysPerTask = 4096;
constexpr int64_t kKeyCycles = 40;  // per key: cache misses, mostly hidden by prefetching
// Outputs above this go past the cache: they would push out everything else before anyone reads them.
constexpr int64_t kStreamBytes = int64_t{32} << 20;

}  // namespace

// A stretch of one feature: keys [begin, end), and the segments they fill if the feature is pooled.
struct EmbeddingTable::Task {
  int64_t feature = 0;
  int64_t begin = 0, end = 0;
  int64_t first_segment = 0, last_segment = 0;
  int64_t missing = 0;  // keys without a row
  bool bad = false;     // a key that the table cannot hold
};

uint32_t EmbeddingTable::FindRow(uint64_t key) const {
  uint32_t row;
  bool bad = false;
  FindRows(&key, 1, &row, &bad);
  return row;
}

void EmbeddingTable::FindRows(const uint64_t* keys, int64_t n, uint32_t* rows, bool* bad) const {
  if (index_) {
    if (config_.world_size > 1)
      for (int64_t i = 0; i < n; ++i) *bad = *bad || OwnerOf(keys[i]) != config_.rank;
    return index_->Find(keys, n, rows);
  }
  const Partition partition = config_.partition();
  const uint64_t num_legal = config_.num_legal(), shards = static_cast<uint64_t>(partition.num_shards());
  const uint64_t rank = static_cast<uint64_t>(config_.rank - partition.first_rank());  // among those that hold rows
  if (!partition.Holds(config_.rank) && n > 0) *bad = true;
  if (shards == 1) {
    if (ChosenRowKernels().narrow(keys, n, num_legal, rows)) *bad = true;
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t row = keys[i] / shards;
      const bool over = keys[i] >= num_legal || keys[i] - row * shards != rank;
      *bad = *bad || over;
      rows[i] = over ? kNoRow : static_cast<uint32_t>(row);
    }
  }
  if (num_rows_ == config_.capacity) return;
  for (int64_t i = 0; i < n; ++i)
    if (rows[i] != kNoRow && !InUse(rows[i])) rows[i] = kNoRow;
}

// Where the record of each row lies (null: no row), and asks the memory for what reading it will touch.
void EmbeddingTable::Locate(const uint32_t* rows, int64_t n, bool decays, const float** records) const {
  const int64_t floats = decays ? rows_.floats() : config_.dim;
  for (int64_t i = 0; i < n; ++i) {
    records[i] = rows[i] == kNoRow || !rows_.IsHere(rows[i]) ? nullptr : rows_.Record(rows[i]);
    if (records[i] == nullptr) continue;
    for (int64_t at = 0; at < floats; at += 16) __builtin_prefetch(records[i] + at);
    __builtin_prefetch(records[i] + floats - 1);  // records need not begin on a cache line
    if (!decays) continue;
    for (const auto& set : sets_)
      if (set->rule.decays()) __builtin_prefetch(set->Stamp(rows[i]));
  }
}

bool EmbeddingTable::KeysAreRowIds(const Feature& feature) const {
  return feature.keys_are_row_ids != nullptr && feature.row_splits != nullptr && feature.weights == nullptr &&
         !config_.hashed && rows_.tier() == nullptr && config_.world_size == 1 && num_rows_ == config_.capacity &&
         epoch_ == 0 && !HasDecay() && history_ == nullptr &&
         ChosenRowKernels().pool_keys({}, nullptr, kNoSplits, 0, 0, Combiner::kSum, config_.dim, nullptr);
}

int64_t EmbeddingTable::WriteRowIds(const Feature& feature, const Task& task, const uint32_t* rows) const {
  rows += task.begin;
  const int64_t n = task.end - task.begin;
  if (feature.place == nullptr) {
    return ChosenRowKernels().widen(rows, n, FirstRowId(), feature.row_ids + task.begin);
  }
  int64_t missing = 0;
  for (int64_t i = 0; i < n; ++i) {
    feature.row_ids[feature.place[task.begin + i]] = RowId(rows[i]);
    missing += rows[i] == kNoRow;
  }
  return missing;
}

void EmbeddingTable::Find(const Feature& feature, Task* task, uint32_t* rows) const {
  const uint64_t* keys = feature.keys + task->begin;
  const int64_t n = task->end - task->begin;
  if (rows == nullptr) {  // KeysAreRowIds
    task->bad = !ChosenRowKernels().all_below(keys, n, static_cast<uint64_t>(config_.capacity));
    return;
  }
  FindRows(keys, n, rows + task->begin, &task->bad);
  task->missing = WriteRowIds(feature, *task, rows);
}

void EmbeddingTable::Read(const Feature& feature, const Task& task, const uint32_t* rows, Made made, bool are_here,
                          float* buffer) {
  const RowKernels& kernels = ChosenRowKernels();
  const int64_t dim = config_.dim, n = task.end - task.begin;
  const bool pooled = feature.row_splits != nullptr;
  const RowView view = {rows_.slabs(), rows_.shift(), rows_.mask(), rows_.stride()};
  if (rows == nullptr) {  // KeysAreRowIds
    if (!task.bad) {
      kernels.pool_keys(view, feature.keys + task.begin, feature.row_splits, task.first_segment, task.last_segment,
                        feature.combiner, dim, feature.output);
    }
    return;
  }
  rows += task.begin;
  bool decays = HasDecay();
  if (made != Made::kNone && ChangesWhenRead()) {  // the table is ours alone, see LookupFeatures
    CopyAside(rows, n);
    if (are_here) SettleRows(rows, n);  // what is read for training is settled once
    if (history_ != nullptr) CountRows(rows, n);
    decays = false;
  }
  if (feature.output == nullptr) return;
  const bool waits = made == Made::kSome;
  if (pooled && waits && task.missing > 0) return;  // all of it once every key has its row

  const bool stream = !pooled && feature.place == nullptr && feature.n * dim * 4 >= kStreamBytes;
  // Rows that are still to be made are filled in later: until then they are gathered as zeros.
  const bool readable = are_here && (task.missing == 0 || waits);
  if (readable && !decays && feature.weights == nullptr && feature.place == nullptr) {
    const bool done = pooled ? kernels.pool(view, rows, feature.row_splits, task.first_segment, task.last_segment,
                                            feature.combiner, dim, feature.output)
                             : kernels.gather(view, rows, n, dim, stream, feature.output + task.begin * dim);
    if (stream) kernels.fence();
    if (done) return;
  }
  // Whatever else there is: a few rows ahead are on their way to the cache while those before them are used.
  constexpr int64_t kStep = kReadBlock / 2;
  const float* records[2][kStep];
  auto size_of = [&](int64_t at) { return std::max<int64_t>(0, std::min(kStep, n - at)); };
  int64_t segment = task.first_segment;
  auto zero_empty = [&](int64_t at) {  // segments that end at or before position `at` and were not filled
    for (; segment < task.last_segment && feature.row_splits[segment + 1] <= at; ++segment)
      std::fill_n(feature.output + segment * dim, dim, 0.0f);
  };
  Locate(rows, size_of(0), decays, records[0]);
  for (int64_t at = 0; at < n; at += kStep) {
    const int64_t count = size_of(at), first = task.begin + at;
    const float** from = records[at / kStep & 1];
    Locate(rows + at + kStep, size_of(at + kStep), decays, records[(at / kStep + 1) & 1]);
    for (int64_t i = 0; i < count; ++i) {
      if (from[i] != nullptr && !decays) continue;
      float* own = buffer + i * dim;  // the last kMaxSlots * dim floats behind the block are scratch of ReadRow
      from[i] = rows[at + i] == kNoRow && waits
                    ? own
                    : ReadRow(rows[at + i], feature.keys[first + i], own, buffer + kReadBlock * dim);
    }
    if (!pooled) {
      for (int64_t i = 0; i < count; ++i) {
        if (rows[at + i] == kNoRow && waits) continue;  // filled in once it has its row
        const int64_t place = feature.place == nullptr ? first + i : feature.place[first + i];
        std::memcpy(feature.output + place * dim, from[i], static_cast<size_t>(dim) * sizeof(float));
      }
      continue;
    }
    for (int64_t i = first; i < first + count;) {
      zero_empty(i);
      const int64_t segment_begin = feature.row_splits[segment], segment_end = feature.row_splits[segment + 1];
      const int64_t end = std::min(first + count, segment_end);
      float* out = feature.output + segment * dim;
      const float* weights = feature.weights == nullptr ? nullptr : feature.weights + i;
      kernels.accumulate(from + (i - first), weights, end - i, dim, i == segment_begin, out);
      i = end;
      if (end != segment_end) break;
      const float scale =
          SegmentScale(feature.combiner, feature.weights == nullptr ? nullptr : feature.weights + segment_begin,
                       segment_end - segment_begin);
      if (scale != 1.0f) kernels.scale(scale, dim, out);
      ++segment;
    }
  }
  if (pooled) zero_empty(task.end);
}

bool EmbeddingTable::HasDecay() const {
  return std::any_of(sets_.begin(), sets_.end(), [](const auto& set) { return set->rule.decays(); });
}

bool EmbeddingTable::MovesUntouchedRows() const {
  const SharedLock lock(mutex_);
  return HasDecay();
}

// The row itself is left alone, because readers share it; lookups for training and updates settle it for good.
const float* EmbeddingTable::ReadRow(uint32_t row, uint64_t key, float* out, float* scratch,
                                     const float* record) const {
  if (row == kNoRow) {
    if (config_.policies.reads_constant) {
      std::fill_n(out, config_.dim, config_.policies.constant);
    } else {
      FillRow(config_.initializer, key, config_.dim, out);
    }
    return out;
  }
  const float* weights = record;
  if (record == nullptr) {
    weights = record = rows_.Peek(row, &peeks_);
    if (!rows_.IsHere(row)) {  // it lasts as long as no other one is read
      std::memcpy(out, record, static_cast<size_t>(config_.dim) * sizeof(float));
      weights = out;
    }
  }
  for (const auto& set : sets_) {
    if (!set->rule.decays() || set->IsCurrent(row)) continue;
    set->Read(row, weights, record + set->offset, config_.dim, out, scratch);
    weights = out;
  }
  return weights;
}

// Positions without a row in the tasks of one feature, ascending.
void EmbeddingTable::CollectMissing(const Cpu& cpu, Scratch* scratch, const Task* tasks, int64_t num_tasks,
                                    const uint32_t* rows, int64_t** missing, int64_t* count) {
  int64_t* first = scratch->Get<int64_t>(num_tasks);
  *count = 0;
  for (int64_t t = 0; t < num_tasks; ++t) {
    first[t] = *count;
    *count += tasks[t].missing;
  }
  int64_t* out = *missing = scratch->Get<int64_t>(*count);
  ForTasks(cpu, num_tasks, (tasks[num_tasks - 1].end - tasks[0].begin) * 4, [&](int64_t, int64_t t) {
    if (tasks[t].missing == 0) return;
    int64_t* to = out + first[t];
    for (int64_t i = tasks[t].begin; i < tasks[t].end; ++i)
      if (rows[i] == kNoRow) *to++ = i;
  });
}

// Gives rows to the missing keys of one feature and fills in what the search had to leave out.
void EmbeddingTable::FinishFeature(const Cpu& cpu, Scratch* scratch, const Feature& feature, Task* tasks,
                                   int64_t num_tasks, int64_t losses, uint32_t* rows, float* buffers) {
  EmbeddingTable* table = feature.table;
  const int64_t dim = table->dim();
  Lock lock(table->mutex_);
  const bool stale = losses != table->losses_;
  if (stale) {  // row numbers found before may have been given to other keys since
    ForTasks(cpu, num_tasks, feature.n * kKeyCycles,
             [&](int64_t, int64_t t) { table->Find(feature, &tasks[t], rows); });
  }
  int64_t *missing, count;
  CollectMissing(cpu, scratch, tasks, num_tasks, rows, &missing, &count);
  int64_t admitted = table->Admit(cpu, scratch, feature.keys, missing, count);
  table->refused_ += count - admitted;
  const bool shares = table->config_.policies.shared_rows > 0;
  table->InsertMissing(cpu, scratch, feature.keys, missing, admitted, rows,
                       shares ? Fresh::kInherits : Fresh::kInitial);
  if (shares) {
    table->ShareRows(cpu, scratch, feature.keys, missing + admitted, count - admitted, rows);
    admitted = count;  // all of them have rows
  }
  if (stale || feature.row_splits != nullptr) {
    Task* again = scratch->Get<Task>(num_tasks);
    Task* end = stale ? std::copy_n(tasks, num_tasks, again)
                      : std::copy_if(tasks, tasks + num_tasks, again, [](const Task& t) { return t.missing > 0; });
    ForTasks(cpu, end - again, feature.n * kKeyCycles,
             [&](int64_t, int64_t t) { again[t].missing = table->WriteRowIds(feature, again[t], rows); });
    return table->ReadTasks(cpu, feature, again, end - again, rows, Made::kAll, buffers);
  }
  const bool changes = table->ChangesWhenRead();
  cpu.executor.For(count - admitted, kKeyCycles + dim, [&](int64_t begin, int64_t end) {
    for (int64_t k = admitted + begin; k < admitted + end; ++k) {
      const int64_t at = feature.place == nullptr ? missing[k] : feature.place[missing[k]];
      if (feature.output != nullptr) {
        table->ReadRow(kNoRow, feature.keys[missing[k]], feature.output + at * dim, nullptr);
      }
      feature.row_ids[at] = -1;
    }
  });
  uint32_t* made = table->rows_.tier() == nullptr ? nullptr : scratch->Get<uint32_t>(admitted);
  for (int64_t k = 0; made != nullptr && k < admitted; ++k) made[k] = rows[missing[k]];
  table->ForBrought(cpu, made, admitted, table->UseOfLookup(), [&](int64_t first, int64_t last) {
    cpu.executor.For(last - first, kKeyCycles + dim, [&](int64_t begin, int64_t end) {
      for (int64_t k = first + begin; k < first + end; ++k) {
        if (changes) {  // of a row that another call has made since the search
          table->CopyAside(rows + missing[k], 1);
          table->SettleRows(rows + missing[k], 1);
          if (table->history_ != nullptr) table->CountRows(rows + missing[k], 1);
        }
        const int64_t at = feature.place == nullptr ? missing[k] : feature.place[missing[k]];
        if (feature.output != nullptr) {
          std::memcpy(feature.output + at * dim, table->rows_.Record(rows[missing[k]]),
                      static_cast<size_t>(dim) * sizeof(float));
        }
        feature.row_ids[at] = table->RowId(rows[missing[k]]);
      }
    });
  });
}

void EmbeddingTable::ReadTasks(const Cpu& cpu, const Feature& feature, const Task* tasks, int64_t num_tasks,
                               const uint32_t* rows, Made made, float* buffers) {
  auto read = [&](int64_t begin, int64_t end, bool are_here) {
    ForTasks(cpu, end - begin, (tasks[end - 1].end - tasks[begin].begin) * (kKeyCycles + config_.dim),
             [&](int64_t worker, int64_t t) {
               Read(feature, tasks[begin + t], rows, made, are_here,
                    buffers + worker * (kReadBlock + kMaxSlots) * config_.dim);
             });
  };
  if (rows_.tier() == nullptr) return read(0, num_tasks, true);
  const RowUse use = made != Made::kNone ? UseOfLookup() : RowUse::kRead;
  const bool writes = use != RowUse::kRead;
  if (feature.output == nullptr && !writes) return read(0, num_tasks, false);  // nobody wants what is in the file
  for (int64_t t = 0, next; t < num_tasks; t = next) {
    const int64_t begin = tasks[t].begin, most = rows_.tier()->most_rows_here();
    for (next = t + 1; next < num_tasks && tasks[next].end - begin <= most;) ++next;
    const int64_t n = tasks[next - 1].end - begin;
    const bool are_here = Bring(cpu, rows + begin, n, use) == n;
    if (!are_here && writes) {  // one task with more rows than there is room for: a large segment
      ForBrought(cpu, rows + begin, n, use, [&](int64_t first, int64_t last) {
        CopyAside(rows + begin + first, last - first);
        SettleRows(rows + begin + first, last - first);
        if (CountsInRecords()) CountRows(rows + begin + first, last - first);  // before they leave again
      });
    }
    read(t, next, are_here);
  }
  CheckPeeks();
}

void EmbeddingTable::LookupFeatures(const Cpu& cpu, Scratch* scratch, const Feature* features, int64_t num_features,
                                    bool insert) {
  // Every feature is cut into tasks of about equal size, at segments if it is pooled.
  int64_t num_tasks = 0, cost = 0, max_dim = 1;
  int64_t* first_task = scratch->Get<int64_t>(num_features + 1);
  for (int64_t f = 0; f < num_features; ++f) {
    const Feature& feature = features[f];
    const int64_t items = feature.row_splits == nullptr ? feature.n : feature.segments;
    first_task[f] = num_tasks;
    num_tasks += std::max<int64_t>(1, std::min(items, (feature.n + items) / kKeysPerTask));
    cost += feature.n * (kKeyCycles + feature.table->dim()) + items * 10;
    max_dim = std::max(max_dim, feature.table->dim());
  }
  first_task[num_features] = num_tasks;
  Task* tasks = scratch->Get<Task>(num_tasks);
  uint32_t** rows = scratch->Get<uint32_t*>(num_features);
  for (int64_t f = 0; f < num_features; ++f) {
    const Feature& feature = features[f];
    rows[f] = scratch->Get<uint32_t>(feature.n);
    const bool pooled = feature.row_splits != nullptr;
    const int64_t items = pooled ? feature.segments : feature.n, pieces = first_task[f + 1] - first_task[f];
    for (int64_t p = 0; p < pieces; ++p) {
      Task& task = tasks[first_task[f] + p];
      const int64_t begin = items * p / pieces, end = items * (p + 1) / pieces;
      task = Task();
      task.feature = f;
      task.begin = pooled ? feature.row_splits[begin] : begin;
      task.end = pooled ? feature.row_splits[end] : end;
      task.first_segment = begin;
      task.last_segment = end;
    }
  }
  float* buffers = scratch->Get<float>(MaxWorkers(cpu, num_tasks) * (kReadBlock + kMaxSlots) * max_dim);
  int64_t* losses = scratch->Get<int64_t>(num_features);
  {
    // In the order of addresses, and each once: two calls that share tables cannot wait for one another.
    std::vector<EmbeddingTable*> tables;
    for (int64_t f = 0; f < num_features; ++f) tables.push_back(features[f].table);
    std::sort(tables.begin(), tables.end());
    tables.erase(std::unique(tables.begin(), tables.end()), tables.end());
    for (EmbeddingTable* table : tables)
      if (insert) table->FinishLate(cpu);
    std::vector<SharedLock> shared;
    std::vector<Lock> exclusive;
    for (EmbeddingTable* table : tables) {
      SharedLock lock(table->mutex_);
      if ((insert && table->ChangesWhenRead()) || table->rows_.tier() != nullptr) {  // a set once attached stays
        lock.unlock();
        exclusive.emplace_back(table->mutex_);
      } else {
        shared.push_back(std::move(lock));
      }
    }
    for (int64_t f = 0; f < num_features; ++f) {
      losses[f] = features[f].table->losses_;
      if (features[f].table->KeysAreRowIds(features[f])) rows[f] = nullptr;
      if (features[f].keys_are_row_ids != nullptr) *features[f].keys_are_row_ids = rows[f] == nullptr;
    }
    const Made made = insert ? Made::kSome : Made::kNone;
    ForTasks(cpu, num_tasks, cost, [&](int64_t worker, int64_t t) {
      const int64_t f = tasks[t].feature;
      EmbeddingTable* table = features[f].table;
      table->Find(features[f], &tasks[t], rows[f]);
      if (!insert && tasks[t].missing > 0 && table->config_.policies.shared_rows > 0) {
        table->FindShared(features[f].keys + tasks[t].begin, tasks[t].end - tasks[t].begin, rows[f] + tasks[t].begin);
        tasks[t].missing = table->WriteRowIds(features[f], tasks[t], rows[f]);
      }
      if (table->rows_.tier() != nullptr) return;  // rows have to be brought in first
      table->Read(features[f], tasks[t], rows[f], made, true, buffers + worker * (kReadBlock + kMaxSlots) * max_dim);
    });
    for (int64_t f = 0; f < num_features; ++f) {
      if (features[f].table->rows_.tier() == nullptr) continue;
      features[f].table->ReadTasks(cpu, features[f], tasks + first_task[f], first_task[f + 1] - first_task[f], rows[f],
                                   made, buffers);
    }
  }
  for (int64_t t = 0; t < num_tasks; ++t) {
    const Feature& feature = features[tasks[t].feature];
    if (tasks[t].bad) feature.table->CheckOwned(feature.keys, feature.n);
  }
  if (!insert) return;
  for (int64_t f = 0; f < num_features; ++f) {
    bool any = false;
    for (int64_t t = first_task[f]; t < first_task[f + 1]; ++t) any = any || tasks[t].missing > 0;
    if (!any) continue;
    FinishFeature(cpu, scratch, features[f], tasks + first_task[f], first_task[f + 1] - first_task[f], losses[f],
                  rows[f], buffers);
  }
}

// Hashed tables with several features that together have more keys than there is room for.
std::vector<EmbeddingTable*> EmbeddingTable::TightTables(const Feature* features, int64_t num_features) {
  std::vector<std::pair<EmbeddingTable*, int64_t>> asked;
  for (int64_t f = 0; f < num_features; ++f) asked.emplace_back(features[f].table, features[f].n);
  std::sort(asked.begin(), asked.end());
  std::vector<EmbeddingTable*> tight;
  for (size_t i = 0; i < asked.size();) {
    const EmbeddingTable* table = asked[i].first;
    const size_t first = i;
    int64_t n = 0;
    for (; i < asked.size() && asked[i].first == table; ++i) n += asked[i].second;
    if (i - first > 1 && table->index_ && table->size() + n > table->config_.capacity)
      tight.push_back(asked[first].first);
  }
  return tight;
}

void EmbeddingTable::LookupGroup(const Cpu& cpu, Scratch* scratch, const Feature* features, int64_t num_features,
                                 bool insert) {
  std::vector<EmbeddingTable*> tables;
  if (insert && num_features > 1) tables = TightTables(features, num_features);
  if (tables.empty()) return LookupFeatures(cpu, scratch, features, num_features, insert);
  // What is tight is first searched, and then gets what is missing in one piece.
  std::vector<Feature> ample;
  std::vector<std::vector<Feature>> tight(tables.size());
  for (int64_t f = 0; f < num_features; ++f) {
    const size_t t = static_cast<size_t>(std::find(tables.begin(), tables.end(), features[f].table) - tables.begin());
    (t < tables.size() ? tight[t] : ample).push_back(features[f]);
  }
  auto look = [&](const std::vector<Feature>& some, bool insert) {
    LookupFeatures(cpu, scratch, some.data(), static_cast<int64_t>(some.size()), insert);
  };
  for (const auto& of_table : tight) look(of_table, false);
  look(ample, true);
  for (const auto& of_table : tight) {
    AddMissing(cpu, scratch, of_table);
    look(of_table, true);
  }
}

// Gives rows to keys of one table that a lookup has found to have none.
void EmbeddingTable::AddMissing(const Cpu& cpu, Scratch* scratch, const std::vector<Feature>& features) {
  EmbeddingTable* table = features[0].table;
  const bool shares = table->config_.policies.shared_rows > 0;  // then ids may be of rows that keys share
  std::vector<uint64_t> keys;
  for (const Feature& f : features)
    for (int64_t i = 0; i < f.n; ++i)
      if (shares || f.row_ids[f.place == nullptr ? i : f.place[i]] < 0) keys.push_back(f.keys[i]);
  const int64_t n = static_cast<int64_t>(keys.size());
  int64_t* all = scratch->Get<int64_t>(n);
  std::iota(all, all + n, int64_t{0});
  const Lock lock(table->mutex_);
  const int64_t admitted = table->Admit(cpu, scratch, keys.data(), all, n);
  table->InsertMissing(cpu, scratch, keys.data(), all, admitted, scratch->Get<uint32_t>(n),
                       shares ? Fresh::kInherits : Fresh::kInitial);
}

void EmbeddingTable::Lookup(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, bool insert,
                            const int64_t* place, float* out, int64_t* row_ids) {
  Feature feature{this, keys, n};
  feature.place = place;
  feature.output = out;
  feature.row_ids = row_ids;
  LookupGroup(cpu, scratch, &feature, 1, insert);
}

}  // namespace sok
