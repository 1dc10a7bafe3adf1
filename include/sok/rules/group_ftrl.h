// Ftrl whose rows become zero as a whole (group lasso): Yue et al., "Adaptive Optimizers with Sparse Group Lasso for Neural
// Networks in CTR Prediction" (2021).
#pragma once

#include "sok/rules/ftrl.h"

namespace sok {

struct GroupFtrl : Ftrl {
  static constexpr char kName[] = "group_ftrl";
  static constexpr std::array<const char*, 8> kHyper = {"learning_rate",
                                                        "learning_rate_power",
                                                        "initial_accumulator_value",
                                                        "l1_regularization_strength",
                                                        "l2_regularization_strength",
                                                        "l2_shrinkage_regularization_strength",
                                                        "beta",
                                                        "l21_regularization_strength"};
  static constexpr std::array<const char*, 0> kFormerly = {};
  static constexpr int kSums = 1;

  static void Read(int64_t step, RuleSettings* settings) {
    Ftrl::Read(step, settings);
    settings->terms[4] = static_cast<float>(settings->hyper[7]);
  }

  SOK_HOST_DEVICE explicit GroupFtrl(const RuleSettings& settings) : Ftrl(settings), l21(settings.terms[4]) {}

  SOK_HOST_DEVICE SumsOfRow<1> First(float g, float w, float* accumulator, float* linear) const {
    const float grown = *accumulator + g * g;
    *linear += g + twice_shrinkage * w - (Power(grown) - Power(*accumulator)) / lr * w;
    *accumulator = grown;
    const float excess = Clipped(*linear) - *linear;
    return {{excess * excess}};
  }
  // What the group leaves of the row.
  SOK_HOST_DEVICE float Factor(const SumsOfRow<1>& sums, int64_t dim) const {
    const float norm = sqrtf(sums.of[0]), threshold = l21 * sqrtf(static_cast<float>(dim));
    return norm > threshold ? 1.0f - threshold / norm : norm == norm ? 0.0f : norm;
  }
  SOK_HOST_DEVICE void Element(float /*g*/, float factor, float* w, const float* accumulator,
                               const float* linear) const {
    // Not -0: a row that is zero is zero bit by bit.
    *w = factor == 0.0f ? 0.0f : factor * (Clipped(*linear) - *linear) / (Power(*accumulator) / lr + twice_l2);
  }

  SOK_HOST_DEVICE float Clipped(float z) const { return z < -l1 ? -l1 : z > l1 ? l1 : z; }

  float l21;
};

}  // namespace sok
