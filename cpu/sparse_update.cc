#include "sok/sparse_update.h"

#include <algorithm>

namespace sok {
Nonfinite ParseNonfinite(const std::string& name) {
  if (name == "allow") return Nonfinite::kAllow;
  if (name == "skip") return Nonfinite::kSkip;
  if (name == "raise") return Nonfinite::kRaise;
  throw InvalidArgument("nonfinite must be 'allow', 'skip' or 'raise'. Received: '" + name + "'.");
}

void AlphaHistory::Append(float alpha, int64_t count) {
  if (count == 0) return;
  if (runs_.empty() || runs_.back().alpha != alpha) runs_.push_back({calls_ + 1, alpha});
  calls_ += count;
  max_ = std::max(max_, std::fabs(alpha));
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

void ReplayDecay(const AlphaHistory& history, const UpdateRule& rule, int64_t from, int64_t to, int64_t dim, float* w,
                 float* m, float* v) {
  if (from >= to || std::all_of(m, m + dim, [](float x) { return x == 0.0f; })) {
    // Without momentum nothing moves; only v fades.
    if (from < to) {
      const float fade = static_cast<float>(std::pow(static_cast<double>(rule.beta_2), static_cast<double>(to - from)));
      for (int64_t j = 0; j < dim; ++j) v[j] *= fade;
    }
    return;
  }
  AlphaCursor cursor(history.view(), from + 1);
  AlphaCursor peek = cursor;
  const int64_t steps = std::min(to - from, ReplayLength(rule, peek.Next(), history.max_alpha()));
  const Adam adam(rule);
  for (int64_t k = 0; k < steps; ++k) {
    const float alpha = cursor.Next();
    for (int64_t j = 0; j < dim; ++j) adam.MissedElement(alpha, &w[j], &m[j], &v[j]);
  }
  const int64_t rest = to - from - steps;
  if (rest > 0) {
    const float fade_m = static_cast<float>(std::pow(static_cast<double>(rule.beta_1), static_cast<double>(rest)));
    const float fade_v = static_cast<float>(std::pow(static_cast<double>(rule.beta_2), static_cast<double>(rest)));
    for (int64_t j = 0; j < dim; ++j) {
      m[j] *= fade_m;
      v[j] *= fade_v;
    }
  }
}

}  // namespace sok
