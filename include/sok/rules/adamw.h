// Adam with decoupled weight decay (Loshchilov and Hutter, 2019), in the form of Keras: the decay comes first, and is multiplied
// with the learning rate.
#pragma once

#include "sok/exact_math.h"
#include "sok/rules/adam.h"

namespace sok {

struct AdamW : RowRule {
  static constexpr char kName[] = "adamw";
  static constexpr std::array<RuleSlot, 2> kSlots = Adam::kSlots;
  static constexpr std::array<const char*, 5> kHyper = {"learning_rate", "beta_1", "beta_2", "epsilon", "weight_decay"};
  static constexpr bool kDecays = true;
  static constexpr bool kHasExtra = true;  // the logarithm of what a step leaves of a weight
  static constexpr int kMomentumSlot = -1;

  static void Read(int64_t step, RuleSettings* settings) {
    const double decayed = settings->hyper[4] * static_cast<double>(settings->lr);
    if (!(decayed < 1.0)) {
      throw InvalidArgument(
          "weight_decay times the learning rate must be below 1. Received: " + std::to_string(decayed) + ".");
    }
    Adam::Read(step, settings);
    settings->terms[0] = static_cast<float>(decayed);
    settings->missed = {settings->lr, static_cast<float>(std::log1p(-decayed))};
  }

  static std::string Error(const RuleSettings& settings) {
    const std::string error = BetaError(settings);
    return error.empty() ? SlowError(settings, "adamw") : error;
  }

  static DecayModel Model(const RuleSettings& settings) {
    DecayModel model = Adam::Model(settings);
    model.shrinks = true;
    return model;
  }

  SOK_HOST_DEVICE explicit AdamW(const RuleSettings& settings) : adam(settings), decayed(settings.terms[0]) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* m, float* v) const {
    *w -= *w * decayed;
    adam.Element(g, w, m, v);
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& missed, float* w, float* m, float* v) const {
    *w *= static_cast<float>(ExactExp(missed.extra));
    adam.MissedElement(missed, w, m, v);
  }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* w, float* m, float* v) const {
    *w *= decay.keep;
    adam.CatchUp(decay, w, m, v);
  }

  Adam adam;
  float decayed;
};

struct LazyAdamW : AdamW {
  static constexpr char kName[] = "lazy_adamw";
  static constexpr bool kDecays = false;
  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }
  using AdamW::AdamW;
};

}  // namespace sok
