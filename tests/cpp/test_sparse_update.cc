#include "sok/sparse_update.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "sok/error.h"

namespace {

sok::UpdateRule Adam(double lr, int64_t step) {
  const double hyper[] = {lr, 0.9, 0.999, 1e-7};
  return sok::MakeUpdateRule("adam", hyper, 4, step);
}

bool Near(double a, double b, double relative) { return std::fabs(a - b) <= relative * std::fabs(b) + 1e-30; }

}  // namespace

TEST(ElementsFollowTheFormulas) {
  sok::RuleSettings settings;
  settings.lr = 0.25f;
  float w = 1.0f;
  sok::Sgd(settings).Element(2.0f, &w);
  CHECK_EQ(w, 0.5f);

  settings.lr = 0.75f;
  float accumulator = 5.0f;
  sok::Adagrad(settings).Element(2.0f, &w, &accumulator);
  CHECK_EQ(accumulator, 9.0f);
  CHECK_EQ(w, 0.0f);

  settings.lr = 0.5f;
  settings.one_minus_beta_1 = settings.one_minus_beta_2 = 0.25f;
  float m = 0.0f, v = 0.0f;
  sok::Adam(settings).Element(4.0f, &w, &m, &v);
  CHECK_EQ(m, 1.0f);
  CHECK_EQ(v, 4.0f);
  CHECK_EQ(w, -0.25f);
  settings.one_minus_beta_1 = 0.5f;
  settings.one_minus_beta_2 = 0.75f;
  sok::Adam(settings).MissedElement({0.5f}, &w, &m, &v);
  CHECK_EQ(m, 0.5f);
  CHECK_EQ(v, 1.0f);
  CHECK_EQ(w, -0.5f);
}

TEST(AMissedStepIsAStepWithoutGradient) {
  float a[3] = {1.0f, 0.3f, 0.07f}, b[3] = {1.0f, 0.3f, 0.07f};
  const sok::UpdateRule rule = Adam(0.01, 1);
  sok::Adam(rule).Element(0.0f, &a[0], &a[1], &a[2]);
  sok::Adam(rule).MissedElement(rule.missed, &b[0], &b[1], &b[2]);
  for (int i = 0; i < 3; ++i) CHECK_EQ(a[i], b[i]);
}

TEST(AlphaIsTheLearningRateWithBiasCorrection) {
  for (const int64_t step : {1, 2, 10, 1000}) {
    const double t = static_cast<double>(step);
    const double alpha = 0.01 * std::sqrt(1.0 - std::pow(0.999, t)) / (1.0 - std::pow(0.9, t));
    CHECK(Near(Adam(0.01, step).lr, alpha, 1e-4));  // 1 - 0.999^t loses digits in float32, as in Keras
  }
}

TEST(HistoryGivesBackEveryAlpha) {
  sok::AlphaHistory history;
  std::vector<float> alphas;
  for (int call = 0; call < 200; ++call) {
    alphas.push_back(call < 50 ? 0.5f : call < 60 ? static_cast<float>(call) : call % 7 == 0 ? -3.0f : 0.25f);
    history.Append(alphas.back());
  }
  CHECK_EQ(history.calls(), 200);
  CHECK_EQ(history.max_alpha(), 59.0f);
  for (int64_t first = 1; first <= 200; ++first) {
    sok::AlphaCursor cursor(history.view(), first);
    for (int64_t call = first; call <= 200; ++call)
      CHECK_EQ(cursor.Next().alpha, alphas[static_cast<size_t>(call - 1)]);
  }
}

