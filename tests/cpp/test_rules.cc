// Rules by name: those that are compiled in, and functions registered while the program runs.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "rules.h"
#include "sok/adam_decay.h"
#include "tables.h"

namespace {

// w -= learning_rate * (m = beta * m + (1 - beta) * g); s counts the steps of a row.
void Momentum(const SokRuleBlock* block) {
  for (int64_t i = 0; i < block->num_rows; ++i) {
    float *w = block->rows[i], *m = w + block->slot_offset, *s = m + block->dim;
    for (int64_t j = 0; j < block->dim; ++j) {
      const float beta = static_cast<float>(block->hyper[1]), g = block->gradients[i * block->dim + j];
      m[j] = beta * m[j] + (1.0f - beta) * g;
      w[j] -= static_cast<float>(block->hyper[0]) * m[j];
      s[j] += 1.0f;
    }
  }
}

void Sign(const SokRuleBlock* block) {
  for (int64_t i = 0; i < block->num_rows; ++i)
    for (int64_t j = 0; j < block->dim; ++j) {
      const float g = block->gradients[i * block->dim + j], step = static_cast<float>(block->step);
      block->rows[i][j] -= static_cast<float>(block->hyper[0]) * step * std::copysign(1.0f, g);
    }
}

SokRuleLayout Layout(const char* hyper, const char* starts) { return {sizeof(SokRuleLayout), hyper, starts, 0, 0}; }

const SokRuleLayout kMomentum = Layout("learning_rate,beta,start", "start,7.5");

}  // namespace

TEST(NamesAreThoseOfTheListOrListSlots) {
  for (const char* name :
       {"sgd", "adagrad", "lazy_adam", "adam", "signum(m,count)", "signum(m;count)", "counted(;count)", "sign()"})
    CHECK_EQ(std::string(sok::RuleName(sok::ParseRule(name))), std::string(name));
  CHECK(sok::ParseRule("x(a)") == sok::ParseRule("x(a)"));
  CHECK(sok::ParseRule("x(a)") != sok::ParseRule("x(b)"));
  for (const char* name : {"", "nobody", "x", "x(", "x)", "(a)", "x(a,)", "x(,a)", "x(a", "x(a)b", "x(a b)",
                           "x(a,b,c,d,e,f,g)", "x(,)", "x(;)", "x(a;)", "x(a;b;c)", "x(a,;b)", "x(a,b,c,d;e,f,g)"})
    CHECK_THROWS(sok::ParseRule(name), sok::InvalidArgument, "Received: '" + std::string(name) + "'");
  sok::UpdateRule rule;
  rule.rule = sok::ParseRule("x(a,b,c)");
  CHECK_EQ(rule.num_slots(), 3);
  CHECK_EQ(rule.slot_floats(5), 15);
  rule.rule = sok::ParseRule("x(a,b;c)");
  CHECK_EQ(rule.num_slots(), 3);
  CHECK_EQ(rule.slot_floats(5), 11);
}

TEST(ARuleWithoutAFunctionIsNotApplied) {
  const double hyper[] = {0.1};
  CHECK_THROWS(sok::MakeUpdateRule("nobody(m)", hyper, 1, 1), sok::InvalidArgument,
               "'nobody(m)' has no function in this process");
  CHECK_THROWS(sok::MakeUpdateRule("nobody(m)", hyper, 1, 1), sok::InvalidArgument,
               "before the first update, in each process");
}

