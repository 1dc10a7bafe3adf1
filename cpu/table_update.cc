// Gradients to rows: the writing half of EmbeddingTable.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>

#include "brought_or_break.h"
#include "gradient_rows.h"
#include "row_kernels.h"
#include "slot_set.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/sum_rows.h"
#include "table_snapshot.h"
#include "tasks.h"

namespace sok {
namespace {

constexpr int64_t kRowsPerTask = 2048;
constexpr int64_t kRowCycles = 60;

}  // namespace

// Rows [begin, end) of one table's gradients.
struct EmbeddingTable::Stretch {
  int64_t table;
  int64_t begin, end;
};

const EmbeddingTable::SlotSet* EmbeddingTable::FindSet(const std::string& slot_set) const {
  for (const auto& set : sets_)
    if (set->name == slot_set) return set.get();
  return nullptr;
}

void EmbeddingTable::CheckSet(const UpdateRule& rule, const std::string& slot_set) const {
  const SlotSet* set = FindSet(slot_set);
  if (set == nullptr || set->rule.rule == rule.rule) return;
  throw InvalidArgument(Label() + ": slot set '" + slot_set +
                        "' belongs to another rule. Give each optimizer its own name.");
}

void EmbeddingTable::CheckRule(const UpdateRule& rule, const std::string& slot_set) const {
  const SharedLock lock(mutex_);
  CheckSet(rule, slot_set);
}

void EmbeddingTable::SettleRows(const uint32_t* rows, int64_t n) const {
  constexpr int64_t kStampAhead = 24, kRecordAhead = 8;
  constexpr uint32_t kBusy = 0xFFFFFFFFu;  // a thread is at work on the row
  const int64_t floats = rows_.floats();
  for (const auto& set : sets_) {
    if (!set->rule.decays()) continue;
    const uint32_t calls = static_cast<uint32_t>(set->history.calls());
    for (int64_t i = 0; i < n; ++i) {
      if (i + kStampAhead < n && rows[i + kStampAhead] != kNoRow) __builtin_prefetch(set->Stamp(rows[i + kStampAhead]));
      if (i + kRecordAhead < n && rows[i + kRecordAhead] != kNoRow &&
          __atomic_load_n(set->Stamp(rows[i + kRecordAhead]), __ATOMIC_RELAXED) != calls) {
        const float* record = rows_.Record(rows[i + kRecordAhead]);
        for (int64_t at = 0; at < floats; at += 16) __builtin_prefetch(record + at, 1);
      }
      if (rows[i] == kNoRow) continue;
      uint32_t* stamp = set->Stamp(rows[i]);
      uint32_t seen = __atomic_load_n(stamp, __ATOMIC_ACQUIRE);
      while (seen != calls) {
        if (seen == kBusy ||
            !__atomic_compare_exchange_n(stamp, &seen, kBusy, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
          seen = __atomic_load_n(stamp, __ATOMIC_ACQUIRE);
          continue;
        }
        float* record = const_cast<float*>(rows_.Record(rows[i]));
        set->SettleFrom(seen, config_.dim, record, record + set->offset);
        __atomic_store_n(stamp, calls, __ATOMIC_RELEASE);
        break;
      }
    }
  }
}

void EmbeddingTable::SettleBefore(const Cpu& cpu, const SlotSet& set, const UpdateRule& next) const {
  if (!set.SettlesBefore(next)) return;
  std::vector<std::pair<uint32_t, uint64_t>> part;
  std::vector<uint32_t> rows;
  for (int64_t p = 0; p < NumParts(); ++p) {
    RowsOfPart(p, /*changes=*/false, &part);
    rows.clear();
    for (const auto& [row, key] : part) rows.push_back(row);
    ForBrought(cpu, rows.data(), static_cast<int64_t>(rows.size()), RowUse::kWrite, [&](int64_t first, int64_t last) {
      cpu.executor.For(last - first, kRowCycles, [&](int64_t begin, int64_t end) {
        CopyAside(rows.data() + first + begin, end - begin);
        SettleRows(rows.data() + first + begin, end - begin);
      });
    });
  }
}

EmbeddingTable::SlotSet* EmbeddingTable::FindOrAttach(const UpdateRule& rule, const std::string& slot_set) {
  CheckSet(rule, slot_set);
  if (const SlotSet* known = FindSet(slot_set)) return const_cast<SlotSet*>(known);
  auto set = std::make_unique<SlotSet>();
  set->name = slot_set;
  set->SetRule(rule);
  if (rule.decays()) {
    set->stamps = RowColumn<uint32_t>(rows_);
    set->stamps.TouchAll(rows_);
  }
  sets_.reserve(sets_.size() + 1);
  set->is_beside = RuleName(rule.rule) == std::string(kHistoryRule);
  if (set->is_beside) {
    set->beside = RowColumn<RowHistory>(rows_);
    set->beside.TouchAll(rows_);
  }
  const bool keeps_versions = rows_.tier() != nullptr && rows_.tier()->has_versions();
  if (set->is_beside ? keeps_versions : rule.num_slots() > 0) {
    std::vector<float> fresh(set->is_beside ? 0 : static_cast<size_t>(rule.slot_floats(config_.dim)));
    if (!fresh.empty()) rule.FillSlots(config_.dim, fresh.data());
    if (rows_.tier() != nullptr) rows_.tier()->SetBeside(BytesBeside());
    try {
      set->offset = rows_.AddFloats(fresh, keeps_versions ? FactsForTier(set.get()) : RowTier::Facts());
    } catch (const RowTier::Unreadable& row) {
      ThrowUnreadable(row);
    }
  }
  sets_.push_back(std::move(set));
  return sets_.back().get();
}

// Whether gradients [begin, end) may be applied. *stale: some are older than the last erasure.
bool EmbeddingTable::CheckGradients(const Gradients& gradients, int64_t begin, int64_t end, Nonfinite nonfinite,
                                    bool* stale) const {
  const int64_t limit = config_.hashed ? next_row_ : config_.capacity, now = FirstRowId() >> 32;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t id = gradients.row_ids[i];
    if (id < 0) continue;
    if (id >> 32 != now) {
      if (EpochOf(id) < 0) return false;
      *stale = true;
      if (EpochOf(id) < first_epoch_) continue;
    }
    if (RowOf(id) >= limit || !rows_.Has(RowOf(id))) return false;
    if (nonfinite == Nonfinite::kRaise && !AllFinite(gradients.grads + i * config_.dim, config_.dim)) return false;
  }
  return true;
}

void EmbeddingTable::RaiseBadGradient(const Gradients& gradients, Nonfinite nonfinite) const {
  bool stale = false;
  for (int64_t i = 0; i < gradients.n; ++i) {
    const int64_t id = gradients.row_ids[i];
    if (CheckGradients(gradients, i, i + 1, Nonfinite::kAllow, &stale)) {
      if (CheckGradients(gradients, i, i + 1, nonfinite, &stale)) continue;
      throw InvalidArgument(Label() + ": the gradient of key " + KeyText(KeyOfRow(RowOf(id))) +
                            " holds NaN or infinity; nothing was updated (nonfinite_gradients='raise').");
    }
    throw InvalidArgument(
        Label() + ": gradient for row id " + std::to_string(id) +
        ", which this shard does not have. Row ids come from a lookup of the same table on the same worker.");
  }
  throw InvalidArgument(Label() + ": bad gradient");
}

// Whether a row was erased since its id was looked up: its number may be another key's by now. Also of negative ids.
bool EmbeddingTable::IsGone(int64_t id) const {
  return id < 0 || EpochOf(id) < first_epoch_ || erased_.Get(RowOf(id)) > EpochOf(id);
}

// Leaves out gradients of rows that were erased since they were looked up.
void EmbeddingTable::DropStale(Scratch* scratch, Gradients* gradients) const {
  int64_t* kept = scratch->Get<int64_t>(gradients->n);
  for (int64_t i = 0; i < gradients->n; ++i) {
    const int64_t id = gradients->row_ids[i];
    kept[i] = IsGone(id) ? -1 : RowId(RowOf(id));
  }
  gradients->row_ids = kept;
  gradients->distinct = false;  // one row may have come under two ids
}

void EmbeddingTable::Update(const Gradients& gradients, int64_t begin, int64_t end, SlotSet* set, Nonfinite nonfinite,
                            float* aside) {
  if (set->rule.function != nullptr) return CallOwnRule(gradients, begin, end, *set, nonfinite, aside);
  const RowKernels& kernels = ChosenRowKernels();
  const int64_t dim = config_.dim, floats = set->offset + set->rule.slot_floats(dim);
  const bool decays = set->rule.decays();
  const uint32_t next_call = static_cast<uint32_t>(set->history.calls() + 1);
  const int64_t* ids = gradients.row_ids;
  if (nonfinite != Nonfinite::kSkip && std::all_of(ids + begin, ids + end, [](int64_t id) { return id >= 0; })) {
    for (int64_t i = begin; decays && i < end; ++i) {  // a lookup for training has settled all of these
      constexpr int64_t kStampAhead = 24;
      if (i + kStampAhead < end) __builtin_prefetch(set->Stamp(RowOf(ids[i + kStampAhead])), 1);
      uint32_t* stamp = set->Stamp(RowOf(ids[i]));
      float* record = rows_.Record(RowOf(ids[i]));
      if (*stamp + 1 != next_call) set->SettleFrom(*stamp, dim, record, record + set->offset);
      *stamp = next_call;
    }
    const RowView view = {rows_.slabs(), rows_.shift(), rows_.mask(), rows_.stride()};
    return kernels.update_rows(view, set->rule, ids + begin, set->offset, gradients.grads + begin * dim, end - begin,
                               dim);
  }
  constexpr int64_t kStep = 16;
  auto prefetch = [&](int64_t from) {
    for (int64_t i = from; i < std::min(from + kStep, end); ++i) {
      if (gradients.row_ids[i] < 0) continue;
      const float* record = rows_.Record(RowOf(gradients.row_ids[i]));
      for (int64_t at = 0; at < dim; at += 16) __builtin_prefetch(record + at, 1);
      for (int64_t at = set->offset; at < floats; at += 16) __builtin_prefetch(record + at, 1);
      __builtin_prefetch(record + floats - 1, 1);
      if (decays) __builtin_prefetch(set->Stamp(RowOf(gradients.row_ids[i])), 1);
    }
  };
  prefetch(begin);
  for (int64_t first = begin; first < end; first += kStep) {
    prefetch(first + kStep);
    const int64_t last = std::min(first + kStep, end);
    float* records[kStep];
    int64_t run = first;  // rows [run, i) are ready and wait for the rule
    auto flush = [&](int64_t to) {
      if (to > run) {
        kernels.update(set->rule, records + (run - first), set->offset, gradients.grads + run * dim, to - run, dim);
      }
      run = to + 1;
    };
    for (int64_t i = first; i < last; ++i) {
      const int64_t id = gradients.row_ids[i];
      if (id < 0 || (nonfinite == Nonfinite::kSkip && !AllFinite(gradients.grads + i * dim, dim))) {
        flush(i);
        continue;
      }
      float* record = rows_.Record(RowOf(id));
      if (decays) {
        set->Settle(RowOf(id), dim, record, record + set->offset);
        *set->Stamp(RowOf(id)) = next_call;
      }
      records[i - first] = record;
    }
    flush(last);
  }
}

// Where a row id may come more than once, sums what belongs to it; the sums live in scratch.
void EmbeddingTable::SumDuplicates(const Cpu& cpu, Scratch* scratch, Gradients* ready, int64_t num_tables) {
  RowSums* sums = scratch->Get<RowSums>(num_tables);
  RowAddends* addends = scratch->Get<RowAddends>(num_tables);
  int64_t* summed = scratch->Get<int64_t>(num_tables);
  int64_t num_sums = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    if (ready[t].distinct) continue;
    addends[num_sums] = RowAddends();
    addends[num_sums].row_ids = ready[t].row_ids;
    addends[num_sums].n = ready[t].n;
    addends[num_sums].values = ready[t].grads;
    sums[num_sums].dim = ready[t].table->dim();
    sums[num_sums].addends = addends + num_sums;
    sums[num_sums].num_addends = 1;
    summed[num_sums++] = t;
  }
  SumRows(cpu, scratch, sums, num_sums, [&](int64_t s, int64_t n) {
    Gradients& g = ready[summed[s]];
    const RowSumsTarget target{scratch->Get<int64_t>(n), scratch->Get<float>(n * g.table->dim())};
    g.row_ids = target.row_ids;
    g.grads = target.sums;
    g.n = n;
    g.distinct = true;
    return target;
  });
}

