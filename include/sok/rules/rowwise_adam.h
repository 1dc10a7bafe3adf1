// Adam with one v for all of a row, of the mean of its squared gradients: FBGEMM's partial row-wise Adam. Epsilon is beside the
// corrected root, as there.
#pragma once

#include "sok/rules/rule.h"

namespace sok {

struct RowwiseAdam : RowRule {
  static constexpr char kName[] = "rowwise_adam";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"m"}, {"v", "0", true}}};
  static constexpr std::array<const char*, 4> kHyper = {"learning_rate", "beta_1", "beta_2", "epsilon"};
  static constexpr int kSums = 1;

  static void Read(int64_t step, RuleSettings* settings) {
    ReadBetas(step, 1, settings);
    settings->epsilon = static_cast<float>(settings->hyper[3]);
    settings->terms[0] = settings->lr / (1.0f - std::pow(settings->beta_1, static_cast<float>(step)));
    settings->terms[1] = 1.0f / RootOfRest(settings->beta_2, step);
  }

  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }

  SOK_HOST_DEVICE explicit RowwiseAdam(const RuleSettings& settings)
      : one_minus_beta_1(settings.one_minus_beta_1),
        one_minus_beta_2(settings.one_minus_beta_2),
        epsilon(settings.epsilon),
        of_m(settings.terms[0]),
        of_root(settings.terms[1]) {}

  SOK_HOST_DEVICE SumsOfRow<1> First(float g, float /*w*/, const float* /*m*/) const { return {{g * g}}; }
  SOK_HOST_DEVICE float Factor(const SumsOfRow<1>& sums, int64_t dim, float* v) const {
    *v += (sums.of[0] / static_cast<float>(dim) - *v) * one_minus_beta_2;
    return of_m / (of_root * sqrtf(*v) + epsilon);
  }
  SOK_HOST_DEVICE void Element(float g, float factor, float* w, float* m) const {
    *m += (g - *m) * one_minus_beta_1;
    *w -= factor * *m;
  }

  float one_minus_beta_1, one_minus_beta_2, epsilon, of_m, of_root;
};

}  // namespace sok
