// Adagrad with one number for all of a row: the mean of its squared gradients, added up. As in FBGEMM, epsilon is beside the root.
#pragma once

#include "sok/rules/rule.h"

namespace sok {

struct RowwiseAdagrad : RowRule {
  static constexpr char kName[] = "rowwise_adagrad";
  static constexpr std::array<RuleSlot, 1> kSlots = {{{"accumulator", "initial_accumulator_value", true}}};
  static constexpr std::array<const char*, 3> kHyper = {"learning_rate", "initial_accumulator_value", "epsilon"};
  static constexpr int kSums = 1;

  static void Read(int64_t /*step*/, RuleSettings* settings) {
    settings->epsilon = static_cast<float>(settings->hyper[2]);
  }

  SOK_HOST_DEVICE explicit RowwiseAdagrad(const RuleSettings& settings) : lr(settings.lr), epsilon(settings.epsilon) {}

  SOK_HOST_DEVICE SumsOfRow<1> First(float g, float /*w*/) const { return {{g * g}}; }
  SOK_HOST_DEVICE float Factor(const SumsOfRow<1>& sums, int64_t dim, float* accumulator) const {
    *accumulator += sums.of[0] / static_cast<float>(dim);
    return lr / (sqrtf(*accumulator) + epsilon);
  }
  SOK_HOST_DEVICE void Element(float g, float factor, float* w) const { *w -= factor * g; }

  float lr, epsilon;
};

}  // namespace sok
