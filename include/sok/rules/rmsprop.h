// Hinton's RMSprop, with or without momentum, with or without the mean gradient taken off (Graves, 2013), as Keras writes it.
// With epsilon_in_root 0 epsilon stands beside the root, as in tf_keras.optimizers.legacy.RMSprop.
#pragma once

#include "sok/rules/decay.h"

namespace sok {

// What the four have in common. beta_1: momentum; beta_2: rho.
struct RmspropBase : RowRule {
  static constexpr std::array<const char*, 6> kHyper = {"learning_rate", "momentum",        "rho",
                                                        "epsilon",       "epsilon_in_root", "initial_velocity"};
  static constexpr bool kDecays = true;
  static constexpr int kMomentumSlot = -1;

  static void Read(int64_t step, RuleSettings* settings) {
    ReadBetas(step, 1, settings);
    settings->epsilon = static_cast<float>(settings->hyper[3]);
    const bool in_root = settings->hyper[4] != 0.0;
    settings->terms[0] = in_root ? settings->epsilon : 0.0f;
    settings->terms[1] = in_root ? 0.0f : settings->epsilon;
    settings->missed.alpha = 1.0f;
  }

  static std::string Error(const RuleSettings& settings) {
    const std::string error = LazyError(settings);
    return error.empty() ? SlowError(settings, "rmsprop_momentum", "momentum") : error;
  }
  static std::string LazyError(const RuleSettings& settings) { return BetaError(settings, "momentum", "rho"); }

  static DecayModel Model(const RuleSettings& settings) { return {settings.beta_1, settings.beta_2}; }

  SOK_HOST_DEVICE explicit RmspropBase(const RuleSettings& settings)
      : lr(settings.lr),
        mu(settings.beta_1),
        rho(settings.beta_2),
        one_minus_rho(settings.one_minus_beta_2),
        inside(settings.terms[0]),
        beside(settings.terms[1]) {}

 protected:
  SOK_HOST_DEVICE float Step(float g, float variance) const { return lr * g / (sqrtf(variance + inside) + beside); }
  SOK_HOST_DEVICE void Fade(float by, float* mean, float next) const { *mean = by * *mean + next; }

  float lr, mu, rho, one_minus_rho, inside, beside;
};

struct Rmsprop : RmspropBase {
  static constexpr char kName[] = "rmsprop";
  static constexpr std::array<RuleSlot, 1> kSlots = {{{"velocity", "initial_velocity"}}};

  using RmspropBase::RmspropBase;

  SOK_HOST_DEVICE void Element(float g, float* w, float* v) const {
    Fade(rho, v, one_minus_rho * (g * g));
    *w -= Step(g, *v);
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& /*missed*/, float* /*w*/, float* v) const { *v *= rho; }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* /*w*/, float* v) const { *v *= decay.fade_v; }
};

struct RmspropMomentum : RmspropBase {
  static constexpr char kName[] = "rmsprop_momentum";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"velocity", "initial_velocity"}, {"momentum"}}};
  static constexpr int kMomentumSlot = 1;

  using RmspropBase::RmspropBase;

  SOK_HOST_DEVICE void Element(float g, float* w, float* v, float* m) const {
    Fade(rho, v, one_minus_rho * (g * g));
    *m = mu * *m + Step(g, *v);
    *w -= *m;
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& /*missed*/, float* w, float* v, float* m) const {
    *v *= rho;
    *m *= mu;
    *w -= *m;
  }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* w, float* v, float* m) const {
    *v *= decay.fade_v;
    *w -= decay.a[0] * *m;
    *m *= decay.fade_m;
  }
};

struct RmspropCentered : RmspropBase {
  static constexpr char kName[] = "rmsprop_centered";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"velocity", "initial_velocity"}, {"average_gradient"}}};

  using RmspropBase::RmspropBase;

  SOK_HOST_DEVICE void Element(float g, float* w, float* v, float* mean) const {
    Fade(rho, v, one_minus_rho * (g * g));
    Fade(rho, mean, one_minus_rho * g);
    *w -= Step(g, *v - *mean * *mean);
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& /*missed*/, float* /*w*/, float* v, float* mean) const {
    *v *= rho;
    *mean *= rho;
  }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* /*w*/, float* v, float* mean) const {
    *v *= decay.fade_v;
    *mean *= decay.fade_v;
  }
};

struct RmspropCenteredMomentum : RmspropBase {
  static constexpr char kName[] = "rmsprop_centered_momentum";
  static constexpr std::array<RuleSlot, 3> kSlots = {
      {{"velocity", "initial_velocity"}, {"momentum"}, {"average_gradient"}}};
  static constexpr int kMomentumSlot = 1;

  using RmspropBase::RmspropBase;

  SOK_HOST_DEVICE void Element(float g, float* w, float* v, float* m, float* mean) const {
    Fade(rho, v, one_minus_rho * (g * g));
    Fade(rho, mean, one_minus_rho * g);
    *m = mu * *m + Step(g, *v - *mean * *mean);
    *w -= *m;
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& /*missed*/, float* w, float* v, float* m, float* mean) const {
    *v *= rho;
    *mean *= rho;
    *m *= mu;
    *w -= *m;
  }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* w, float* v, float* m, float* mean) const {
    *v *= decay.fade_v;
    *mean *= decay.fade_v;
    *w -= decay.a[0] * *m;
    *m *= decay.fade_m;
  }
};

struct LazyRmsprop : Rmsprop {
  static constexpr char kName[] = "lazy_rmsprop";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 2> kFormerly = {"RMSprop(velocity)", "RMSprop(rms)"};
  static std::string Error(const RuleSettings& settings) { return LazyError(settings); }
  using Rmsprop::Rmsprop;
};

struct LazyRmspropMomentum : RmspropMomentum {
  static constexpr char kName[] = "lazy_rmsprop_momentum";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 3> kFormerly = {"RMSprop(velocity,momentum)", "RMSprop(rms,momentum)",
                                                           "RMSPropOptimizer(rms,momentum)"};
  static std::string Error(const RuleSettings& settings) { return LazyError(settings); }
  using RmspropMomentum::RmspropMomentum;
};

struct LazyRmspropCentered : RmspropCentered {
  static constexpr char kName[] = "lazy_rmsprop_centered";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 2> kFormerly = {"RMSprop(velocity,average_gradient)", "RMSprop(rms,mg)"};
  static std::string Error(const RuleSettings& settings) { return LazyError(settings); }
  using RmspropCentered::RmspropCentered;
};

struct LazyRmspropCenteredMomentum : RmspropCenteredMomentum {
  static constexpr char kName[] = "lazy_rmsprop_centered_momentum";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 2> kFormerly = {"RMSprop(velocity,momentum,average_gradient)",
                                                           "RMSprop(rms,momentum,mg)"};
  static std::string Error(const RuleSettings& settings) { return LazyError(settings); }
  using RmspropCenteredMomentum::RmspropCenteredMomentum;
};

}  // namespace sok
