// Optimizer rules: how one row changes. Each is stated once, for host and device, by a header of rules/.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "sok/error.h"
#include "sok/exact_math.h"
#include "sok/rules/all.h"
#include "sok/rules/decay.h"
#include "sok/rules/own_rule.h"

namespace sok {

// The rules of rules/all.h. From kFirstNamed on: those of others, whose names list their slots, vectors and scalars, as
// 'signum(m;count)'. A table keeps the slots; own_rule.h has the functions.
#define SOK_RULE_NUMBER(R) k##R,
enum class Rule : int32_t { SOK_RULES(SOK_RULE_NUMBER) };
#undef SOK_RULE_NUMBER
constexpr Rule kFirstNamed = static_cast<Rule>(1024);

// What to do with a gradient row that holds a NaN or an infinity.
enum class Nonfinite { kAllow, kSkip, kRaise };

// f(a null pointer to the class of a rule of rules/all.h).
template <class F>
auto WithRule(Rule rule, const F& f) {
  switch (rule) {
#define SOK_RULE_CASE(R) \
  case Rule::k##R:       \
    return f(static_cast<R*>(nullptr));
    SOK_RULES(SOK_RULE_CASE)
#undef SOK_RULE_CASE
  }
  throw InvalidArgument("this rule is a function of its own, which runs on the CPU alone.");
}

struct UpdateRule : RuleSettings {
  Rule rule = Rule::kSgd;
  int64_t step = 0;
  SokRuleFunction function = nullptr;  // of a rule of one's own
  bool reads_keys = false, prefetches = false;

  bool is_named() const { return rule >= kFirstNamed; }
  SlotCounts slots() const {
#define SOK_RULE_SLOTS(R) CountSlots<R>(),
    constexpr SlotCounts counts[] = {SOK_RULES(SOK_RULE_SLOTS)};
#undef SOK_RULE_SLOTS
    if (!is_named()) return counts[static_cast<int>(rule)];
    return {static_cast<int>(rule) % 8, static_cast<int>(rule) / 8 % 8};  // ParseRule numbers them so
  }
  int num_slots() const { return slots().vectors + slots().scalars; }
  // What a row of `dim` weights keeps: the one place that says how wide slots are.
  int64_t slot_floats(int64_t dim) const { return slots().floats(dim); }
  bool decays() const {
#define SOK_RULE_DECAYS(R) || (R::kDecays && rule == Rule::k##R)
    return false SOK_RULES(SOK_RULE_DECAYS);
#undef SOK_RULE_DECAYS
  }
  // Whether a missed step of it is told by two numbers.
  bool has_extra() const {
#define SOK_RULE_EXTRA(R) || (R::kDecays && R::kHasExtra && rule == Rule::k##R)
    return false SOK_RULES(SOK_RULE_EXTRA);
#undef SOK_RULE_EXTRA
  }
  // How its slots fade. Of a rule that does not decay nothing in particular.
  DecayModel model() const {
    return is_named() ? DecayModel{}
                      : WithRule(rule, [&](auto* null) { return std::remove_pointer_t<decltype(null)>::Model(*this); });
  }
  bool files_hold_betas() const {
#define SOK_RULE_BETAS(R) || (R::kFilesHoldBetas && rule == Rule::k##R)
    return false SOK_RULES(SOK_RULE_BETAS);
#undef SOK_RULE_BETAS
  }
  // What a fresh row holds: values [slot_floats].
  void FillSlots(int64_t dim, float* values) const {
    for (int k = 0; k < num_slots(); ++k)
      for (int64_t j = 0; j < (k < slots().vectors ? dim : 1); ++j) *values++ = slot_inits[k];
  }
};

// Reads `hyper` (docs/design/native_ops.md) and works out alpha for `step`. Throws InvalidArgument, also for a learning rate
// that is negative or not finite in float32, and for a named rule without a function.
UpdateRule MakeUpdateRule(const std::string& name, const double* hyper, int64_t hyper_size, int64_t step);
// Why no rule has such settings, of a file; empty: it may have them.
std::string SettingsError(const UpdateRule& rule);
// The name of a rule, and the other way round; the latter throws InvalidArgument. A named rule has one number in this
// process from the first ParseRule of its name on.
const char* RuleName(Rule rule);
Rule ParseRule(const std::string& name);
Nonfinite ParseNonfinite(const std::string& name);

// SokRegisterRule; throws InvalidArgument.
void RegisterRule(const std::string& name, const SokRuleLayout& layout, SokRuleFunction function);

// Has the function of a rule of one's own change `count` records, whose slots begin at records[i] + slot_offset.
void CallRule(const UpdateRule& rule, float* const* records, int64_t slot_offset, const float* grads,
              const uint64_t* keys,  // [count], or null
              int64_t count, int64_t dim);

// A stretch of calls that share alpha and extra (MissedStep); it ends where the next one begins.
struct AlphaRun {
  int64_t first_call;
  float alpha;
  float extra = 0.0f;
  double extra_before = 0.0;  // the sum over all calls before

