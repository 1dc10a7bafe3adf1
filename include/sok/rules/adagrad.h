// Duchi, Hazan, Singer (2011).
#pragma once

#include "sok/rules/rule.h"

namespace sok {

struct Adagrad : RowRule {
  static constexpr char kName[] = "adagrad";
  static constexpr std::array<RuleSlot, 1> kSlots = {{{"accumulator", "initial_accumulator_value"}}};
  static constexpr std::array<const char*, 3> kHyper = {"learning_rate", "initial_accumulator_value", "epsilon"};
  static constexpr bool kFilesHoldBetas = true;

  static void Read(int64_t /*step*/, RuleSettings* settings) {
    settings->epsilon = static_cast<float>(settings->hyper[2]);
  }

  SOK_HOST_DEVICE explicit Adagrad(const RuleSettings& settings) : lr(settings.lr), epsilon(settings.epsilon) {}
  SOK_HOST_DEVICE void Element(float g, float* w, float* accumulator) const {
    *accumulator += g * g;
    *w -= lr * g / sqrtf(*accumulator + epsilon);
  }

  float lr, epsilon;
};

}  // namespace sok