// Calls body(worker, stretch) for all stretches, on several threads; of tables with files when their rows are in memory.
template <class Body>
void EmbeddingTable::ForStretches(const Cpu& cpu, Scratch* scratch, const Gradients* gradients,
                                  const Stretch* stretches, int64_t count, int64_t cost, const Body& body) {
  auto has_file = [&](const Stretch& s) { return gradients[s.table].table->rows_.tier() != nullptr; };
  auto run = [&](const Stretch* some, int64_t n) {
    if (n > 0) ForTasks(cpu, n, cost / count * n, [&](int64_t worker, int64_t s) { body(worker, some[s]); });
  };
  const Stretch* const last = stretches + count;
  for (const Stretch* first = stretches; first != last;) {
    const Stretch* of_file = std::find_if(first, last, has_file);
    run(first, of_file - first);
    if (of_file == last) return;
    const int64_t table = of_file->table;
    first = std::find_if(of_file, last, [&](const Stretch& s) { return s.table != table; });
    const Gradients& all = gradients[table];
    uint32_t* rows = scratch->Get<uint32_t>(all.n);
    Stretch* parts = scratch->Get<Stretch>(first - of_file);
    for (int64_t i = 0; i < all.n; ++i) rows[i] = all.row_ids[i] < 0 ? kNoRow : RowOf(all.row_ids[i]);
    all.table->ForBroughtOrBreak(cpu, rows, all.n, /*is_begun=*/false, [&](int64_t begin, int64_t end) {
      int64_t n = 0;
      for (; begin < end; begin += kRowsPerTask) parts[n++] = {table, begin, std::min(begin + kRowsPerTask, end)};
      run(parts, n);
    });
  }
}