  SOK_HOST_DEVICE MissedStep missed() const { return {alpha, extra}; }
  bool operator==(const AlphaRun& other) const {
    return first_call == other.first_call && alpha == other.alpha && extra == other.extra;
  }
};

// What host and device read of an AlphaHistory.
struct AlphaView {
  const AlphaRun* runs;  // [num_runs], by first_call
  int64_t num_runs;

  // The run that call `call` is of.
  SOK_HOST_DEVICE int64_t RunOf(int64_t call) const {
    int64_t run = 0, past = num_runs;  // the first run that begins after `call` lies in (run, past]
    while (past - run > 1) {
      const int64_t middle = run + (past - run) / 2;
      if (runs[middle].first_call <= call) {
        run = middle;
      } else {
        past = middle;
      }
    }
    return run;
  }

  // The sum of extra over calls from + 1 .. to.
  SOK_HOST_DEVICE double SumOfExtra(int64_t from, int64_t to) const { return ExtraUpTo(to) - ExtraUpTo(from); }

 private:
  SOK_HOST_DEVICE double ExtraUpTo(int64_t call) const {
    if (call < 1) return 0.0;
    const AlphaRun& run = runs[RunOf(call)];
    return run.extra_before + static_cast<double>(call - run.first_call + 1) * static_cast<double>(run.extra);
  }
};

// Walks calls from `first` on: Next() gives what to know of each in turn.
class AlphaCursor {
 public:
  SOK_HOST_DEVICE AlphaCursor(const AlphaView& view, int64_t first)
      : view_(view), run_(view.RunOf(first)), call_(first) {}

  // The alpha of the next n calls if they share one, else NaN.
  SOK_HOST_DEVICE float SteadyFor(int64_t n) const {
    int64_t run = run_;
    while (run + 1 < view_.num_runs && view_.runs[run + 1].first_call <= call_) ++run;
    const bool steady = run + 1 == view_.num_runs || view_.runs[run + 1].first_call >= call_ + n;
    return steady ? view_.runs[run].alpha : NAN;
  }

  SOK_HOST_DEVICE MissedStep Next() {
    while (run_ + 1 < view_.num_runs && view_.runs[run_ + 1].first_call <= call_) ++run_;
    ++call_;
    return view_.runs[run_].missed();
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

  void Append(float alpha) { Append({alpha, 0.0f}, 1); }
  void Append(const MissedStep& missed) { Append(missed, 1); }
  // Room for one more call: appending it then takes no memory.
  void ReserveOne() {
    if (runs_.size() == runs_.capacity()) runs_.reserve(2 * runs_.size() + 8);
  }
  void Append(const MissedStep& missed, int64_t count);
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
// Term j is at most max_alpha r^j |m| / s with r = fade_1 / root; the tail is that over 1 - r.
SOK_HOST_DEVICE int64_t ReplayLength(const DecayModel& model, float first_alpha, float max_alpha) {
  // From the largest float to below the smallest: no momentum is left, and nothing moves.
  const int64_t all = model.fade_1 > 0.0 ? static_cast<int64_t>(-192.1 / log(model.fade_1)) + 1 : 1;
  const double r = model.fade_1 / model.root;
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
                 float* slots);

// What k steps do besides moving a weight by its momentum; shrunk: the sum of extra over them.
SOK_HOST_DEVICE Decay Faded(const DecayModel& model, double k, double extra) {
  Decay decay;
  decay.fade_m = static_cast<float>(ExactPow(model.fade_1, k));
  decay.fade_v = static_cast<float>(ExactPow(model.fade_2, k));
  if (model.shrinks) decay.keep = static_cast<float>(ExactExp(extra));
  if (model.adds_extra) decay.extra = static_cast<float>(extra);
  return decay;
}

}  // namespace sok
