// Updates of an EmbeddingTable by a rule of one's own: its function gets blocks of rows, where they lie or as copies.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "gradient_rows.h"
#include "slot_set.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/sum_rows.h"
#include "tasks.h"

namespace sok {
namespace {

constexpr int64_t kMaxRows = 256;   // in one call
constexpr int64_t kRowsAside = 16;  // where they are copies
constexpr int64_t kFirstRows = 12;  // that the table prefetches where the function does it for the others
constexpr int64_t kRowsPerOwnTask = 2048;
constexpr int64_t kOwnRowCycles = 120;

// Where a row is many lines, those of many rows on their way would wait for each other.
int64_t RowsPrefetched(int64_t floats) { return floats <= 64 ? 16 : floats <= 192 ? 8 : 4; }

}  // namespace

int64_t EmbeddingTable::FloatsAside(const UpdateRule& rule, int64_t dim) {
  return kRowsAside * (dim + rule.slot_floats(dim));
}

void EmbeddingTable::KeepKeys() {
  if (keeps_keys_ || !config_.hashed) return;
  RowColumn<uint64_t> keys(rows_);
  keys.TouchAll(rows_);
  index_->ForEach([&](uint64_t key, uint32_t row) { *keys.At(row) = key; });
  row_keys_ = std::move(keys);
  keeps_keys_ = true;
}

void EmbeddingTable::CallOwnRule(const Gradients& gradients, int64_t begin, int64_t end, const SlotSet& set,
                                 Nonfinite nonfinite, float* aside) {
  const int64_t dim = config_.dim, slot_floats = set.rule.slot_floats(dim), own = dim + slot_floats;
  const bool prefetches = set.rule.prefetches && aside == nullptr;
  const int64_t step = prefetches ? kMaxRows : RowsPrefetched(own);
  const int64_t* ids = gradients.row_ids;
  auto prefetch = [&](int64_t from, int64_t count) {
    for (int64_t i = from; i < std::min(from + count, end); ++i) {
      if (ids[i] < 0) continue;
      const float* record = rows_.Record(RowOf(ids[i]));
      for (int64_t at = 0; at < dim; at += 16) __builtin_prefetch(record + at, 1);
      for (int64_t at = set.offset; at < set.offset + slot_floats; at += 16) __builtin_prefetch(record + at, 1);
      if (slot_floats > 0) __builtin_prefetch(record + set.offset + slot_floats - 1, 1);
      if (set.rule.reads_keys && config_.hashed) __builtin_prefetch(row_keys_.At(RowOf(ids[i])));
    }
  };
  float* records[kMaxRows];
  float* copies[kRowsAside];
  uint64_t keys[kMaxRows];
  for (int64_t k = 0; aside != nullptr && k < kRowsAside; ++k) copies[k] = aside + k * own;
  prefetch(begin, prefetches ? kFirstRows : step);
  for (int64_t first = begin; first < end; first += step) {
    if (!prefetches) prefetch(first + step, step);
    const int64_t last = std::min(first + step, end);
    int64_t run = first;  // rows [run, i) are ready and wait for the rule
    auto flush = [&](int64_t to) {
      const int64_t count = to - run;
      const float* grads = gradients.grads + run * dim;
      const uint64_t* of_rows = set.rule.reads_keys ? keys : nullptr;
      run = to + 1;
      if (count <= 0) return;
      if (aside == nullptr) return CallRule(set.rule, records, set.offset, grads, of_rows, count, dim);
      for (int64_t k = 0; k < count; ++k) {
        std::copy_n(records[k], dim, copies[k]);
        std::copy_n(records[k] + set.offset, slot_floats, copies[k] + dim);
      }
      CallRule(set.rule, copies, dim, grads, of_rows, count, dim);
      for (int64_t k = 0; k < count; ++k) {
        if (!AllFinite(copies[k], own)) continue;
        std::copy_n(copies[k], dim, records[k]);
        std::copy_n(copies[k] + dim, slot_floats, records[k] + set.offset);
      }
    };
    for (int64_t i = first; i < last; ++i) {
      if (ids[i] < 0 || (nonfinite == Nonfinite::kSkip && !AllFinite(gradients.grads + i * dim, dim))) {
        flush(i);
        continue;
      }
      records[i - run] = rows_.Record(RowOf(ids[i]));
      if (set.rule.reads_keys) keys[i - run] = KeptKey(RowOf(ids[i]));
    }
    if (prefetches) prefetch(last, kFirstRows);
    flush(last);
  }
}

int64_t EmbeddingTable::TryOwnRule(const Gradients& gradients, int64_t begin, int64_t end, const UpdateRule& rule,
                                   const SlotSet* set, float* aside) const {
  const int64_t dim = config_.dim, slot_floats = rule.slot_floats(dim);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t id = gradients.row_ids[i];
    const float* grads = gradients.grads + i * dim;
    bool stale = false;
    // What the update itself refuses or leaves out.
    if (IsGone(id) || !CheckGradients(gradients, i, i + 1, Nonfinite::kRaise, &stale)) continue;
    const float* record = rows_.Peek(RowOf(id), &peeks_);
    std::copy_n(record, dim, aside);
    if (set == nullptr) {
      rule.FillSlots(dim, aside + dim);
    } else {
      std::copy_n(record + set->offset, slot_floats, aside + dim);
    }
    const uint64_t key = rule.reads_keys ? KeptKey(RowOf(id)) : 0;
    CallRule(rule, &aside, dim, grads, rule.reads_keys ? &key : nullptr, 1, dim);
    if (!AllFinite(aside, dim + slot_floats)) return i;
  }
  return end;
}

std::string EmbeddingTable::TryGroup(const Cpu& cpu, Scratch* scratch, const UpdateRule& rule,
                                     const std::string& slot_set, const Gradients* gradients, int64_t num_tables) {
  if (rule.function == nullptr) throw InvalidArgument("only rules of one's own are tried.");
  Gradients* ready = scratch->Get<Gradients>(num_tables);
  std::copy(gradients, gradients + num_tables, ready);
  SumDuplicates(cpu, scratch, ready, num_tables);
  for (int64_t t = 0; t < num_tables; ++t) {
    EmbeddingTable* table = ready[t].table;
    const Lock lock(table->mutex_);
    table->CheckSet(rule, slot_set);
    if (rule.reads_keys) table->KeepKeys();
    const SlotSet* set = table->FindSet(slot_set);
    const int64_t n = ready[t].n, tasks = (n + kRowsPerOwnTask - 1) / kRowsPerOwnTask;
    const int64_t floats = FloatsAside(rule, table->dim());
    float* aside = scratch->Get<float>(MaxWorkers(cpu, tasks) * floats);
    std::atomic<int64_t> bad{n};
    ForTasks(cpu, tasks, n * (kOwnRowCycles + 2 * table->dim()), [&](int64_t worker, int64_t task) {
      const int64_t begin = task * kRowsPerOwnTask, end = std::min(n, begin + kRowsPerOwnTask);
      const int64_t found = table->TryOwnRule(ready[t], begin, end, rule, set, aside + worker * floats);
      if (found < end) bad.store(found);
    });
    table->CheckPeeks();
    if (bad.load() == n) continue;
    return table->Label() + ": rule '" + RuleName(rule.rule) + "' makes NaN or infinity of the row or slots of key " +
           table->KeyText(table->KeyOfRow(RowOf(ready[t].row_ids[bad.load()]))) +
           ", whose gradient is finite. Does it divide by zero, or take the root of what is below? Nothing was updated "
           "(nonfinite_gradients='raise').";
  }
  return {};
}

}  // namespace sok
