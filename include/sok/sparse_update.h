// Optimizer rules: how one row changes. Each rule is stated once, for host and device.
//
// Formulas are those of Keras 3 (keras.optimizers), in float32. w: weights, g: summed gradient of the row.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "sok/philox.h"

namespace sok {

// From kFirstNamed on: rules of others, who read and write rows themselves (EmbeddingTable::Gather, Scatter). Such a rule has a
// name that lists its slots, as 'RMSprop(velocity,momentum)': a table keeps them, and knows no more of it.
enum class Rule : int32_t { kSgd, kAdagrad, kLazyAdam, kAdam };
constexpr Rule kFirstNamed = static_cast<Rule>(8);

// Slots that a named rule has at most.
constexpr int kMaxSlots = 6;

// What to do with a gradient row that holds a NaN or an infinity.
enum class Nonfinite { kAllow, kSkip, kRaise };

struct UpdateRule {
  Rule rule = Rule::kSgd;
  float lr = 0.0f;  // for the Adam rules: alpha = lr sqrt(1 - beta_2^t) / (1 - beta_1^t), t the step
  float beta_1 = 0.0f;
  float beta_2 = 0.0f;
  float one_minus_beta_1 = 1.0f;  // rounded from double, as Keras does
  float one_minus_beta_2 = 1.0f;
  float epsilon = 0.0f;
  float slot_init = 0.0f;
  float slot_inits[kMaxSlots] = {};  // of a named rule, in place of slot_init

  bool is_named() const { return rule >= kFirstNamed; }
  int num_slots() const {
    if (is_named()) return static_cast<int>(rule) % 8;  // ParseRule numbers them so
    return rule == Rule::kSgd ? 0 : rule == Rule::kAdagrad ? 1 : 2;
  }
  bool decays() const { return rule == Rule::kAdam; }
  // What a fresh row holds: slots [num_slots * dim].
  void FillSlots(int64_t dim, float* slots) const {
    for (int k = 0; k < num_slots(); ++k)
      for (int64_t j = 0; j < dim; ++j) *slots++ = is_named() ? slot_inits[k] : slot_init;
  }
};

// Why no rule has these betas; empty: it may have them. Betas are below 1 after rounding to float32, too, and those of
// 'adam' such that a row's momentum is gone after some 200,000 missed steps: so long it may take to catch up with them.
std::string BetaError(const UpdateRule& rule);

// Reads `hyper` (docs/design/native_ops.md) and works out alpha for `step`. Throws InvalidArgument, also for a learning rate
// that is negative or not finite in float32, and for a named rule.
UpdateRule MakeUpdateRule(const std::string& name, const double* hyper, int64_t hyper_size, int64_t step);
// The name of a rule, and the other way round; the latter throws InvalidArgument. A named rule has one number in this
// process from the first ParseRule of its name on.
const char* RuleName(Rule rule);
Rule ParseRule(const std::string& name);
Nonfinite ParseNonfinite(const std::string& name);

SOK_HOST_DEVICE void SgdElement(float g, float lr, float* w) { *w -= lr * g; }

// Duchi, Hazan, Singer (2011).
SOK_HOST_DEVICE void AdagradElement(float g, float lr, float epsilon, float* w, float* accumulator) {
  *accumulator += g * g;
  *w -= lr * g / sqrtf(*accumulator + epsilon);
}

// Kingma and Ba (2015), in the form of Keras (epsilon beside the uncorrected root).
SOK_HOST_DEVICE void AdamElement(float g, float alpha, float one_minus_beta_1, float one_minus_beta_2, float epsilon,
                                 float* w, float* m, float* v) {
  *m += (g - *m) * one_minus_beta_1;
  *v += (g * g - *v) * one_minus_beta_2;
  *w -= alpha * *m / (sqrtf(*v) + epsilon);
}

// One step of the same with g = 0: what every untouched row of a dense Adam goes through.
SOK_HOST_DEVICE void AdamDecayElement(float alpha, float one_minus_beta_1, float one_minus_beta_2, float epsilon,
                                      float* w, float* m, float* v) {
  *m -= *m * one_minus_beta_1;
  *v -= *v * one_minus_beta_2;
  *w -= alpha * *m / (sqrtf(*v) + epsilon);
}

// One element by the rule; a and b are its first and second slot, where the rule has them.
template <Rule kRule>
SOK_HOST_DEVICE void UpdateElement(const UpdateRule& rule, float g, float* w, float* a, float* b) {
  if constexpr (kRule == Rule::kSgd) {
    SgdElement(g, rule.lr, w);
  } else if constexpr (kRule == Rule::kAdagrad) {
    AdagradElement(g, rule.lr, rule.epsilon, w, a);
  } else {
    AdamElement(g, rule.lr, rule.one_minus_beta_1, rule.one_minus_beta_2, rule.epsilon, w, a, b);
  }
}

// A stretch of calls that share one alpha; it ends where the next one begins.
struct AlphaRun {
  int64_t first_call;
  float alpha;
};

// What host and device read of an AlphaHistory.
struct AlphaView {
  const AlphaRun* runs;  // [num_runs], by first_call
  int64_t num_runs;
};

// Walks calls from `first` on: Next() gives the alpha of each in turn.
class AlphaCursor {
 public:
  SOK_HOST_DEVICE AlphaCursor(const AlphaView& view, int64_t first) : view_(view), run_(0), call_(first) {
    int64_t past = view.num_runs;  // the first run that begins after `first` lies in (run_, past]
    while (past - run_ > 1) {
      const int64_t middle = run_ + (past - run_) / 2;
      if (view.runs[middle].first_call <= first) {
        run_ = middle;
      } else {
        past = middle;
      }
    }
  }