TEST(ARegisteredRuleTrainsATable) {
  sok::RegisterRule("momentum(m,s)", kMomentum, Momentum);
  constexpr int64_t kDim = 5;
  const std::vector<double> hyper = {0.5, 0.75, 2.0};
  Table table(Config(kDim, 9000));
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; key < 5000; ++key) keys.push_back(key * 3);
  const Rows before = table.Lookup(keys);
  std::vector<float> grads(before.values.size());
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = static_cast<float>(i % 7) - 3.0f;
  const std::vector<int64_t> ids = before.ids;
  table.Apply("momentum(m,s)", hyper, ids, grads);
  std::vector<float> bad = grads;
  bad[2 * kDim + 1] = std::numeric_limits<float>::quiet_NaN();
  table.Apply("momentum(m,s)", hyper, ids, bad, 2, sok::Nonfinite::kSkip);
  const std::vector<float> after = table.Lookup(keys, false).values;
  int64_t wrong = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    float w = before.values[i], m = 2.0f;
    for (int step = 0; step < (static_cast<int64_t>(i) / kDim == 2 ? 1 : 2); ++step) {
      m = 0.75f * m + 0.25f * grads[i];
      w -= 0.5f * m;
    }
    wrong += after[i] != w;
  }
  CHECK_EQ(wrong, 0);
  // Rows that come later start as the layout says.
  const Rows late = table.Lookup({20000});
  table.Apply("momentum(m,s)", hyper, late.ids, std::vector<float>(kDim, 0.0f), 3);
  CHECK_EQ(table.Lookup({20000}, false).values[0], late.values[0] - 0.75f);
  const uint64_t asked[] = {20000, 0};
  float slots[4 * kDim];
  table.native().Slots("momentum(m,s)", asked, 2, slots, std::vector<int64_t>(2).data());
  CHECK_EQ(slots[0], 1.5f);                // m: beta * start
  CHECK_EQ(slots[kDim], 8.5f);             // s: a step after 7.5
  CHECK_EQ(slots[2 * kDim + kDim], 9.5f);  // two steps
}

TEST(ARuleMayHaveNoSlotsAndSeesTheStep) {
  sok::RegisterRule("sign()", Layout("learning_rate", ""), Sign);
  Table table(Config(3, 100));
  const Rows before = table.Lookup({4});
  table.Apply("sign()", {0.5}, before.ids, {2.0f, -2.0f, 9.0f}, 3);
  const std::vector<float> after = table.Lookup({4}, false).values;
  CHECK_EQ(after[0], before.values[0] - 1.5f);
  CHECK_EQ(after[1], before.values[1] + 1.5f);
}

TEST(ANameKeepsItsLayout) {
  using sok::InvalidArgument;
  using sok::RegisterRule;
  RegisterRule("kept(m,s)", kMomentum, Momentum);
  RegisterRule("kept(m,s)", kMomentum, Sign);  // another function of the same layout takes over
  const double hyper[] = {0.5, 0.75, 2.0};
  CHECK(sok::MakeUpdateRule("kept(m,s)", hyper, 3, 1).function == Sign);
  CHECK_THROWS(RegisterRule("kept(m,s)", Layout("learning_rate,beta", ""), Sign), InvalidArgument,
               "'kept(m,s)' with learning_rate, beta, start and [start, 7.5]");
  CHECK_THROWS(RegisterRule("kept(m,s)", Layout(kMomentum.hyper, "start,7"), Sign), InvalidArgument, "another name");
  CHECK_THROWS(RegisterRule("kept(m)", Layout("learning_rate", ""), Sign), InvalidArgument,
               "this process has 'kept(m,s)'");
  CHECK(sok::MakeUpdateRule("kept(m,s)", hyper, 3, 1).function == Sign);
}

TEST(WhatIsNoRuleIsNotRegistered) {
  using sok::InvalidArgument;
  using sok::RegisterRule;
  CHECK_THROWS(RegisterRule("adam", Layout("learning_rate", ""), Sign), InvalidArgument, "one of the library's own");
  CHECK_THROWS(RegisterRule("words", Layout("learning_rate", ""), Sign), InvalidArgument, "Received: 'words'");
  CHECK_THROWS(RegisterRule("bad(m)", Layout("learning_rate", ""), nullptr), InvalidArgument, "must have a function");
  CHECK_THROWS(RegisterRule("bad(m)", Layout("beta", ""), Sign), InvalidArgument, "'learning_rate' as the first");
  std::string many = "learning_rate";
  for (int i = 0; i < 16; ++i) many += ",h";
  CHECK_THROWS(RegisterRule("bad(m)", Layout(many.c_str(), ""), Sign), InvalidArgument, "at most 16");
  for (const char* starts : {"0,0", "beta", ",", "1x", "nan", "inf"})
    CHECK_THROWS(RegisterRule("bad(m)", Layout("learning_rate", starts), Sign), InvalidArgument,
                 "each of its 1 slots what it starts as: a finite number, or one of learning_rate. Received: '" +
                     std::string(starts) + "'");
}

