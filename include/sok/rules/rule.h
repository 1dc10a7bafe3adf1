// What the header of an update rule is made of; all.h lists the rules.
//
// A rule is a class that holds what the steps of one call calculate with. It says
//   kName       what ops, graphs and files call it;
//   kSlots      what a row keeps: vectors, of a number for each of its weights, then scalars, and what a fresh row has there;
//   kHyper      its hyperparameters, the learning rate first: `hyper` of GroupApply has their values in this order;
//   Read        takes from `hyper` what it needs, and throws InvalidArgument where it makes no sense;
//   Error       why no rule has such settings, of files; empty: it may have them;
//   Element     the step of one weight, with as many slots as kSlots; on host and device, with the same bits.
// A rule whose step needs to know something of the whole row, a sum over it or a scalar (kByRow), also says
//   kSums    how many sums over the row it needs;
//   First    of a rule with sums: changes vectors, not the weight, by one element, and gives what it adds to the sums;
//   Factor   once a row, from the sums, dim and its scalars, which it may change: a number that Element takes behind the gradient.
// A rule whose untouched rows change too (kDecays) also says
//   Model          how its slots fade while a row is not touched, from which sums over missed steps are made;
//   CatchUp        what many missed steps do to one weight, by those sums (adam_decay.h);
//   MissedElement  what one missed step does: where the sums cannot be made, steps are replayed by it.
// Formulas are those of Keras 3 (keras.optimizers), in float32. w: weight, g: summed gradient.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>

#include "sok/error.h"
#include "sok/philox.h"  // SOK_HOST_DEVICE

namespace sok {

constexpr int kMaxSlots = 6, kMaxHyper = 16;

// What rows that miss a step need to know of it: the table remembers it of each.
struct MissedStep {
  float alpha = 0.0f;  // what the slot that fades by DecayModel::fade_1 moves the weight by
  float extra = 0.0f;  // of rules with kHasExtra: what Model says
};

// While a row is not touched, its slots fade by these factors in each step, and a weight moves by
// alpha m / (s + epsilon), where m fades by fade_1 and s by root.
struct DecayModel {
  double fade_1 = 0.0;
  double fade_2 = 0.0;
  double root = 1.0;
  bool has_sums = true;     // else missed steps are replayed one by one
  bool shrinks = false;     // weights are multiplied with exp(extra) before each step
  bool adds_extra = false;  // CatchUp takes the sum of extra
  bool operator==(const DecayModel& other) const {
    return fade_1 == other.fade_1 && fade_2 == other.fade_2 && root == other.root;
  }
};

struct RuleSettings {
  double hyper[kMaxHyper] = {};
  float slot_inits[kMaxSlots] = {};  // what fresh slots hold
  float lr = 0.0f;                   // for the Adam rules: alpha = lr sqrt(1 - beta_2^t) / (1 - beta_1^t), t the step
  float beta_1 = 0.0f;
  float beta_2 = 0.0f;
  float one_minus_beta_1 = 1.0f;  // rounded from double, as Keras does
  float one_minus_beta_2 = 1.0f;
  float epsilon = 0.0f;
  float terms[8] = {};  // what else the steps of one call calculate with
  MissedStep missed;    // what rows outside the batch need to know of this call, if the rule decays
};

struct RuleSlot {
  const char* name;
  const char* start = "0";  // of a fresh row: a number, or the name of a hyperparameter
  bool is_scalar = false;   // one number a row; such slots come behind the others
};

// How many slots of each kind a row has; in its record, and in files, scalars lie behind the vectors.
struct SlotCounts {
  int vectors = 0;
  int scalars = 0;
  SOK_HOST_DEVICE int64_t floats(int64_t dim) const { return vectors * dim + scalars; }
};

template <int n>
struct SumsOfRow {
  float of[n];
};

struct RowRule {
  static constexpr bool kDecays = false;  // rows outside the batch change too: they catch up by adam_decay.h
  // Shards have the first initial value, betas and epsilon of it; of others what each slot starts as.
  static constexpr bool kFilesHoldBetas = false;
  static constexpr bool kHasExtra = false;  // MissedStep::extra
  static constexpr int kSums = 0;           // over the row
  // What files call it that were written before it was compiled in; its slots are the same.
  static constexpr std::array<const char*, 0> kFormerly = {};
  static constexpr int kMomentumSlot = 0;  // of a rule that decays: where that is zero, weights do not move; -1: none

