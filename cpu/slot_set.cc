#include "slot_set.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "row_kernels.h"

namespace sok {

bool EmbeddingTable::SlotSet::KeepsSums(const UpdateRule& next) const { return sums && next.model() == rule.model(); }

std::unique_ptr<DecaySums> EmbeddingTable::SlotSet::SumsFor(const UpdateRule& next) const {
  if (!next.decays() || KeepsSums(next) || !DecaySums::Fits(next)) return nullptr;
  auto made = std::make_unique<DecaySums>(next);
  const int64_t first = std::max<int64_t>(0, history.calls() - made->length()) + 1;
  AlphaCursor cursor(history.view(), first);
  for (int64_t call = first; call <= history.calls(); ++call) made->Append(cursor.Next());
  return made;
}

void EmbeddingTable::SlotSet::SetRule(const UpdateRule& next, std::unique_ptr<DecaySums> sums_for_next) {
  if (!KeepsSums(next)) sums = std::move(sums_for_next);
  rule = next;
}

void EmbeddingTable::SlotSet::Append() {
  history.Append(rule.missed);
  if (sums) sums->Append(rule.missed);
}

void EmbeddingTable::SlotSet::Append(const std::vector<AlphaHistory::Run>& runs, int64_t calls) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const int64_t end = i + 1 < runs.size() ? runs[i + 1].first_call : calls + 1;
    history.Append(runs[i].missed(), end - runs[i].first_call);
  }
  sums.reset();
  SetRule(rule);
}

void EmbeddingTable::SlotSet::Read(int64_t row, const float* w, const float* slots, int64_t dim, float* out,
                                   float* scratch) const {
  const int64_t stamp = *Stamp(row), calls = history.calls();
  if (stamp == calls) {
    if (w != out) std::memcpy(out, w, static_cast<size_t>(dim) * sizeof(float));
  } else if (sums) {
    ChosenRowKernels().read_decayed(rule, sums->Of(history, stamp, calls), w, slots, dim, out);
  } else {
    if (w != out) std::memcpy(out, w, static_cast<size_t>(dim) * sizeof(float));
    std::memcpy(scratch, slots, static_cast<size_t>(rule.slot_floats(dim)) * sizeof(float));
    ReplayDecay(history, rule, stamp, calls, dim, out, scratch);
  }
}

void EmbeddingTable::SlotSet::SettleFrom(int64_t stamp, int64_t dim, float* w, float* slots) const {
  const int64_t calls = history.calls();
  if (stamp == calls) return;
  if (sums) {
    ChosenRowKernels().settle(rule, sums->Of(history, stamp, calls), dim, w, slots);
  } else {
    ReplayDecay(history, rule, stamp, calls, dim, w, slots);
  }
}

}  // namespace sok
