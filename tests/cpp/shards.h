// Tables that tests save as shards, and shards that they load.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sok/shard_file.h"
#include "tables.h"

inline const ThreadExecutor kThreads(3);
using Pairs = std::vector<std::pair<std::string, std::string>>;
inline const Pairs kAllSets = {{"adam", "adam"}, {"adagrad", "adagrad"}};

inline sok::TableConfig Shard(int rank, int world_size, int64_t capacity = 1000, bool hashed = true) {
  sok::TableConfig config = Config(3, capacity, hashed);
  config.rank = rank;
  config.world_size = world_size;
  return config;
}

inline void Train(Table* table, uint64_t n) {
  std::vector<uint64_t> keys;
  for (uint64_t k = 0; k < n; ++k)
    if (table->native().OwnerOf(k * 5) == table->native().config().rank) keys.push_back(k * 5);
  for (int step = 1; step <= 3; ++step) {
    const std::vector<int64_t> ids = table->Lookup(keys).ids;
    const std::vector<float> grads(ids.size() * 3, 0.1f * static_cast<float>(step));
    table->Apply("adam", {0.01, 0.9, 0.999, 1e-7}, ids, grads, step);
    table->Apply("adagrad", {0.01, 0.1, 1e-7}, ids, grads, step);
    keys.resize((keys.size() + 1) / 2);
  }
}

inline sok::ShardSummary Save(Table* table, const std::string& path) {
  return sok::SaveShard({kThreads}, table->native(), 8, "g1", path);
}

inline sok::ShardSummary Load(Table* table, const std::string& path, const Pairs& sets = kAllSets, int key_bytes = 8) {
  return sok::LoadShard({kThreads}, path, key_bytes, sets, &table->native());
}

constexpr const char* kNamedRule = "RMSpr0p(velocity,momentum)";

// Gives the keys rows with slots of a rule that the library does not know.
inline void UseNamedRule(Table* table, const std::vector<uint64_t>& keys) {
  sok::UpdateRule rule;
  rule.rule = sok::ParseRule(kNamedRule);
  rule.slot_inits[0] = 0.5f;
  rule.slot_inits[1] = -2.0f;
  std::vector<float> rows(keys.size() * 3), slots(keys.size() * 6);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = 100.0f + static_cast<float>(i);
  sok::Scratch scratch;
  table->native().Restore({kThreads}, &scratch, {{"rmsprop", rule, 0, {}}},
                          {keys.data(), rows.data(), {slots.data()}, static_cast<int64_t>(keys.size())});
}