// Replay against every missed step done one by one, with learning rates that change and grow.
TEST(ReplayAgreesWithStepsTakenOneByOne) {
  for (const int64_t missed : {0, 1, 2, 50, 192, 193, 400, 3000}) {
    sok::AlphaHistory history;
    std::vector<sok::UpdateRule> rules;
    for (int64_t call = 1; call <= 10 + missed; ++call) {
      rules.push_back(Adam(call % 100 < 50 ? 0.001 : 0.1, call));
      history.Append(rules.back().lr);
    }
    float slots[10], *m = slots, *v = slots + 5;
    const float w0[] = {1.0f, -2.0f, 0.5f, 3.0f, 0.0f}, m0[] = {0.5f, -0.01f, 0.0f, 1e-8f, 2.0f};
    const float v0[] = {0.3f, 0.2f, 0.1f, 1e-12f, 1e-3f};
    float w[5];
    double ew[5], em[5], ev[5];
    for (int j = 0; j < 5; ++j) {
      ew[j] = w[j] = w0[j];
      em[j] = m[j] = m0[j];
      ev[j] = v[j] = v0[j];
      for (int64_t call = 11; call <= 10 + missed; ++call) {
        em[j] *= 0.9;
        ev[j] *= 0.999;
        ew[j] -= rules[static_cast<size_t>(call - 1)].lr * em[j] / (std::sqrt(ev[j]) + 1e-7);
      }
    }
    sok::ReplayDecay(history, rules.back(), 10, 10 + missed, 5, w, slots);
    for (int j = 0; j < 5; ++j) {
      CHECK(std::fabs(w[j] - ew[j]) <= 1e-5 * std::max(1.0, std::fabs(ew[j])));
      // Hundreds of float32 roundings of m and v; below the smallest normal float there are no digits to keep.
      CHECK(Near(m[j], em[j], 1e-3) || std::fabs(em[j]) < 1e-37);
      CHECK(Near(v[j], ev[j], 1e-3));
    }
  }
}

// With beta_1 >= sqrt(beta_2) steps do not shrink until the momentum is gone: so long they are replayed, and no longer.
TEST(ReplayEndsWithTheMomentum) {
  const double hyper[] = {0.001, 0.9, 0.5, 1e-7};
  const sok::UpdateRule rule = sok::MakeUpdateRule("adam", hyper, 4, 1);
  for (const int64_t missed : {int64_t{500}, int64_t{3000}, int64_t{4000000000}}) {
    sok::AlphaHistory history;
    history.Append({0.001f, 0.0f}, missed);
    CHECK(sok::ReplayLength(rule.model(), 0.001f, 0.001f) < 2000);
    float w = 1.0f, slots[] = {0.5f, 0.25f};
    double ew = w, em = slots[0], ev = slots[1];
    for (int64_t call = 0; call < std::min<int64_t>(missed, 5000); ++call) {
      em *= 0.9;
      ev *= 0.5;
      ew -= 0.001 * em / (std::sqrt(ev) + 1e-7);
    }
    sok::ReplayDecay(history, rule, 0, missed, 1, &w, slots);
    CHECK(std::fabs(w - ew) <= 1e-5 * std::fabs(ew));
  }
  const double slowest[] = {0.001, 0.999, 0.5, 1e-7};
  CHECK(sok::ReplayLength(sok::MakeUpdateRule("adam", slowest, 4, 1).model(), 0.001f, 0.001f) < 200000);
}

TEST(BadRulesAreRefused) {
  const double rounds_to_one[] = {1.0, 0.9, 1.0 - 1e-9, 1e-7}, slow[] = {1.0, 0.9999, 0.999, 1e-7};
  CHECK_THROWS(sok::MakeUpdateRule("lazy_adam", rounds_to_one, 4, 1), sok::InvalidArgument, "beta_2 must lie in");
  CHECK_THROWS(sok::MakeUpdateRule("adam", slow, 4, 1), sok::InvalidArgument, "must be at most 0.999");
  CHECK_EQ(sok::MakeUpdateRule("lazy_adam", slow, 4, 1).beta_1, 0.9999f);
  const double hyper[] = {1.0, 1.0, 0.9, 1e-7};
  CHECK_THROWS(sok::MakeUpdateRule("nobody", hyper, 1, 1), sok::InvalidArgument, "Received: 'nobody'");
  CHECK_THROWS(sok::MakeUpdateRule("sgd", hyper, 2, 1), sok::InvalidArgument, "must have 1 values. Received: 2");
  CHECK_THROWS(sok::MakeUpdateRule("adam", hyper, 4, 1), sok::InvalidArgument, "beta_1 must lie in [0, 1)");
  CHECK_THROWS(sok::MakeUpdateRule("lazy_adam", hyper, 4, 0), sok::InvalidArgument, "step must be at least 1");
  CHECK_THROWS(sok::ParseNonfinite("warn"), sok::InvalidArgument, "Received: 'warn'");
}
