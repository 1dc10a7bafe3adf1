// Gradient descent with momentum (Polyak, 1964), or Nesterov's form of it, as Keras writes them: the slot holds the last step.
// With rate_in_velocity 0 it holds gradients, as that of tf.compat.v1.train.MomentumOptimizer.
#pragma once

#include "sok/rules/decay.h"

namespace sok {

struct Momentum : RowRule {
  static constexpr char kName[] = "momentum";
  static constexpr std::array<RuleSlot, 1> kSlots = {{{"momentum"}}};
  static constexpr std::array<const char*, 4> kHyper = {"learning_rate", "momentum", "nesterov", "rate_in_velocity"};
  static constexpr bool kDecays = true;

  static void Read(int64_t /*step*/, RuleSettings* settings) {
    const bool nesterov = settings->hyper[2] != 0.0, rate_in_velocity = settings->hyper[3] != 0.0;
    const float mu = settings->beta_1 = static_cast<float>(settings->hyper[1]);
    settings->one_minus_beta_1 = static_cast<float>(1.0 - settings->hyper[1]);
    const float of_velocity = rate_in_velocity ? 1.0f : -settings->lr;
    settings->terms[0] = rate_in_velocity ? -settings->lr : 1.0f;
    settings->terms[1] = nesterov ? of_velocity * mu : of_velocity;
    settings->terms[2] = nesterov ? -settings->lr : 0.0f;
    settings->missed.alpha = settings->terms[1];
  }

  static std::string Error(const RuleSettings& settings) {
    const std::string error = BetaError(settings, "momentum");
    return error.empty() ? SlowError(settings, "momentum", "momentum") : error;
  }

  static DecayModel Model(const RuleSettings& settings) { return {settings.beta_1}; }

  SOK_HOST_DEVICE explicit Momentum(const RuleSettings& settings)
      : mu(settings.beta_1), taken(settings.terms[0]), of_velocity(settings.terms[1]), of_gradient(settings.terms[2]) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* m) const {
    *m = mu * *m + taken * g;
    *w += of_velocity * *m + of_gradient * g;
  }

  SOK_HOST_DEVICE void MissedElement(const MissedStep& missed, float* w, float* m) const {
    *m = mu * *m;
    *w += missed.alpha * *m;
  }

  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* w, float* m) const {
    *w += decay.a[0] * *m;
    *m *= decay.fade_m;
  }

  float mu, taken, of_velocity, of_gradient;
};

struct LazyMomentum : Momentum {
  static constexpr char kName[] = "lazy_momentum";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 3> kFormerly = {"SGD(momentum)", "SGD(m)", "MomentumOptimizer(momentum)"};

  static std::string Error(const RuleSettings& settings) { return BetaError(settings, "momentum"); }

  using Momentum::Momentum;
};

}  // namespace sok
