// Each rule that is compiled in, with hyperparameters that make sense.
#pragma once

#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "sok/sparse_update.h"

inline std::vector<std::string> RuleNames() {
  std::vector<std::string> names;
#define SOK_RULE_NAME(R) names.emplace_back(sok::R::kName);
  SOK_RULES(SOK_RULE_NAME)
#undef SOK_RULE_NAME
  return names;
}

inline std::vector<double> HyperOf(const std::string& name, double learning_rate) {
  const std::map<std::string, double> values = {{"learning_rate", learning_rate},
                                                {"initial_accumulator_value", 0.1},
                                                {"epsilon", 1e-3},
                                                {"beta_1", 0.9},
                                                {"beta_2", 0.999},
                                                {"momentum", 0.9},
                                                {"nesterov", 1.0},
                                                {"rate_in_velocity", 1.0},
                                                {"rho", 0.9},
                                                {"epsilon_in_root", 1.0},
                                                {"initial_velocity", 0.5},
                                                {"schedule_decay", 1.0},
                                                {"weight_decay", 0.5},
                                                {"learning_rate_power", -0.5},
                                                {"beta", 0.1},
                                                {"l21_regularization_strength", 0.05}};
  std::vector<double> hyper;
  sok::WithRule(sok::ParseRule(name), [&](auto* null) {
    for (const char* one : std::remove_pointer_t<decltype(null)>::kHyper)
      hyper.push_back(values.count(one) > 0 ? values.at(one) : 0.01);
  });
  return hyper;
}

inline sok::UpdateRule RuleNamed(const std::string& name, int64_t step, double learning_rate = 0.01) {
  const std::vector<double> hyper = HyperOf(name, learning_rate);
  return sok::MakeUpdateRule(name, hyper.data(), static_cast<int64_t>(hyper.size()), step);
}
