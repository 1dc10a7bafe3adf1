// Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), in the form of Keras. An untouched row goes on by the sign
// of its momentum, which never fades: so far as learning rates add up.
#pragma once

#include "sok/rules/decay.h"

namespace sok {

struct Lion : RowRule {
  static constexpr char kName[] = "lion";
  static constexpr std::array<RuleSlot, 1> kSlots = {{{"m"}}};
  static constexpr std::array<const char*, 3> kHyper = {"learning_rate", "beta_1", "beta_2"};
  static constexpr bool kDecays = true;
  static constexpr bool kHasExtra = true;  // the learning rate
  static constexpr int kMomentumSlot = -1;

  static void Read(int64_t step, RuleSettings* settings) {
    ReadBetas(step, 1, settings);
    SubtractInFloat32(settings);
    settings->missed.extra = settings->lr;
  }

  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }

  static DecayModel Model(const RuleSettings& settings) {
    DecayModel model = {0.0, settings.beta_2};
    model.adds_extra = true;
    return model;
  }

  SOK_HOST_DEVICE explicit Lion(const RuleSettings& settings)
      : lr(settings.lr),
        beta_1(settings.beta_1),
        beta_2(settings.beta_2),
        one_minus_beta_1(settings.one_minus_beta_1),
        one_minus_beta_2(settings.one_minus_beta_2) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* m) const {
    *w -= lr * Sign(beta_1 * *m + one_minus_beta_1 * g);
    *m = beta_2 * *m + one_minus_beta_2 * g;
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& missed, float* w, float* m) const {
    *w -= missed.extra * Sign(beta_1 * *m);
    *m *= beta_2;
  }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* w, float* m) const {
    *w -= decay.extra * Sign(beta_1 * *m);
    *m *= decay.fade_v;
  }

  // Of NaN it is NaN.
  SOK_HOST_DEVICE static float Sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

  float lr, beta_1, beta_2, one_minus_beta_1, one_minus_beta_2;
};

struct LazyLion : Lion {
  static constexpr char kName[] = "lazy_lion";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 2> kFormerly = {"Lion(momentum)", "Lion(m)"};
  using Lion::Lion;
};

}  // namespace sok
