// The rules of this process by name: those of rules/all.h, and those of others.
#include <algorithm>
#include <atomic>
#include <cctype>
#include <cfloat>
#include <cstdlib>
#include <deque>
#include <mutex>

#include "sok/json.h"
#include "sok/policies.h"
#include "sok/sparse_update.h"

namespace sok {
namespace {

constexpr size_t kMaxRuleName = 256, kMaxNames = 4096;  // files name rules, too
constexpr int kFirstOwnRule = static_cast<int>(kFirstNamed);

using Words = std::vector<std::string>;

struct RuleInfo {
  std::string name;
  Words slots;
  int num_scalars = 0;  // the last of them
  Words starts;         // of each slot
  Words hyper;
  Words formerly;
  bool decays = false, needs_whole_row = false;
  std::atomic<bool> reads_keys{false}, prefetches{false};
  std::atomic<SokRuleFunction> function{nullptr};  // before it is there, starts and hyper are empty

  std::string word() const { return name.substr(0, name.find('(')); }
  bool Is(const std::string& called) const {
    return name == called || std::find(formerly.begin(), formerly.end(), called) != formerly.end();
  }
};

// The rules of others, numbered. They stay where they are.
struct Named {
  std::mutex mutex;
  std::deque<RuleInfo> rules;
  static Named& Instance() {
    static Named* named = new Named;  // never destroyed: threads may outlive main
    return *named;
  }
};

Words Split(const std::string& text) {
  Words words;
  for (size_t begin = 0; begin < text.size() + 1 && !text.empty();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

std::string Joined(const Words& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

// The slots in 'word(one,two;three)', in which words are letters, digits, '_' and '.', and those behind ';' scalars; false: not
// such a name.
bool SlotsOf(const std::string& name, Words* slots, int* num_scalars) {
  auto is_word = [](const std::string& text) {
    return !text.empty() && std::all_of(text.begin(), text.end(),
                                        [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '.'; });
  };
  const size_t open = name.find('(');
  if (name.size() > kMaxRuleName || open == std::string::npos || name.back() != ')') return false;
  const std::string inside = name.substr(open + 1, name.size() - open - 2);
  const size_t semicolon = inside.find(';');
  *slots = Split(inside.substr(0, semicolon));
  *num_scalars = 0;
  if (semicolon != std::string::npos) {
    const Words scalars = Split(inside.substr(semicolon + 1));
    if (scalars.empty()) return false;
    slots->insert(slots->end(), scalars.begin(), scalars.end());
    *num_scalars = static_cast<int>(scalars.size());
  }
  return is_word(name.substr(0, open)) && slots->size() <= kMaxSlots &&
         std::all_of(slots->begin(), slots->end(), is_word);
}

template <class R>
void Describe(RuleInfo* info) {
  info->name = R::kName;
  for (const RuleSlot& slot : R::kSlots) {
    info->slots.push_back(slot.name);
    info->starts.push_back(slot.start);
  }
  info->hyper.assign(R::kHyper.begin(), R::kHyper.end());
  info->formerly.assign(R::kFormerly.begin(), R::kFormerly.end());
  info->num_scalars = kNumScalars<R>;
  info->decays = R::kDecays;
  info->needs_whole_row = R::kSums > 0;
}

std::deque<RuleInfo>& CompiledIn() {
  static std::deque<RuleInfo>* rules = [] {
    auto* all = new std::deque<RuleInfo>;
#define SOK_RULE_INFO(R) Describe<R>(&all->emplace_back());
    SOK_RULES(SOK_RULE_INFO)
#undef SOK_RULE_INFO
    return all;
  }();
  return *rules;
}

RuleInfo& InfoOf(Rule rule) {
  if (rule < kFirstNamed) return CompiledIn()[static_cast<size_t>(rule)];
  Named& named = Named::Instance();
  const std::lock_guard<std::mutex> lock(named.mutex);
  return named.rules[static_cast<size_t>(static_cast<int>(rule) - kFirstOwnRule) / 64];
}

// What a slot starts as: a number, or one of the hyperparameters; NaN: neither.
float StartOf(const std::string& start, const Words& hyper, const double* values) {
  const auto at = std::find(hyper.begin(), hyper.end(), start);
  if (at != hyper.end()) return static_cast<float>(values[at - hyper.begin()]);
  char* end = nullptr;
  const float value = std::strtof(start.c_str(), &end);
  return start.empty() || *end != '\0' ? NAN : value;
}

}  // namespace

const char* RuleName(Rule rule) { return InfoOf(rule).name.c_str(); }

Rule ParseRule(const std::string& name) {
  const std::deque<RuleInfo>& compiled_in = CompiledIn();
  for (size_t i = 0; i < compiled_in.size(); ++i)
    if (compiled_in[i].Is(name)) return static_cast<Rule>(i);
  Words slots;
  int num_scalars = 0;
  if (!SlotsOf(name, &slots, &num_scalars)) {
    std::string known;
    for (const RuleInfo& rule : compiled_in) known += "'" + rule.name + "', ";
    throw InvalidArgument("rule must be " + known + "or list up to " + std::to_string(kMaxSlots) +
                          " slots like 'signum(m;count)', scalars behind ';'. Received: '" + name + "'.");
  }
  const int num_vectors = static_cast<int>(slots.size()) - num_scalars;
  Named& named = Named::Instance();
  const std::lock_guard<std::mutex> lock(named.mutex);
  size_t i = 0;
  while (i < named.rules.size() && named.rules[i].name != name) ++i;
  if (i == kMaxNames) throw InvalidArgument("this process knows " + std::to_string(kMaxNames) + " rules already.");
  if (i == named.rules.size()) {
    RuleInfo& rule = named.rules.emplace_back();
    rule.name = name;
    rule.slots = std::move(slots);
    rule.num_scalars = num_scalars;
  }
  return static_cast<Rule>(kFirstOwnRule + static_cast<int>(i) * 64 + 8 * num_scalars + num_vectors);
}

void RegisterRule(const std::string& name, const SokRuleLayout& layout, SokRuleFunction function) {
  const Rule number = ParseRule(name);
  if (number < kFirstNamed || name == kHistoryRule) {
    throw InvalidArgument("rule '" + name + "' is one of the library's own.");
  }
  if (function == nullptr) throw InvalidArgument("rule '" + name + "' must have a function.");
  RuleInfo& rule = InfoOf(number);
  const Words hyper = Split(layout.hyper);
  if (hyper.empty() || hyper[0] != "learning_rate" || hyper.size() > kMaxHyper) {
    throw InvalidArgument("rule '" + name + "' must have 'learning_rate' as the first of at most " +
                          std::to_string(kMaxHyper) + " hyperparameters. Received: " + Joined(hyper) + ".");
  }
  Words starts = Split(layout.starts);
  if (starts.empty()) starts.assign(rule.slots.size(), "0");
  constexpr double kAny[kMaxHyper] = {};
  if (starts.size() != rule.slots.size() || !std::all_of(starts.begin(), starts.end(), [&](const std::string& start) {
        return std::isfinite(StartOf(start, hyper, kAny));
      })) {
    throw InvalidArgument("rule '" + name + "' must say of each of its " + std::to_string(rule.slots.size()) +
                          " slots what it starts as: a finite number, or one of " + Joined(hyper) + ". Received: '" +
                          layout.starts + "'.");
  }
  const bool is_whole = layout.size >= static_cast<int64_t>(sizeof(SokRuleLayout));
  Named& named = Named::Instance();
  const std::lock_guard<std::mutex> lock(named.mutex);
  for (const RuleInfo& other : named.rules) {
    if (other.function == nullptr || other.word() != rule.word()) continue;
    if (&other == &rule && other.hyper == hyper && other.starts == starts) continue;
    throw InvalidArgument("rule '" + name + "' with hyperparameters " + Joined(hyper) + ", whose slots start as [" +
                          Joined(starts) + "], cannot be registered: this process has '" + other.name + "' with " +
                          Joined(other.hyper) + " and [" + Joined(other.starts) +
                          "]. Give a rule of another layout another name.");
  }
  if (rule.function == nullptr) {  // nobody reads these before it is there, and they do not change afterwards
    rule.starts = starts;
    rule.hyper = hyper;
  }
  rule.reads_keys = is_whole && layout.reads_keys != 0;
  rule.prefetches = is_whole && layout.prefetches != 0;
  rule.function = function;
}

UpdateRule MakeUpdateRule(const std::string& name, const double* hyper, int64_t hyper_size, int64_t step) {
  UpdateRule rule;
  rule.rule = ParseRule(name);
  rule.step = step;
  const RuleInfo& info = InfoOf(rule.rule);
  rule.function = info.function;
  rule.reads_keys = info.reads_keys;
  rule.prefetches = info.prefetches;
  if (rule.is_named() && rule.function == nullptr) {
    throw InvalidArgument("rule '" + name +
                          "' has no function in this process, which knows its name and slots alone. Register a rule of "
                          "your own before the first update, in each process: import the module that declares it "
                          "(sok.optimizers.rule), or call sok.table.rules.register.");
  }
  const int64_t expected = static_cast<int64_t>(info.hyper.size());
  if (hyper_size != expected) {
    throw InvalidArgument("hyper for rule '" + name + "' must have " + std::to_string(expected) +
                          " values. Received: " + std::to_string(hyper_size) + ".");
  }
  if (!(hyper[0] >= 0.0 && hyper[0] <= static_cast<double>(FLT_MAX))) {
    throw InvalidArgument("the learning rate must be finite in float32 and not negative. Received: " +
                          std::to_string(hyper[0]) + ". Nothing was updated.");
  }
  std::copy(hyper, hyper + expected, rule.hyper);
  rule.lr = static_cast<float>(hyper[0]);
  for (size_t k = 0; k < info.slots.size(); ++k) rule.slot_inits[k] = StartOf(info.starts[k], info.hyper, hyper);
  if (rule.is_named()) return rule;
  WithRule(rule.rule, [&](auto* null) { std::remove_pointer_t<decltype(null)>::Read(step, &rule); });
  const std::string error = SettingsError(rule);
  if (!error.empty()) throw InvalidArgument(error);
  return rule;
}

std::string SettingsError(const UpdateRule& rule) {
  if (rule.is_named()) return {};
  return WithRule(rule.rule, [&](auto* null) { return std::remove_pointer_t<decltype(null)>::Error(rule); });
}

void CallRule(const UpdateRule& rule, float* const* records, int64_t slot_offset, const float* grads,
              const uint64_t* keys, int64_t count, int64_t dim) {
  const SokRuleBlock block = {sizeof(SokRuleBlock), count,     dim, records, slot_offset, grads,
                              rule.hyper,           rule.step, keys};
  rule.function(&block);
}

}  // namespace sok

static thread_local std::string answer_on_rules;  // of the functions below

extern "C" const char* SokRegisterRule(const char* name, const SokRuleLayout* layout, SokRuleFunction function) {
  try {
    sok::RegisterRule(name, *layout, function);
    return nullptr;
  } catch (const std::exception& error) {
    answer_on_rules = error.what();
    return answer_on_rules.c_str();
  }
}

extern "C" const char* SokRules() {
  sok::Words rules;
  auto list = [](const sok::Words& words) {
    sok::Words quoted;
    for (const std::string& word : words) quoted.push_back(sok::JsonText(word));
    return "[" + sok::Joined(quoted) + "]";
  };
  auto add = [&](const sok::RuleInfo& rule) {
    rules.push_back("{\"name\": " + sok::JsonText(rule.name) + ", \"slots\": " + list(rule.slots) +
                    ", \"num_scalars\": " + std::to_string(rule.num_scalars) + ", \"starts\": " + list(rule.starts) +
                    ", \"hyper\": " + list(rule.hyper) + ", \"decays\": " + (rule.decays ? "true" : "false") +
                    ", \"needs_whole_row\": " + (rule.needs_whole_row ? "true}" : "false}"));
  };
  for (const sok::RuleInfo& rule : sok::CompiledIn()) add(rule);
  sok::Named& named = sok::Named::Instance();
  const std::lock_guard<std::mutex> lock(named.mutex);
  for (const sok::RuleInfo& rule : named.rules)
    if (rule.function != nullptr) add(rule);
  answer_on_rules = "[" + sok::Joined(rules) + "]";
  return answer_on_rules.c_str();
}
