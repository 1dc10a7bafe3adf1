// Kingma and Ba (2015), in the form of Keras (epsilon beside the uncorrected root), of every row in every step: rows that are
// not in the batch catch up by adam_decay.h.
#pragma once

#include "sok/error.h"
#include "sok/rules/rule.h"

namespace sok {

struct Adam : RowRule {
  static constexpr char kName[] = "adam";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"m"}, {"v"}}};
  static constexpr std::array<const char*, 4> kHyper = {"learning_rate", "beta_1", "beta_2", "epsilon"};
  static constexpr bool kDecays = true;
  static constexpr bool kFilesHoldBetas = true;

  static void Read(int64_t step, RuleSettings* settings) {
    if (step < 1) throw InvalidArgument("step must be at least 1. Received: " + std::to_string(step) + ".");
    settings->beta_1 = static_cast<float>(settings->hyper[1]);
    settings->beta_2 = static_cast<float>(settings->hyper[2]);
    settings->one_minus_beta_1 = static_cast<float>(1.0 - settings->hyper[1]);
    settings->one_minus_beta_2 = static_cast<float>(1.0 - settings->hyper[2]);
    settings->epsilon = static_cast<float>(settings->hyper[3]);
    // In float32, as Keras works it out: 1 - beta_2^t loses digits at small t, and we must lose the same.
    const float t = static_cast<float>(step);
    settings->lr *= std::sqrt(1.0f - std::pow(settings->beta_2, t)) / (1.0f - std::pow(settings->beta_1, t));
  }

  // A row's momentum is gone after some 200,000 missed steps: so long it may take to catch up with them.
  static std::string Error(const RuleSettings& settings) {
    const std::string error = BetaError(settings);
    if (!error.empty() || settings.beta_1 <= 0.999f) return error;
    return "beta_1 of rule 'adam' must be at most 0.999 (of 'lazy_adam' it may be more). Received: " +
           std::to_string(settings.beta_1) + ".";
  }

  SOK_HOST_DEVICE explicit Adam(const RuleSettings& settings)
      : alpha(settings.lr),
        one_minus_beta_1(settings.one_minus_beta_1),
        one_minus_beta_2(settings.one_minus_beta_2),
        epsilon(settings.epsilon) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* m, float* v) const {
    *m += (g - *m) * one_minus_beta_1;
    *v += (g * g - *v) * one_minus_beta_2;
    *w -= alpha * *m / (sqrtf(*v) + epsilon);
  }

  // The same with g = 0, by the alpha of a missed step: what every untouched row of a dense Adam goes through.
  SOK_HOST_DEVICE void MissedElement(float missed_alpha, float* w, float* m, float* v) const {
    *m -= *m * one_minus_beta_1;
    *v -= *v * one_minus_beta_2;
    *w -= missed_alpha * *m / (sqrtf(*v) + epsilon);
  }

  float alpha, one_minus_beta_1, one_minus_beta_2, epsilon;

 protected:
  // Betas are below 1 after rounding to float32, too.
  static std::string BetaError(const RuleSettings& settings) {
    const float betas[2] = {settings.beta_1, settings.beta_2};
    const float rests[2] = {settings.one_minus_beta_1, settings.one_minus_beta_2};
    for (int i = 0; i < 2; ++i) {
      const std::string name = "beta_" + std::to_string(i + 1);
      if (!(betas[i] >= 0.0f && betas[i] < 1.0f)) {
        return name + " must lie in [0, 1), in float32. Received: " + std::to_string(betas[i]) + ".";
      }
      if (!(std::fabs(1.0 - betas[i] - rests[i]) < 1e-6)) {
        return "1 - " + name + " must not be " + std::to_string(rests[i]) + " where " + name + " is " +
               std::to_string(betas[i]) + ".";
      }
    }
    return {};
  }
};

}  // namespace sok
