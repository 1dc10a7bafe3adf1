// What the header of an update rule is made of; all.h lists the rules.
//
// A rule is a class that holds what the steps of one call calculate with. It says
//   kName       what ops, graphs and files call it;
//   kSlots      what a row keeps for each of its weights, and what a fresh row has there;
//   kHyper      its hyperparameters, the learning rate first: `hyper` of GroupApply has their values in this order;
//   Read        takes from `hyper` what it needs, and throws InvalidArgument where it makes no sense;
//   Error       why no rule has such settings, of files; empty: it may have them;
//   Element     the step of one weight, with as many slots as kSlots; on host and device, with the same bits.
// Formulas are those of Keras 3 (keras.optimizers), in float32. w: weight, g: summed gradient.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>

#include "sok/philox.h"  // SOK_HOST_DEVICE

namespace sok {

constexpr int kMaxSlots = 6, kMaxHyper = 16;

struct RuleSettings {
  double hyper[kMaxHyper] = {};
  float slot_inits[kMaxSlots] = {};  // what fresh slots hold
  float lr = 0.0f;                   // for the Adam rules: alpha = lr sqrt(1 - beta_2^t) / (1 - beta_1^t), t the step
  float beta_1 = 0.0f;
  float beta_2 = 0.0f;
  float one_minus_beta_1 = 1.0f;  // rounded from double, as Keras does
  float one_minus_beta_2 = 1.0f;
  float epsilon = 0.0f;
};

struct RuleSlot {
  const char* name;
  const char* start = "0";  // of a fresh row: a number, or the name of a hyperparameter
};

struct RowRule {
  static constexpr bool kDecays = false;  // rows outside the batch change too: they catch up by adam_decay.h
  // Shards have the first initial value, betas and epsilon of it; of others what each slot starts as.
  static constexpr bool kFilesHoldBetas = false;

  static void Read(int64_t /*step*/, RuleSettings* /*settings*/) {}
  static std::string Error(const RuleSettings& /*settings*/) { return {}; }
};

template <class R>
constexpr int kNumSlots = static_cast<int>(std::tuple_size<decltype(R::kSlots)>::value);

}  // namespace sok
