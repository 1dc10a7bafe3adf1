#include "sok/adam_decay.h"

#include <algorithm>

namespace sok {
namespace {

// r^length is far below what a float32 can add to any sum before it.
int64_t Length(double r) {
  return r <= 0.0 ? 1 : static_cast<int64_t>(std::log(std::ldexp(1.0 - r, -36)) / std::log(r)) + 1;
}

}  // namespace

bool DecaySums::Fits(const UpdateRule& rule) {
  const DecayModel model = rule.model();
  const double root = model.root;
  if (!model.has_sums || !(root > 0.0)) return false;
  const double r = model.fade_1 / root;
  if (!(r < 0.999) || !(r / (root * root * root) < 0.9995)) return false;
  // The first term left out, A_4 / A_0, is about 4! (mean i)^4 (d_i / i)^4.
  const double steps = r / (1.0 - r), per_step = (1.0 - root) / root;
  return 24.0 * std::pow(std::max(1.0, steps) * per_step, 4.0) < 2e-7;
}

DecaySums::DecaySums(const UpdateRule& rule) : model_(rule.model()) {
  const double root = model_.root;
  q_[0] = model_.fade_1 / root;
  for (int j = 1; j < kPowers; ++j) q_[j] = q_[j - 1] / root;
  length_ = Length(q_[0]);
  powers_.resize(static_cast<size_t>(length_ + 1));
  steady_ = DecayTerms{};
  for (int j = 0; j < kPowers; ++j) {
    powers_[0].b[j] = 1.0;
    for (size_t i = 1; i < powers_.size(); ++i) {
      powers_[i].b[j] = powers_[i - 1].b[j] * q_[j];
      steady_.b[j] += powers_[i].b[j];
    }
  }
  for (int64_t k = 0; k <= length_; ++k) {
    faded_.push_back(Faded(model_, static_cast<double>(k), 0.0));
    kept_.push_back(1.0);
  }
  recent_.reserve(powers_.size());
  ready_.reserve(powers_.size());
  recent_.push_back(DecayTerms{});
  ready_.push_back(Decay{});
}

void DecaySums::Append(const MissedStep& missed) {
  const double kept = model_.shrinks ? std::exp(static_cast<double>(missed.extra)) : 1.0;
  // One more step: what was the sum over the last k steps is now that over steps 1 .. k of k + 1.
  if (static_cast<int64_t>(recent_.size()) <= length_) {
    recent_.push_back(DecayTerms{});
    ready_.push_back(Decay{});
  }
  for (size_t k = recent_.size() - 1; k > 0; --k) {
    for (int j = 0; j < kPowers; ++j) recent_[k].b[j] = recent_[k - 1].b[j] * kept + missed.alpha * powers_[k].b[j];
    ready_[k] = WithSums(recent_[k], faded_[k]);
    if (!model_.shrinks) continue;
    kept_[k] = kept_[k - 1] * kept;
    ready_[k].keep = static_cast<float>(kept_[k]);
  }
}

}  // namespace sok
