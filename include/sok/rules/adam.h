// Kingma and Ba (2015), in the form of Keras (epsilon beside the uncorrected root), of every row in every step: rows that are
// not in the batch catch up by adam_decay.h.
#pragma once

#include "sok/rules/decay.h"

namespace sok {

struct Adam : RowRule {
  static constexpr char kName[] = "adam";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"m"}, {"v"}}};
  static constexpr std::array<const char*, 4> kHyper = {"learning_rate", "beta_1", "beta_2", "epsilon"};
  static constexpr bool kDecays = true;
  static constexpr bool kFilesHoldBetas = true;

  static void Read(int64_t step, RuleSettings* settings) {
    ReadBetas(step, 1, settings);
    settings->epsilon = static_cast<float>(settings->hyper[3]);
    settings->lr *= Correction(*settings, step);
    settings->missed.alpha = settings->lr;
  }

  static float Correction(const RuleSettings& settings, int64_t step) {
    return RootOfRest(settings.beta_2, step) / (1.0f - std::pow(settings.beta_1, static_cast<float>(step)));
  }

  static std::string Error(const RuleSettings& settings) {
    const std::string error = BetaError(settings);
    return error.empty() ? SlowError(settings, "adam") : error;
  }

  static DecayModel Model(const RuleSettings& settings) {
    const double beta_2 = settings.beta_2;
    return {settings.beta_1, beta_2, std::sqrt(beta_2)};
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
  SOK_HOST_DEVICE void MissedElement(const MissedStep& missed, float* w, float* m, float* v) const {
    *m -= *m * one_minus_beta_1;
    *v -= *v * one_minus_beta_2;
    *w -= missed.alpha * *m / (sqrtf(*v) + epsilon);
  }

  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* w, float* m, float* v) const {
    *w -= DecayedBy(decay, epsilon, *m, sqrtf(*v));
    *m *= decay.fade_m;
    *v *= decay.fade_v;
  }

  float alpha, one_minus_beta_1, one_minus_beta_2, epsilon;
};

}  // namespace sok
