// What a rule that decays does to a row that no gradient reaches, for many steps at once; told of Adam.
//
// A dense Adam moves every row at every step: i steps after a row's last gradient its moments are m beta_1^i and
// v beta_2^i, and the row moves by alpha_i m beta_1^i / (sqrt(v) beta_2^(i/2) + epsilon). With s = sqrt(v),
// r = beta_1 / sqrt(beta_2) and 1 + d_i = beta_2^(-i/2) that term is alpha_i m r^i / (s + epsilon (1 + d_i)), and d_i is
// small where r^i is not. Expanded around d = 0, with u = epsilon / (s + epsilon) in [0, 1], k missed steps together are
//
//   m / (s + epsilon) (A_0 - A_1 u + A_2 u^2 - A_3 u^3),   A_p = sum_i alpha_i r^i d_i^p
//
// and the A_p depend on the row only through k. So a row pays the same for one missed step and for a thousand.
//
// Other rules are such sums with other factors (DecayModel): beta_1 fades what moves the weight, beta_2 another slot, and
// `root` is what s fades by: of Adam sqrt(beta_2), of a rule whose denominator stays, or has none, 1. Where weights shrink too,
// what a step moved is multiplied with what later steps leave.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "sok/exact_math.h"
#include "sok/philox.h"
#include "sok/sparse_update.h"

namespace sok {

// sum_i alpha_i q_j^i with q_j = r beta_2^(-j/2), for j = 0 .. 3; also one term of it.
struct DecayTerms {
  double b[4];
};

// Sets A_0 .. A_3.
SOK_HOST_DEVICE Decay WithSums(const DecayTerms& sums, Decay decay) {
  const double* b = sums.b;
  decay.a[0] = static_cast<float>(b[0]);
  decay.a[1] = static_cast<float>(b[1] - b[0]);
  decay.a[2] = static_cast<float>(b[2] - 2.0 * b[1] + b[0]);
  decay.a[3] = static_cast<float>(b[3] - 3.0 * b[2] + 3.0 * b[1] - b[0]);
  return decay;
}

// What host and device read of a DecaySums and its AlphaHistory: the Decay of any stretch of missed steps.
struct DecayView {
  const Decay* ready;        // [num_ready], for the last k steps
  const DecayTerms* powers;  // [length + 1] q_j^i
  int64_t num_ready, length;
  DecayTerms steady;  // over `length` steps with alpha 1
  DecayModel model;
  AlphaView alphas;

  // Steps from + 1 .. to, where `to` is the last call. 0 <= from < to.
  SOK_HOST_DEVICE Decay Of(int64_t from, int64_t to) const {
    const int64_t steps = to - from;
    if (steps < num_ready && !model.adds_extra) return ready[steps];
    const bool has_extra = model.shrinks || model.adds_extra;
    const Decay faded = Faded(model, static_cast<double>(steps), has_extra ? alphas.SumOfExtra(from, to) : 0.0);
    if (!(model.fade_1 > 0.0)) return faded;
    // Longer ago than anything counts: the first `length` steps after `from` are the whole sum.
    AlphaCursor cursor(alphas, from + 1);
    DecayTerms sums{};
    const float alpha = model.shrinks ? NAN : cursor.SteadyFor(length);
    if (alpha == alpha) {
      for (int j = 0; j < 4; ++j) sums.b[j] = alpha * steady.b[j];
    } else {
      for (int64_t i = 1; i <= length; ++i) {
        const MissedStep missed = cursor.Next();
        const double kept = model.shrinks ? ExactExp(missed.extra) : 1.0;
        for (int j = 0; j < 4; ++j) sums.b[j] = sums.b[j] * kept + missed.alpha * powers[i].b[j];
      }
    }
    if (model.shrinks) {
      const double kept = ExactExp(alphas.SumOfExtra(from + length, to));
      for (int j = 0; j < 4; ++j) sums.b[j] *= kept;
    }
    return WithSums(sums, faded);
  }
};

// The Decay for any number of missed steps, kept up to date step by step.
class DecaySums {
 public:
  // Whether the expansion is good to float32 for this rule; where not, steps must be replayed one by one.
  static bool Fits(const UpdateRule& rule);

  explicit DecaySums(const UpdateRule& rule);

  // Call after history.Append: one more step that all rows have missed until they are updated.
  void Append(const MissedStep& missed);
  void Append(float alpha) { Append(MissedStep{alpha, 0.0f}); }

  // Steps after which nothing is left to add.
  int64_t length() const { return length_; }

  // `history` is that whose every Append this was told of. Valid until the next Append of either.
  DecayView view(const AlphaHistory& history) const {
    return {ready_.data(), powers_.data(), static_cast<int64_t>(ready_.size()), length_, steady_,
            model_,        history.view()};
  }

  Decay Of(const AlphaHistory& history, int64_t from, int64_t to) const { return view(history).Of(from, to); }

 private:
  static constexpr int kPowers = 4;

  DecayModel model_;
  double q_[kPowers];
  int64_t length_;
  std::vector<DecayTerms> powers_;  // [length + 1] q_j^i
  std::vector<DecayTerms> recent_;  // [min(calls, length) + 1] over the last k steps
  std::vector<Decay> ready_;        // the same as Decay
  std::vector<double> kept_;        // of a weight, over the last k steps, where they shrink
  std::vector<Decay> faded_;        // [length + 1] what the last k steps do besides the sums
  DecayTerms steady_;               // over `length` steps with alpha 1
};

}  // namespace sok