  // The alpha of the next n calls if they share one, else NaN.
  SOK_HOST_DEVICE float SteadyFor(int64_t n) const {
    int64_t run = run_;
    while (run + 1 < view_.num_runs && view_.runs[run + 1].first_call <= call_) ++run;
    const bool steady = run + 1 == view_.num_runs || view_.runs[run + 1].first_call >= call_ + n;
    return steady ? view_.runs[run].alpha : NAN;
  }

  SOK_HOST_DEVICE float Next() {
    while (run_ + 1 < view_.num_runs && view_.runs[run_ + 1].first_call <= call_) ++run_;
    ++call_;
    return view_.runs[run_].alpha;
  }

 private:
  AlphaView view_;
  int64_t run_;
  int64_t call_;
};

// The alpha of every call so far, run-length coded: after bias correction has settled, a constant learning rate adds nothing.
// Call c (counted from 1) had the alpha that AlphaCursor(view(), c) gives.
class AlphaHistory {
 public:
  using Run = AlphaRun;

  void Append(float alpha) { Append(alpha, 1); }
  // Room for one more call: appending it then takes no memory.
  void ReserveOne() {
    if (runs_.size() == runs_.capacity()) runs_.reserve(2 * runs_.size() + 8);
  }
  void Append(float alpha, int64_t count);
  int64_t calls() const { return calls_; }
  float max_alpha() const { return max_; }

  // The runs of all calls after the first `calls`.
  std::vector<AlphaRun> RunsAfter(int64_t calls) const;

  // Valid until the next Append.
  AlphaView view() const { return {runs_.data(), static_cast<int64_t>(runs_.size())}; }

 private:
  std::vector<AlphaRun> runs_;
  int64_t calls_ = 0;
  float max_ = 0.0f;
};

// After how many replayed calls the rest of the sum cannot change a float32 weight any more.
// Term j is at most max_alpha r^j |m| / sqrt(v) with r = beta_1 / sqrt(beta_2); the tail is that over 1 - r.
SOK_HOST_DEVICE int64_t ReplayLength(const UpdateRule& rule, float first_alpha, float max_alpha) {
  // From the largest float to below the smallest: no momentum is left, and nothing moves.
  const int64_t all = rule.beta_1 > 0.0f ? static_cast<int64_t>(-192.1 / log(static_cast<double>(rule.beta_1))) + 1 : 1;
  const double r = rule.beta_1 / sqrt(static_cast<double>(rule.beta_2));
  if (!(r < 1.0) || first_alpha == 0.0f) return all;
  if (r == 0.0) return 1;
  const double growth = static_cast<double>(max_alpha) / fabs(static_cast<double>(first_alpha));
  const double tail = (1.0 - r) / 67108864.0 / (growth > 1.0 ? growth : 1.0);  // 2^-26
  const int64_t length = static_cast<int64_t>(log(tail) / log(r)) + 1;
  return length < all ? length : all;
}

// Brings one row from the state after call `from` to the state after call `to` by replaying steps with g = 0.
// The part of the sum that cannot change a float32 weight any more is left out; the moments then decay in closed form.
void ReplayDecay(const AlphaHistory& history, const UpdateRule& rule, int64_t from, int64_t to, int64_t dim, float* w,
                 float* m, float* v);

}  // namespace sok
