#include "sok/sparse_update.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace sok {
Nonfinite ParseNonfinite(const std::string& name) {
  if (name == "allow") return Nonfinite::kAllow;
  if (name == "skip") return Nonfinite::kSkip;
  if (name == "raise") return Nonfinite::kRaise;
  throw InvalidArgument("nonfinite must be 'allow', 'skip' or 'raise'. Received: '" + name + "'.");
}

void AlphaHistory::Append(const MissedStep& missed, int64_t count) {
  if (count == 0) return;
  if (runs_.empty() || runs_.back().alpha != missed.alpha || runs_.back().extra != missed.extra) {
    const double before = runs_.empty() ? 0.0 : view().SumOfExtra(0, calls_);
    runs_.push_back({calls_ + 1, missed.alpha, missed.extra, before});
  }
  calls_ += count;
  max_ = std::max(max_, std::fabs(missed.alpha));
}

std::vector<AlphaRun> AlphaHistory::RunsAfter(int64_t calls) const {
  std::vector<AlphaRun> runs;
  if (calls >= calls_) return runs;
  size_t first = runs_.size() - 1;
  while (runs_[first].first_call > calls + 1) --first;
  runs.assign(runs_.begin() + static_cast<std::ptrdiff_t>(first), runs_.end());
  runs[0].first_call = calls + 1;
  return runs;
}

namespace {

template <class R, size_t... k>
void Replay(const AlphaHistory& history, const UpdateRule& rule, int64_t from, int64_t to, int64_t dim, float* w,
            float* slots, std::index_sequence<k...>) {
  const R step(rule);
  const DecayModel model = rule.model();
  AlphaCursor cursor(history.view(), from + 1);
  AlphaCursor peek = cursor;
  int64_t steps = std::min(to - from, ReplayLength(model, peek.Next().alpha, history.max_alpha()));
  if (R::kMomentumSlot >= 0) {
    // Without momentum nothing moves.
    const float* m = slots + R::kMomentumSlot * dim;
    if (std::all_of(m, m + dim, [](float x) { return x == 0.0f; })) steps = 0;
  }
  for (int64_t s = 0; s < steps; ++s) {
    const MissedStep missed = cursor.Next();
    for (int64_t j = 0; j < dim; ++j) step.MissedElement(missed, &w[j], (&slots[static_cast<int64_t>(k) * dim + j])...);
  }
  if (steps == to - from) return;
  const double extra = R::kHasExtra ? history.view().SumOfExtra(from + steps, to) : 0.0;
  const Decay rest = Faded(model, static_cast<double>(to - from - steps), extra);
  for (int64_t j = 0; j < dim; ++j) step.CatchUp(rest, &w[j], (&slots[static_cast<int64_t>(k) * dim + j])...);
}

}  // namespace

void ReplayDecay(const AlphaHistory& history, const UpdateRule& rule, int64_t from, int64_t to, int64_t dim, float* w,
                 float* slots) {
  if (from >= to) return;
  WithRule(rule.rule, [&](auto* null) {
    using R = std::remove_pointer_t<decltype(null)>;
    if constexpr (R::kDecays)
      Replay<R>(history, rule, from, to, dim, w, slots, std::make_index_sequence<kNumVectors<R>>());
  });
}

}  // namespace sok
