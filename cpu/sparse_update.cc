#include "sok/sparse_update.h"

#include <algorithm>
#include <cctype>
#include <cfloat>
#include <deque>
#include <mutex>

#include "sok/error.h"

namespace sok {
namespace {

constexpr size_t kMaxName = 256, kMaxNames = 4096;  // files name rules, too

// The rules of others, numbered. Names stay where they are.
struct Names {
  std::mutex mutex;
  std::deque<std::string> names;
  static Names& Instance() {
    static Names* names = new Names;  // never destroyed: threads may outlive main
    return *names;
  }
};

// How many slots a name lists: letters, digits, '_' and '.', then '(one,two)'; 0 if it is not such a name.
int SlotsOf(const std::string& name) {
  auto is_word = [](const std::string& text) {
    return !text.empty() && std::all_of(text.begin(), text.end(),
                                        [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '.'; });
  };
  const size_t open = name.find('(');
  if (name.size() > kMaxName || open == std::string::npos || name.back() != ')' || !is_word(name.substr(0, open)))
    return 0;
  int count = 0;
  for (size_t begin = open + 1; begin < name.size(); ++count) {
    const size_t end = name.find_first_of(",)", begin);
    if (!is_word(name.substr(begin, end - begin))) return 0;
    begin = end + 1;
  }
  return count <= kMaxSlots ? count : 0;
}

}  // namespace

const char* RuleName(Rule rule) {
  if (rule >= kFirstNamed) {
    Names& known = Names::Instance();
    const std::lock_guard<std::mutex> lock(known.mutex);
    return known.names[static_cast<size_t>(rule) / 8 - 1].c_str();
  }
  switch (rule) {
    case Rule::kSgd:
      return "sgd";
    case Rule::kAdagrad:
      return "adagrad";
    case Rule::kLazyAdam:
      return "lazy_adam";
    case Rule::kAdam:
      return "adam";
  }
  return "";
}

Rule ParseRule(const std::string& name) {
  for (const Rule rule : {Rule::kSgd, Rule::kAdagrad, Rule::kLazyAdam, Rule::kAdam})
    if (name == RuleName(rule)) return rule;
  const int num_slots = SlotsOf(name);
  if (num_slots == 0) {
    throw InvalidArgument("rule must be 'sgd', 'adagrad', 'adam' or 'lazy_adam', or list up to " +
                          std::to_string(kMaxSlots) + " slots like 'RMSprop(velocity,momentum)'. Received: '" + name +
                          "'.");
  }
  Names& known = Names::Instance();
  const std::lock_guard<std::mutex> lock(known.mutex);
  size_t i = 0;
  while (i < known.names.size() && known.names[i] != name) ++i;
  if (i == kMaxNames) throw InvalidArgument("this process knows " + std::to_string(kMaxNames) + " rules already.");
  if (i == known.names.size()) known.names.push_back(name);
  return static_cast<Rule>(static_cast<int>(i + 1) * 8 + num_slots);
}

std::string BetaError(const UpdateRule& rule) {
  const float betas[2] = {rule.beta_1, rule.beta_2}, rests[2] = {rule.one_minus_beta_1, rule.one_minus_beta_2};
  for (int i = 0; i < 2; ++i) {
    const std::string name = "beta_" + std::to_string(i + 1);
    if (!(betas[i] >= 0.0f && betas[i] < 1.0f)) {
      return name + " must lie in [0, 1), in float32. Received: " + std::to_string(betas[i]) + ".";
    }
    if (!(std::fabs(1.0 - betas[i] - rests[i]) < 1e-6)) {
      return "1 - " + name + " must not be " + std::to_string(rests[i]) + " where " + name + " is " +
             std::to_string(betas[i]) + ".";
    }
  }
  if (rule.decays() && rule.beta_1 > 0.999f) {
    return "beta_1 of rule 'adam' must be at most 0.999 (of 'lazy_adam' it may be more). Received: " +
           std::to_string(rule.beta_1) + ".";
  }
  return {};
}

UpdateRule MakeUpdateRule(const std::string& name, const double* hyper, int64_t hyper_size, int64_t step) {
  UpdateRule rule;
  rule.rule = ParseRule(name);
  if (rule.is_named()) throw InvalidArgument("rule '" + name + "' is known by its slots alone: it cannot be applied.");
  const int64_t expected = rule.rule == Rule::kSgd ? 1 : rule.rule == Rule::kAdagrad ? 3 : 4;
  if (hyper_size != expected) {
    throw InvalidArgument("hyper for rule '" + name + "' must have " + std::to_string(expected) +
                          " values. Received: " + std::to_string(hyper_size) + ".");
  }
  if (!(hyper[0] >= 0.0 && hyper[0] <= static_cast<double>(FLT_MAX))) {
    throw InvalidArgument("the learning rate must be finite in float32 and not negative. Received: " +
                          std::to_string(hyper[0]) + ". Nothing was updated.");
  }
  rule.lr = static_cast<float>(hyper[0]);
  if (rule.rule == Rule::kAdagrad) {
    rule.slot_init = static_cast<float>(hyper[1]);
    rule.epsilon = static_cast<float>(hyper[2]);
  } else if (rule.rule != Rule::kSgd) {
    if (step < 1) throw InvalidArgument("step must be at least 1. Received: " + std::to_string(step) + ".");
    rule.beta_1 = static_cast<float>(hyper[1]);
    rule.beta_2 = static_cast<float>(hyper[2]);
    rule.one_minus_beta_1 = static_cast<float>(1.0 - hyper[1]);
    rule.one_minus_beta_2 = static_cast<float>(1.0 - hyper[2]);
    rule.epsilon = static_cast<float>(hyper[3]);
    const std::string error = BetaError(rule);
    if (!error.empty()) throw InvalidArgument(error);
    // In float32, as Keras works it out: 1 - beta_2^t loses digits at small t, and we must lose the same.
    const float t = static_cast<float>(step);
    rule.lr *= std::sqrt(1.0f - std::pow(rule.beta_2, t)) / (1.0f - std::pow(rule.beta_1, t));
  }
  return rule;
}

Nonfinite ParseNonfinite(const std::string& name) {
  if (name == "allow") return Nonfinite::kAllow;
  if (name == "skip") return Nonfinite::kSkip;
  if (name == "raise") return Nonfinite::kRaise;
  throw InvalidArgument("nonfinite must be 'allow', 'skip' or 'raise'. Received: '" + name + "'.");
}

void AlphaHistory::Append(float alpha, int64_t count) {
  if (count == 0) return;
  if (runs_.empty() || runs_.back().alpha != alpha) runs_.push_back({calls_ + 1, alpha});
  calls_ += count;
  max_ = std::max(max_, std::fabs(alpha));
}

std::vector<AlphaRun> AlphaHistory::RunsAfter(int64_t calls) const {
  std::vector<AlphaRun> runs;
  if (calls >= calls_) return runs;
  size_t first = runs_.size() - 1;
  while (runs_[first].first_call > calls + 1) --first;
  runs.assign(runs_.begin() + static_cast<std::ptrdiff_t>(first), runs_.end());
  runs[0].first_call = calls + 1;
  return runs;
}

void ReplayDecay(const AlphaHistory& history, const UpdateRule& rule, int64_t from, int64_t to, int64_t dim, float* w,
                 float* m, float* v) {
  if (from >= to || std::all_of(m, m + dim, [](float x) { return x == 0.0f; })) {
    // Without momentum nothing moves; only v fades.
    if (from < to) {
      const float fade = static_cast<float>(std::pow(static_cast<double>(rule.beta_2), static_cast<double>(to - from)));
      for (int64_t j = 0; j < dim; ++j) v[j] *= fade;
    }
    return;
  }
  AlphaCursor cursor(history.view(), from + 1);
  AlphaCursor peek = cursor;
  const int64_t steps = std::min(to - from, ReplayLength(rule, peek.Next(), history.max_alpha()));
  for (int64_t k = 0; k < steps; ++k) {
    const float alpha = cursor.Next();
    for (int64_t j = 0; j < dim; ++j) {
      AdamDecayElement(alpha, rule.one_minus_beta_1, rule.one_minus_beta_2, rule.epsilon, &w[j], &m[j], &v[j]);
    }
  }
  const int64_t rest = to - from - steps;
  if (rest > 0) {
    const float fade_m = static_cast<float>(std::pow(static_cast<double>(rule.beta_1), static_cast<double>(rest)));
    const float fade_v = static_cast<float>(std::pow(static_cast<double>(rule.beta_2), static_cast<double>(rest)));
    for (int64_t j = 0; j < dim; ++j) {
      m[j] *= fade_m;
      v[j] *= fade_v;
    }
  }
}

}  // namespace sok