TEST(FunctionsForCAndPythonSayTheSame) {
  const SokRuleLayout layout = Layout("learning_rate,beta", "0.5,beta"), other = Layout("learning_rate", "");
  CHECK(SokRegisterRule("plain(a,b)", &layout, Momentum) == nullptr);
  const char* error = SokRegisterRule("plain(a,b)", &other, Momentum);
  CHECK(error != nullptr && std::string(error).find("another name") != std::string::npos);
  const std::string rules = SokRules();
  CHECK(rules.find("{\"name\": \"adagrad\", \"slots\": [\"accumulator\"], \"num_scalars\": 0, \"starts\": "
                   "[\"initial_accumulator_value\"], "
                   "\"hyper\": [\"learning_rate\", \"initial_accumulator_value\", \"epsilon\"], \"decays\": false, "
                   "\"needs_whole_row\": false}") != std::string::npos);
  CHECK(rules.find("{\"name\": \"plain(a,b)\", \"slots\": [\"a\", \"b\"], \"num_scalars\": 0, \"starts\": [\"0.5\", "
                   "\"beta\"]") != std::string::npos);
  CHECK(rules.find("nobody") == std::string::npos);
}

namespace {

// Weights [1] and slots after the steps that a row has missed, one by one.
template <class R, size_t... k>
void StepByStep(const sok::UpdateRule& rule, const std::vector<sok::MissedStep>& missed, float* w, float* slots,
                std::index_sequence<k...>) {
  for (const sok::MissedStep& step : missed) R(rule).MissedElement(step, w, (slots + k)...);
}

template <class R, size_t... k>
void AtOnce(const sok::UpdateRule& rule, const sok::Decay& decay, float* w, float* slots, std::index_sequence<k...>) {
  R(rule).CatchUp(decay, w, (slots + k)...);
}

}  // namespace

TEST(MissedStepsAtOnceAreMissedStepsOneByOne) {
  for (const std::string& name : RuleNames()) {
    sok::WithRule(sok::ParseRule(name), [&](auto* null) {
      using R = std::remove_pointer_t<decltype(null)>;
      if constexpr (R::kDecays) {
        const auto slots_of = std::make_index_sequence<sok::kNumVectors<R>>();
        sok::AlphaHistory history;
        std::vector<sok::MissedStep> steps;
        const sok::UpdateRule first = RuleNamed(name, 1);
        CHECK_EQ(sok::DecaySums::Fits(first), first.model().has_sums);
        sok::DecaySums sums(first);
        constexpr int64_t kCalls = 900;
        for (int64_t call = 1; call <= kCalls; ++call) {
          // It changes now and then, in some calls at each, and stands still.
          const double lr = call < 300 ? 0.01 : call < 330 ? 0.0 : call < 600 ? 0.02 / static_cast<double>(call) : 1e-3;
          const sok::UpdateRule rule = RuleNamed(name, call, lr);
          steps.push_back(rule.missed);
          history.Append(rule.missed);
          sums.Append(rule.missed);
        }
        for (const int64_t from : {0, 1, 100, 290, 598, 700, 880, 899}) {
          float one[2][4] = {{0.5f, 0.3f, 0.2f, 0.25f}, {0.5f, 0.3f, 0.2f, 0.25f}}, replayed[4];
          std::copy(one[0], one[0] + 4, replayed);
          StepByStep<R>(first, {steps.begin() + from, steps.end()}, &one[0][0], &one[0][1], slots_of);
          if (first.model().has_sums) {
            AtOnce<R>(first, sums.Of(history, from, kCalls), &one[1][0], &one[1][1], slots_of);
          } else {
            sok::ReplayDecay(history, first, from, kCalls, 1, &one[1][0], &one[1][1]);
          }
          sok::ReplayDecay(history, first, from, kCalls, 1, &replayed[0], &replayed[1]);
          for (int k = 0; k <= sok::kNumVectors<R>; ++k) {
            const float tolerance = 3e-5f * std::fabs(one[0][k]) + 1e-6f;  // hundreds of roundings, one by one
            CHECK(std::fabs(one[0][k] - one[1][k]) <= tolerance);
            CHECK(std::fabs(one[0][k] - replayed[k]) <= tolerance);
          }
        }
      }
    });
  }
}

TEST(NamesOfOldFilesAreThoseOfRules) {
  CHECK(sok::ParseRule("RMSprop(velocity,momentum)") == sok::Rule::kLazyRmspropMomentum);
  CHECK_EQ(std::string(sok::RuleName(sok::ParseRule("SGD(m)"))), "lazy_momentum");
  CHECK(sok::ParseRule("RMSPropOptimizer(rms,mg,momentum)") >= sok::kFirstNamed);
}
