// Adam whose denominator never shrinks (Reddi, Kale, Kumar, 2018), in the form of Keras: the largest v is not corrected.
#pragma once

#include "sok/rules/adam.h"

namespace sok {

struct Amsgrad : RowRule {
  static constexpr char kName[] = "amsgrad";
  static constexpr std::array<RuleSlot, 3> kSlots = {{{"m"}, {"v"}, {"vhat"}}};
  static constexpr std::array<const char*, 4> kHyper = Adam::kHyper;
  static constexpr bool kDecays = true;

  static void Read(int64_t step, RuleSettings* settings) { Adam::Read(step, settings); }

  static std::string Error(const RuleSettings& settings) {
    const std::string error = BetaError(settings);
    return error.empty() ? SlowError(settings, "amsgrad") : error;
  }

  static DecayModel Model(const RuleSettings& settings) { return {settings.beta_1, settings.beta_2}; }

  SOK_HOST_DEVICE explicit Amsgrad(const RuleSettings& settings)
      : alpha(settings.lr),
        one_minus_beta_1(settings.one_minus_beta_1),
        one_minus_beta_2(settings.one_minus_beta_2),
        epsilon(settings.epsilon) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* m, float* v, float* vhat) const {
    *m += (g - *m) * one_minus_beta_1;
    *v += (g * g - *v) * one_minus_beta_2;
    *vhat = *v > *vhat || *v != *v ? *v : *vhat;
    *w -= alpha * *m / (sqrtf(*vhat) + epsilon);
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& missed, float* w, float* m, float* v, float* vhat) const {
    *m -= *m * one_minus_beta_1;
    *v -= *v * one_minus_beta_2;
    *w -= missed.alpha * *m / (sqrtf(*vhat) + epsilon);
  }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* w, float* m, float* v, float* vhat) const {
    *w -= DecayedBy(decay, epsilon, *m, sqrtf(*vhat));
    *m *= decay.fade_m;
    *v *= decay.fade_v;
  }

  float alpha, one_minus_beta_1, one_minus_beta_2, epsilon;
};

struct LazyAmsgrad : Amsgrad {
  static constexpr char kName[] = "lazy_amsgrad";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 2> kFormerly = {"Adam(momentum,velocity,velocity_hat)", "Adam(m,v,vhat)"};
  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }
  using Amsgrad::Amsgrad;
};

}  // namespace sok
