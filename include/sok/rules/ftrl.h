// McMahan et al., "Ad Click Prediction" (2013), with shrinkage, in the form of Keras. Rows outside the batch stay as they are,
// where Keras would set those that never had a gradient to zero.
#pragma once

#include "sok/exact_math.h"
#include "sok/rules/rule.h"

namespace sok {

struct Ftrl : RowRule {
  static constexpr char kName[] = "ftrl";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"accumulator", "initial_accumulator_value"}, {"linear"}}};
  static constexpr std::array<const char*, 7> kHyper = {"learning_rate",
                                                        "learning_rate_power",
                                                        "initial_accumulator_value",
                                                        "l1_regularization_strength",
                                                        "l2_regularization_strength",
                                                        "l2_shrinkage_regularization_strength",
                                                        "beta"};
  static constexpr std::array<const char*, 2> kFormerly = {"Ftrl(accumulator,linear)", "FtrlOptimizer(accum,linear)"};

  static void Read(int64_t /*step*/, RuleSettings* settings) {
    const double* hyper = settings->hyper;
    const float lr = settings->lr;
    if (!(lr > 0.0f)) throw InvalidArgument("the learning rate of Ftrl must be above 0: it divides by it.");
    settings->terms[0] = static_cast<float>(-hyper[1]);
    settings->terms[1] = static_cast<float>(hyper[3]);
    settings->terms[2] = 2.0f * (static_cast<float>(hyper[4]) + static_cast<float>(hyper[6]) / (2.0f * lr));
    settings->terms[3] = 2.0f * static_cast<float>(hyper[5]);
  }

  SOK_HOST_DEVICE explicit Ftrl(const RuleSettings& settings)
      : lr(settings.lr),
        power(settings.terms[0]),
        l1(settings.terms[1]),
        twice_l2(settings.terms[2]),
        twice_shrinkage(settings.terms[3]) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* accumulator, float* linear) const {
    const float grown = *accumulator + g * g, now = Power(grown);
    *linear += g + twice_shrinkage * *w - (now - Power(*accumulator)) / lr * *w;
    const float clipped = *linear < -l1 ? -l1 : *linear > l1 ? l1 : *linear;
    *w = (clipped - *linear) / (now / lr + twice_l2);
    *accumulator = grown;
  }

  SOK_HOST_DEVICE float Power(float x) const {
    return power == 0.5f ? sqrtf(x) : static_cast<float>(ExactPow(x, power));
  }

  float lr, power, l1, twice_l2, twice_shrinkage;
};

}  // namespace sok
