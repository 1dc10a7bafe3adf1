// One optimizer's share of every record of a table, and what it remembers beside the records.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sok/adam_decay.h"
#include "sok/embedding_table.h"
#include "sok/sparse_update.h"

namespace sok {

struct EmbeddingTable::SlotSet {
  std::string name;
  UpdateRule rule;  // of the last call
  int64_t offset = 0;
  // Histories of rows lie beside the records: a lookup counts where it would not write, and eight of them fill a line of the cache.
  bool is_beside = false;
  RowColumn<RowHistory> beside;

  // The slots of a row with this record.
  float* SlotsOf(int64_t row, float* record) const {
    return is_beside ? reinterpret_cast<float*>(beside.At(row)) : record + offset;
  }
  const float* SlotsOf(int64_t row, const float* record) const { return SlotsOf(row, const_cast<float*>(record)); }

  // What it keeps of each row beside the records: its stamp, or its slots.
  int64_t words_beside() const { return rule.decays() ? 1 : is_beside ? sizeof(RowHistory) / sizeof(uint32_t) : 0; }
  const void* Beside(int64_t row) const {
    return rule.decays() ? static_cast<const void*>(Stamp(row)) : is_beside ? beside.At(row) : nullptr;
  }

  // The rest is for decaying rules only.
  AlphaHistory history;
  std::unique_ptr<DecaySums> sums;             // null: these betas need step by step replay
  RowColumn<uint32_t> stamps;                  // call up to which a row is current
  int64_t calls_at_base = 0;                   // of the save that changes are counted from
  mutable std::atomic<int64_t> calls_read{0};  // of the save under way: as of when its rows were read
  std::string skipped_save;                    // the save whose calls SkipCalls has added last
  std::vector<AlphaRun> skipped;               // those

  uint32_t* Stamp(int64_t row) const { return stamps.At(row); }
  bool IsCurrent(int64_t row) const { return *Stamp(row) == history.calls(); }

  // Takes over the rule of the next call. Slots keep their place. In two steps, of which the second takes no memory.
  std::unique_ptr<DecaySums> SumsFor(const UpdateRule& next) const;
  void SetRule(const UpdateRule& next, std::unique_ptr<DecaySums> sums_for_next);
  void SetRule(const UpdateRule& next) { SetRule(next, SumsFor(next)); }
  bool KeepsSums(const UpdateRule& next) const;

  // One more call with the present rule has been applied. Takes no memory after ReserveOne.
  void Append();
  void ReserveOne() { history.ReserveOne(); }  // sums have room for all that they ever hold

  // Whether steps that rows have missed would not be the same by the next rule: they are settled before it comes.
  bool SettlesBefore(const UpdateRule& next) const {
    return rule.decays() && history.calls() > 0 &&
           (next.beta_1 != rule.beta_1 || next.beta_2 != rule.beta_2 ||
            next.one_minus_beta_1 != rule.one_minus_beta_1 || next.one_minus_beta_2 != rule.one_minus_beta_2 ||
            // Of rules with extra epsilon is told with each step, or of no account.
            (next.epsilon != rule.epsilon && rule.rule != Rule::kNadam));
  }

  // Many calls have been applied elsewhere, up to `calls` in the counting of the runs.
  void Append(const std::vector<AlphaHistory::Run>& runs, int64_t calls);

  // Weights of a row as they stand after every call: from w (may be out) and the row's slots. out: [dim];
  // scratch: [slot_floats].
  void Read(int64_t row, const float* w, const float* slots, int64_t dim, float* out, float* scratch) const;

  // Brings weights and slots of a row up to the last call, in place. The stamp is the caller's business.
  void Settle(int64_t row, int64_t dim, float* w, float* slots) const { SettleFrom(*Stamp(row), dim, w, slots); }
  void SettleFrom(int64_t stamp, int64_t dim, float* w, float* slots) const;
};

}  // namespace sok
