// Gradient descent with decoupled weight decay, and momentum if there is any, in the form of Keras: the decay comes first, and is
// multiplied with the learning rate. Where the momentum is 0 it is also what plain gradient descent does to the penalty
// weight_decay / 2 |w|^2 of all rows, those outside the batch too.
#pragma once

#include "sok/exact_math.h"
#include "sok/rules/momentum.h"

namespace sok {

struct SgdW : RowRule {
  static constexpr char kName[] = "sgdw";
  static constexpr std::array<RuleSlot, 1> kSlots = Momentum::kSlots;
  static constexpr std::array<const char*, 4> kHyper = {"learning_rate", "momentum", "nesterov", "weight_decay"};
  static constexpr bool kDecays = true;
  static constexpr bool kHasExtra = true;  // the logarithm of what a step leaves of a weight
  static constexpr int kMomentumSlot = -1;

  static void Read(int64_t step, RuleSettings* settings) {
    const double decayed = settings->hyper[3] * static_cast<double>(settings->lr);
    if (!(decayed < 1.0)) {
      throw InvalidArgument(
          "weight_decay times the learning rate must be below 1. Received: " + std::to_string(decayed) + ".");
    }
    settings->hyper[3] = 1.0;  // Momentum has rate_in_velocity there
    Momentum::Read(step, settings);
    settings->terms[3] = static_cast<float>(decayed);
    settings->missed.extra = static_cast<float>(std::log1p(-decayed));
  }

  static std::string Error(const RuleSettings& settings) {
    const std::string error = BetaError(settings, "momentum");
    return error.empty() ? SlowError(settings, "sgdw", "momentum") : error;
  }

  static DecayModel Model(const RuleSettings& settings) {
    DecayModel model = Momentum::Model(settings);
    model.shrinks = true;
    return model;
  }

  SOK_HOST_DEVICE explicit SgdW(const RuleSettings& settings) : momentum(settings), decayed(settings.terms[3]) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* m) const {
    *w -= *w * decayed;
    momentum.Element(g, w, m);
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& missed, float* w, float* m) const {
    *w *= static_cast<float>(ExactExp(missed.extra));
    momentum.MissedElement(missed, w, m);
  }
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* w, float* m) const {
    *w *= decay.keep;
    momentum.CatchUp(decay, w, m);
  }

  Momentum momentum;
  float decayed;
};

struct LazySgdW : SgdW {
  static constexpr char kName[] = "lazy_sgdw";
  static constexpr bool kDecays = false;
  static std::string Error(const RuleSettings& settings) { return BetaError(settings, "momentum"); }
  using SgdW::SgdW;
};

}  // namespace sok
