// Tables and rules that several tests of tables on a device use.
#pragma once

#include <cstdint>

#include "sok/embedding_table.h"
#include "sok/sparse_update.h"

inline sok::TableConfig Config(int64_t dim, int64_t capacity, bool hashed = true) {
  sok::TableConfig config;
  config.name = "item";
  config.dim = dim;
  config.capacity = capacity;
  config.hashed = hashed;
  config.initializer.seed = 7;
  return config;
}

inline sok::UpdateRule RuleOf(sok::Rule kind) {
  sok::UpdateRule rule;
  rule.rule = kind;
  rule.lr = rule.missed.alpha = 0.1f;
  rule.beta_1 = 0.9f;
  rule.beta_2 = 0.999f;
  rule.one_minus_beta_1 = 0.1f;
  rule.one_minus_beta_2 = 0.001f;
  rule.epsilon = 1e-7f;
  rule.slot_inits[0] = kind == sok::Rule::kAdagrad ? 0.1f : 0.0f;
  return rule;
}