  static void Read(int64_t /*step*/, RuleSettings* /*settings*/) {}
  static std::string Error(const RuleSettings& /*settings*/) { return {}; }
  static DecayModel Model(const RuleSettings& /*settings*/) { return {}; }

 protected:
  // Two rates of fading, from `hyper` on, rounded as Keras does.
  static void ReadBetas(int64_t step, int first, RuleSettings* settings);
  // 1 - beta, of rules of which Keras rounds beta first.
  static void SubtractInFloat32(RuleSettings* settings) {
    settings->one_minus_beta_1 = 1.0f - settings->beta_1;
    settings->one_minus_beta_2 = 1.0f - settings->beta_2;
  }
  // Why the two are none; they are below 1 after rounding to float32, too.
  static std::string BetaError(const RuleSettings& settings, const char* name_1 = "beta_1",
                               const char* name_2 = "beta_2");
  // A row's momentum is gone after some 200,000 missed steps: so long it may take to catch up with them.
  static std::string SlowError(const RuleSettings& settings, const char* rule, const char* name_1 = "beta_1");
};

inline void RowRule::ReadBetas(int64_t step, int first, RuleSettings* settings) {
  if (step < 1) throw InvalidArgument("step must be at least 1. Received: " + std::to_string(step) + ".");
  settings->beta_1 = static_cast<float>(settings->hyper[first]);
  settings->beta_2 = static_cast<float>(settings->hyper[first + 1]);
  settings->one_minus_beta_1 = static_cast<float>(1.0 - settings->hyper[first]);
  settings->one_minus_beta_2 = static_cast<float>(1.0 - settings->hyper[first + 1]);
}

inline std::string RowRule::BetaError(const RuleSettings& settings, const char* name_1, const char* name_2) {
  const float betas[2] = {settings.beta_1, settings.beta_2};
  const float rests[2] = {settings.one_minus_beta_1, settings.one_minus_beta_2};
  for (int i = 0; i < 2; ++i) {
    const std::string name = i == 0 ? name_1 : name_2;
    if (!(betas[i] >= 0.0f && betas[i] < 1.0f)) {
      return name + " must lie in [0, 1), in float32. Received: " + std::to_string(betas[i]) + ".";
    }
    if (!(std::fabs(1.0 - betas[i] - rests[i]) < 1e-6)) {
      return "1 - " + name + " must not be " + std::to_string(rests[i]) + " where " + name + " is " +
             std::to_string(betas[i]) + ".";
    }
  }
  return {};
}

inline std::string RowRule::SlowError(const RuleSettings& settings, const char* rule, const char* name_1) {
  if (settings.beta_1 <= 0.999f) return {};
  return std::string(name_1) + " of rule '" + rule + "' must be at most 0.999 (of 'lazy_" + rule +
         "' it may be more). Received: " + std::to_string(settings.beta_1) + ".";
}

// The square root of 1 - beta^t. In float32, as Keras works it out: 1 - beta^t loses digits at small t, and we must lose the
// same.
inline float RootOfRest(float beta, int64_t step) { return std::sqrt(1.0f - std::pow(beta, static_cast<float>(step))); }

template <class R>
constexpr SlotCounts CountSlots() {
  SlotCounts counts;
  for (const RuleSlot& slot : R::kSlots) ++(slot.is_scalar ? counts.scalars : counts.vectors);
  return counts;
}

template <class R>
constexpr int kNumVectors = CountSlots<R>().vectors;
template <class R>
constexpr int kNumScalars = CountSlots<R>().scalars;

template <class R>
constexpr bool kByRow = R::kSums > 0 || kNumScalars<R> > 0;

}  // namespace sok
