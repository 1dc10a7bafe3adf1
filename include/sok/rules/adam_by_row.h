// Adam and Adamax that change the rows of the batch alone and correct the bias of each by the row's own steps, which it counts:
// what OpenEmbedding does, by powers of beta in each row.
#pragma once

#include "sok/exact_math.h"
#include "sok/rules/adam.h"
#include "sok/rules/adamax.h"

namespace sok {

struct LazyAdamByRow : Adam {
  static constexpr char kName[] = "lazy_adam_by_row";
  static constexpr std::array<RuleSlot, 3> kSlots = {{{"m"}, {"v"}, {"count", "0", true}}};
  static constexpr bool kDecays = false;
  static constexpr bool kFilesHoldBetas = false;

  static void Read(int64_t /*step*/, RuleSettings* settings) {
    ReadBetas(1, 1, settings);
    settings->epsilon = static_cast<float>(settings->hyper[3]);
    for (int k = 0; k < 2; ++k) settings->terms[k] = static_cast<float>(std::log(settings->hyper[1 + k]));
  }
  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }

  SOK_HOST_DEVICE explicit LazyAdamByRow(const RuleSettings& settings)
      : Adam(settings), log_beta_1(settings.terms[0]), log_beta_2(settings.terms[1]) {}

  SOK_HOST_DEVICE float Factor(int64_t /*dim*/, float* count) const {
    *count += 1.0f;
    return alpha * sqrtf(Rest(*count * log_beta_2)) / Rest(*count * log_beta_1);
  }
  // 1 - beta^count, of the logarithm of that power.
  SOK_HOST_DEVICE static float Rest(float log_power) { return -static_cast<float>(ExactExpM1(log_power)); }
  SOK_HOST_DEVICE void Element(float g, float factor, float* w, float* m, float* v) const {
    *m += (g - *m) * one_minus_beta_1;
    *v += (g * g - *v) * one_minus_beta_2;
    *w -= factor * *m / (sqrtf(*v) + epsilon);
  }

  float log_beta_1, log_beta_2;
};

struct LazyAdamaxByRow : Adamax {
  static constexpr char kName[] = "lazy_adamax_by_row";
  static constexpr std::array<RuleSlot, 3> kSlots = LazyAdamByRow::kSlots;
  static constexpr bool kDecays = false;

  static void Read(int64_t step, RuleSettings* settings) { LazyAdamByRow::Read(step, settings); }
  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }

  SOK_HOST_DEVICE explicit LazyAdamaxByRow(const RuleSettings& settings)
      : Adamax(settings), log_beta_1(settings.terms[0]) {}

  SOK_HOST_DEVICE float Factor(int64_t /*dim*/, float* count) const {
    *count += 1.0f;
    return alpha / LazyAdamByRow::Rest(*count * log_beta_1);
  }
  SOK_HOST_DEVICE void Element(float g, float factor, float* w, float* m, float* v) const {
    *m += (g - *m) * one_minus_beta_1;
    const float faded = beta_2 * *v, size = fabsf(g);
    *v = size > faded || size != size ? size : faded;
    *w -= factor * *m / (*v + epsilon);
  }

  float log_beta_1;
};

}  // namespace sok
