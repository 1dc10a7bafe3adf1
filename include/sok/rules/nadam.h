// Adam with Nesterov's momentum (Dozat, 2016), in the form of Keras; the schedule of its momentum is slower with a smaller
// schedule_decay, as in tf_keras.optimizers.legacy.Nadam.
#pragma once

#include "sok/rules/decay.h"

namespace sok {

struct Nadam : RowRule {
  static constexpr char kName[] = "nadam";
  static constexpr std::array<RuleSlot, 2> kSlots = {{{"m"}, {"v"}}};
  static constexpr std::array<const char*, 5> kHyper = {"learning_rate", "beta_1", "beta_2", "epsilon",
                                                        "schedule_decay"};
  static constexpr bool kDecays = true;
  static constexpr bool kHasExtra = true;  // epsilon times the root of the correction, which changes step by step

  static void Read(int64_t step, RuleSettings* settings) {
    ReadBetas(step, 1, settings);
    SubtractInFloat32(settings);
    const double beta_1 = settings->hyper[1], t = static_cast<double>(step);
    auto momentum = [&](double at) { return beta_1 * (1.0 - 0.5 * std::pow(0.96, settings->hyper[4] * at)); };
    double product = 1.0;  // of the momenta so far
    // Fades below what a float32 can tell from 1 - product: then later factors change nothing.
    for (int64_t i = 1; i <= step && product > 1e-12; ++i) product *= momentum(static_cast<double>(i));
    const double now = momentum(t), next = momentum(t + 1.0);
    // w -= lr (next m / (1 - product next) + (1 - now) g / (1 - product)) / (sqrt(v) / root + epsilon)
    const float root = RootOfRest(settings->beta_2, step);
    settings->epsilon = static_cast<float>(settings->hyper[3]) * root;
    settings->terms[0] = settings->lr * root * static_cast<float>(next / (1.0 - product * next));
    settings->terms[1] = settings->lr * root * static_cast<float>((1.0 - now) / (1.0 - product));
    settings->missed = {settings->terms[0], settings->epsilon};
  }

  static std::string Error(const RuleSettings& settings) {
    const std::string error = BetaError(settings);
    return error.empty() ? SlowError(settings, "nadam") : error;
  }

  // Without sums: they would have to know how epsilon grew.
  static DecayModel Model(const RuleSettings& settings) {
    const double beta_2 = settings.beta_2;
    return {settings.beta_1, beta_2, std::sqrt(beta_2), false};
  }

  SOK_HOST_DEVICE explicit Nadam(const RuleSettings& settings)
      : of_m(settings.terms[0]),
        of_gradient(settings.terms[1]),
        one_minus_beta_1(settings.one_minus_beta_1),
        one_minus_beta_2(settings.one_minus_beta_2),
        epsilon(settings.epsilon) {}

  SOK_HOST_DEVICE void Element(float g, float* w, float* m, float* v) const {
    *m += (g - *m) * one_minus_beta_1;
    *v += (g * g - *v) * one_minus_beta_2;
    *w -= (of_m * *m + of_gradient * g) / (sqrtf(*v) + epsilon);
  }
  SOK_HOST_DEVICE void MissedElement(const MissedStep& missed, float* w, float* m, float* v) const {
    *m -= *m * one_minus_beta_1;
    *v -= *v * one_minus_beta_2;
    *w -= missed.alpha * *m / (sqrtf(*v) + missed.extra);
  }
  // The slots alone: weights are replayed.
  SOK_HOST_DEVICE void CatchUp(const Decay& decay, float* /*w*/, float* m, float* v) const {
    *m *= decay.fade_m;
    *v *= decay.fade_v;
  }

  float of_m, of_gradient, one_minus_beta_1, one_minus_beta_2, epsilon;
};

struct LazyNadam : Nadam {
  static constexpr char kName[] = "lazy_nadam";
  static constexpr bool kDecays = false;
  static constexpr std::array<const char*, 2> kFormerly = {"Nadam(momentum,velocity)", "Nadam(m,v)"};
  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }
  using Nadam::Nadam;
};

}  // namespace sok