void EmbeddingTable::ApplyGroup(const Cpu& cpu, Scratch* scratch, const UpdateRule& rule, const std::string& slot_set,
                                Nonfinite nonfinite, const Gradients* gradients, int64_t num_tables) {
  Gradients* ready = scratch->Get<Gradients>(num_tables);
  std::copy(gradients, gradients + num_tables, ready);
  for (int64_t t = 0; t < num_tables; ++t)
    if (ready[t].table->config_.policies.shared_rows > 0) ready[t].distinct = false;  // keys share rows
  SumDuplicates(cpu, scratch, ready, num_tables);

  std::vector<EmbeddingTable*> tables;
  int64_t num_stretches = 0, cost = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    tables.push_back(ready[t].table);
    num_stretches += (ready[t].n + kRowsPerTask - 1) / kRowsPerTask;
    cost += ready[t].n * (kRowCycles + 2 * ready[t].table->dim());
  }
  std::sort(tables.begin(), tables.end());
  const auto twice = std::adjacent_find(tables.begin(), tables.end());
  if (twice != tables.end()) throw InvalidArgument((*twice)->Label() + ": gradients given twice in one call.");
  Stretch* stretches = scratch->Get<Stretch>(num_stretches);
  int64_t count = 0;
  for (int64_t t = 0; t < num_tables; ++t)
    for (int64_t i = 0; i < ready[t].n; i += kRowsPerTask)
      stretches[count++] = {t, i, std::min(i + kRowsPerTask, ready[t].n)};

  std::vector<Lock> locks;  // in the order of addresses, as lookups take them
  for (EmbeddingTable* table : tables) locks.emplace_back(table->mutex_);
  std::atomic<bool> any_bad{false}, any_stale{false};
  ForTasks(cpu, count, cost / 8, [&](int64_t, int64_t s) {
    const Gradients& g = ready[stretches[s].table];
    bool stale = false;
    if (!g.table->CheckGradients(g, stretches[s].begin, stretches[s].end, nonfinite, &stale)) any_bad.store(true);
    if (stale) any_stale.store(true);
  });
  if (any_bad.load()) {
    for (int64_t t = 0; t < num_tables; ++t) {
      bool stale = false;
      if (!ready[t].table->CheckGradients(ready[t], 0, ready[t].n, nonfinite, &stale)) {
        ready[t].table->RaiseBadGradient(ready[t], nonfinite);
      }
    }
  }
  if (slot_set.empty()) return;
  if (any_stale.load()) {  // rare: some table lost keys between lookup and update
    for (int64_t t = 0; t < num_tables; ++t) ready[t].table->DropStale(scratch, &ready[t]);
    SumDuplicates(cpu, scratch, ready, num_tables);
    count = 0;  // there are no more rows now, so the stretches fit where they are
    for (int64_t t = 0; t < num_tables; ++t)
      for (int64_t i = 0; i < ready[t].n; i += kRowsPerTask)
        stretches[count++] = {t, i, std::min(i + kRowsPerTask, ready[t].n)};
  }

  SlotSet** sets = scratch->Get<SlotSet*>(num_tables);
  for (int64_t t = 0; t < num_tables; ++t) ready[t].table->CheckSet(rule, slot_set);
  std::vector<std::unique_ptr<DecaySums>> sums;
  for (int64_t t = 0; t < num_tables; ++t) {
    sets[t] = ready[t].table->FindOrAttach(rule, slot_set);
    sets[t]->ReserveOne();
    ready[t].table->SettleBefore(cpu, *sets[t], rule);
    sums.push_back(sets[t]->SumsFor(rule));
    if (rule.reads_keys) ready[t].table->KeepKeys();
  }
  // A rule of one's own may make of finite numbers what is not.
  const bool checks = rule.function != nullptr && nonfinite == Nonfinite::kSkip;
  int64_t floats_aside = 0;
  for (int64_t t = 0; checks && t < num_tables; ++t)
    floats_aside = std::max(floats_aside, FloatsAside(rule, ready[t].table->dim()));
  float* aside = checks ? scratch->Get<float>(MaxWorkers(cpu, count) * floats_aside) : nullptr;
  // Nothing from here on takes memory.
  for (int64_t t = 0; t < num_tables; ++t) sets[t]->SetRule(rule, std::move(sums[static_cast<size_t>(t)]));
  auto update = [&](int64_t worker, const Stretch& stretch) {
    const Gradients& g = ready[stretch.table];
    if (g.table->saved_.is_on()) {
      for (int64_t i = stretch.begin; i < stretch.end; ++i)
        if (g.row_ids[i] >= 0) g.table->saved_.Mark(RowOf(g.row_ids[i]));
    }
    if (g.table->snapshot_) {
      uint32_t rows[kRowsPerTask];
      for (int64_t i = stretch.begin; i < stretch.end; ++i)
        rows[i - stretch.begin] = g.row_ids[i] < 0 ? kNoRow : RowOf(g.row_ids[i]);
      g.table->CopyAside(rows, stretch.end - stretch.begin);
    }
    g.table->Update(g, stretch.begin, stretch.end, sets[stretch.table], nonfinite,
                    aside == nullptr ? nullptr : aside + worker * floats_aside);
  };
  std::exception_ptr failed;
  try {
    ForStretches(cpu, scratch, ready, stretches, count, cost, update);
  } catch (...) {  // a file: rows that were not reached have had no gradient in this call, which counts
    failed = std::current_exception();
  }
  if (rule.decays())
    for (int64_t t = 0; t < num_tables; ++t) sets[t]->Append();
  if (failed) std::rethrow_exception(failed);
}

}  // namespace sok
