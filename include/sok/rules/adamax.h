// Adam by the largest gradient (Kingma and Ba, 2015, section 7.1), in the form of Keras.
#pragma once

#include "sok/rules/decay.h"

namespace sok {

struct Adamax : RowRule {
  static constexpr char kName[] = "adamax";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"m"}, {"v"}}};
  static constexpr std::array<const char*, 4> kHyper = {"learning_rate", "beta_1", "beta_2", "epsilon"};
  static constexpr bool kDecays = true;

  static void Read(int64_t step, RuleSettings* settings) {
    ReadBetas(step, 1, settings);
    settings->epsilon = static_cast<float>(settings->hyper[3]);
    settings->lr /= 1.0f - std::pow(settings->beta_1, static_cast<float>(step));
    settings->missed.alpha = settings->lr;
  }

  static std::string Error(const RuleSettings& settings) {
    const std::string error = BetaError(settings);
    return error.empty() ? SlowError(settings, "adamax") : error;
  }

  static DecayModel Model(const RuleSettings& settings) { return {settings.beta_1, settings.beta_2, settings.beta_2}; }

  SOK_HOST_DEVICE explicit Adamax(const RuleSettings& settings)
      : alpha(settings.lr),
        one_minus_beta_1(settings.one_minus_beta_1),
        beta_2(settings.beta_2),
        epsilon(settings.epsilon) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* m, float* v) const {
    *m += (g - *m) * one_minus_beta_1;
    const float faded = beta_2 * *v, size = fabsf(g);
    *v = size > faded || size != size ? size : faded;
    *w -= alpha * *m / (*v + epsilon);
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& missed, float* w, float* m, float* v) const {
    *m -= *m * one_minus_beta_1;
    *v *= beta_2;
    *w -= missed.alpha * *m / (*v + epsilon);
  }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* w, float* m, float* v) const {
    *w -= DecayedBy(decay, epsilon, *m, *v);
    *m *= decay.fade_m;
    *v *= decay.fade_v;
  }

  float alpha, one_minus_beta_1, beta_2, epsilon;
};

struct LazyAdamax : Adamax {
  static constexpr char kName[] = "lazy_adamax";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 3> kFormerly = {"Adamax(momentum,norm)", "Adamax(m,u)", "Adamax(m,v)"};
  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }
  using Adamax::Adamax;
};

}  // namespace sok
