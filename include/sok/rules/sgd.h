// Plain gradient descent.
#pragma once

#include "sok/rules/rule.h"

namespace sok {

struct Sgd : RowRule {
  static constexpr char kName[] = "sgd";
  static constexpr std::array<RuleSlot, 0> kSlots = {};
  static constexpr std::array<const char*, 1> kHyper = {"learning_rate"};
  static constexpr bool kFilesHoldBetas = true;

  SOK_HOST_DEVICE explicit Sgd(const RuleSettings& settings) : lr(settings.lr) {}
  SOK_HOST_DEVICE void Element(float g, float* w) const { *w -= lr * g; }

  float lr;
};

}  // namespace sok
