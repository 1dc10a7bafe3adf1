// You et al., "Large Batch Optimization for Deep Learning" (2020), of each row by itself: Adam's step, as long as the row.
#pragma once

#include "sok/rules/rule.h"

namespace sok {

struct Lamb : RowRule {
  static constexpr char kName[] = "lamb";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"m"}, {"v"}}};
  static constexpr std::array<const char*, 5> kHyper = {"learning_rate", "beta_1", "beta_2", "epsilon", "weight_decay"};
  static constexpr int kSums = 2;  // the squares of the row, and those of its step

  static void Read(int64_t step, RuleSettings* settings) {
    ReadBetas(step, 1, settings);
    settings->epsilon = static_cast<float>(settings->hyper[3]);
    settings->terms[0] = 1.0f / (1.0f - std::pow(settings->beta_1, static_cast<float>(step)));
    settings->terms[1] = 1.0f / RootOfRest(settings->beta_2, step);
    settings->terms[2] = static_cast<float>(settings->hyper[4]);
  }

  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }

  SOK_HOST_DEVICE explicit Lamb(const RuleSettings& settings)
      : lr(settings.lr),
        one_minus_beta_1(settings.one_minus_beta_1),
        one_minus_beta_2(settings.one_minus_beta_2),
        epsilon(settings.epsilon),
        of_m(settings.terms[0]),
        of_root(settings.terms[1]),
        weight_decay(settings.terms[2]) {}

  SOK_HOST_DEVICE SumsOfRow<2> First(float g, float w, float* m, float* v) const {
    *m += (g - *m) * one_minus_beta_1;
    *v += (g * g - *v) * one_minus_beta_2;
    const float step = Step(w, *m, *v);
    return {{w * w, step * step}};
  }
  // Of a row or a step that is zero: the learning rate.
  SOK_HOST_DEVICE float Factor(const SumsOfRow<2>& sums, int64_t /*dim*/) const {
    return sums.of[0] > 0.0f && sums.of[1] > 0.0f ? lr * (sqrtf(sums.of[0]) / sqrtf(sums.of[1])) : lr;
  }
  SOK_HOST_DEVICE void Element(float /*g*/, float factor, float* w, const float* m, const float* v) const {
    *w -= factor * Step(*w, *m, *v);
  }

  SOK_HOST_DEVICE float Step(float w, float m, float v) const {
    return of_m * m / (of_root * sqrtf(v) + epsilon) + weight_decay * w;
  }

  float lr, one_minus_beta_1, one_minus_beta_2, epsilon, of_m, of_root, weight_decay;
};

}  // namespace sok
