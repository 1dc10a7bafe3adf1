// Zeiler (2012), with a learning rate as in Keras.
#pragma once

#include "sok/rules/decay.h"

namespace sok {

// beta_2: rho.
struct Adadelta : RowRule {
  static constexpr char kName[] = "adadelta";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"accum_grad"}, {"accum_var"}}};
  static constexpr std::array<const char*, 3> kHyper = {"learning_rate", "rho", "epsilon"};
  static constexpr bool kDecays = true;
  static constexpr int kMomentumSlot = -1;

  static void Read(int64_t /*step*/, RuleSettings* settings) {
    settings->beta_2 = static_cast<float>(settings->hyper[1]);
    settings->one_minus_beta_2 = static_cast<float>(1.0 - settings->hyper[1]);
    settings->epsilon = static_cast<float>(settings->hyper[2]);
  }

  static std::string Error(const RuleSettings& settings) { return BetaError(settings, "beta_1", "rho"); }
  static DecayModel Model(const RuleSettings& settings) { return {0.0, settings.beta_2}; }

  SOK_HOST_DEVICE explicit Adadelta(const RuleSettings& settings)
      : lr(settings.lr), rho(settings.beta_2), one_minus_rho(settings.one_minus_beta_2), epsilon(settings.epsilon) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* of_gradients, float* of_steps) const {
    *of_gradients = rho * *of_gradients + one_minus_rho * (g * g);
    const float step = sqrtf(*of_steps + epsilon) * g / sqrtf(*of_gradients + epsilon);
    *of_steps = rho * *of_steps + one_minus_rho * (step * step);
    *w -= lr * step;
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& /*missed*/, float* /*w*/, float* of_gradients,
                                     float* of_steps) const {
    *of_gradients *= rho;
    *of_steps *= rho;
  }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* /*w*/, float* of_gradients, float* of_steps) const {
    *of_gradients *= decay.fade_v;
    *of_steps *= decay.fade_v;
  }

  float lr, rho, one_minus_rho, epsilon;
};

struct LazyAdadelta : Adadelta {
  static constexpr char kName[] = "lazy_adadelta";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 3> kFormerly = {"Adadelta(accumulated_grad,accumulated_delta_var)",
                                                           "Adadelta(accum_grad,accum_var)",
                                                           "AdadeltaOptimizer(accum,accum_update)"};
  using Adadelta::Adadelta;
};

}  // namespace sok
