// Rows that leave when the table is full, and rows that keys share (cpu/table_policies.cc), beside maps; and a long life of both.
//   SOK_SOAK_STEPS=1000000   so many steps in that life; 10,000 unless said
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "collector.h"
#include "files.h"
#include "rules.h"
#include "sok/error.h"
#include "tables.h"

namespace {

constexpr size_t kDim = 3;
constexpr int kBuckets = 1 << sok::kBucketBits;
const ThreadExecutor kThreads(3);

struct Row {
  int64_t count = 0, last = 0;
  float value = 0.0f;  // of each column
};

// What rows leave, said slowly: those of a bucket with more than its part, until 15/16 of it are left.
class Twin {
 public:
  explicit Twin(const sok::Policies& policies) : policies_(policies), buckets_(kBuckets) {}

  Row* Find(uint64_t key) {
    auto& rows = buckets_[static_cast<size_t>(sok::BucketOf(key))];
    const auto found = rows.find(key);
    return found == rows.end() ? nullptr : &found->second;
  }
  Row& Hold(uint64_t key, int64_t step) {
    Row& row = buckets_[static_cast<size_t>(sok::BucketOf(key))][key];
    if (row.last != step) ++row.count;
    row.last = step;
    touched_.push_back(sok::BucketOf(key));
    return row;
  }
  void Erase(uint64_t key) { buckets_[static_cast<size_t>(sok::BucketOf(key))].erase(key); }

  // The keys that leave after update `now`.
  std::vector<uint64_t> EndStep(int64_t now) {
    std::vector<uint64_t> gone;
    for (const int b : touched_) {
      auto& rows = buckets_[static_cast<size_t>(b)];
      const int64_t part = policies_.max_rows * (b + 1) / kBuckets - policies_.max_rows * b / kBuckets;
      if (static_cast<int64_t>(rows.size()) <= part) continue;
      std::vector<std::pair<std::pair<double, uint64_t>, uint64_t>> order;
      for (const auto& [key, row] : rows) {
        const double age = policies_.half_life > 0
                               ? static_cast<double>(now - row.last) / static_cast<double>(policies_.half_life)
                               : 0.0;
        const double score =
            policies_.keeps_frequent ? std::log2(static_cast<double>(row.count)) - age : static_cast<double>(row.last);
        if (std::count(policies_.kept.begin(), policies_.kept.end(), key) == 0)
          order.push_back({{score, sok::HashKey(key)}, key});
      }
      std::sort(order.begin(), order.end());
      const int64_t left = part - part / 16, over = static_cast<int64_t>(rows.size()) - left;
      for (int64_t i = 0; i < std::min(over, static_cast<int64_t>(order.size())); ++i) {
        gone.push_back(order[static_cast<size_t>(i)].second);
        rows.erase(gone.back());
      }
    }
    touched_.clear();
    std::sort(gone.begin(), gone.end());
    return gone;
  }

  int64_t size() const {
    int64_t n = 0;
    for (const auto& rows : buckets_) n += static_cast<int64_t>(rows.size());
    return n;
  }
  void Check(Table* table) {
    const std::vector<uint64_t> keys = table->native().Keys();
    CHECK_EQ(static_cast<int64_t>(keys.size()), size());
    std::vector<sok::RowHistory> histories(keys.size());
    table->native().Histories(keys.data(), static_cast<int64_t>(keys.size()), histories.data());
    const Rows rows = table->Lookup(keys, false);
    for (size_t i = 0; i < keys.size(); ++i) {
      const Row* row = Find(keys[i]);
      CHECK(row != nullptr);
      CHECK_EQ(static_cast<int64_t>(histories[i].count), row->count);
      CHECK_EQ(static_cast<int64_t>(histories[i].last), row->last);
      for (size_t j = 0; j < kDim; ++j) CHECK_EQ(rows.values[i * kDim + j], row->value);
    }
  }

 private:
  const sok::Policies policies_;
  std::vector<std::map<uint64_t, Row>> buckets_;
  std::vector<int> touched_;
};

sok::TableConfig WhenFull(int64_t max_rows, int64_t half_life) {  // -1: the most recent stay
  sok::TableConfig config = Config(kDim, 2 * max_rows + 100000);
  config.initializer.kind = sok::InitKind::kConstant;
  config.initializer.a = 1.0f;
  config.policies.max_rows = max_rows;
  config.policies.when_full = true;
  config.policies.keeps_frequent = half_life >= 0;
  config.policies.half_life = std::max<int64_t>(half_life, 0);
  return config;
}

// Looks keys up, adds 1/4 to the rows of each, and ends the step.
std::vector<uint64_t> Step(Table* table, Twin* twin, std::vector<uint64_t> keys, int64_t step) {
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  const Rows rows = table->Lookup(keys);
  table->Apply("sgd", {1.0}, rows.ids, std::vector<float>(keys.size() * kDim, -0.25f));
  for (const uint64_t key : keys) {
    Row& row = twin->Hold(key, step);
    row.value = std::min((row.count == 1 && row.value == 0.0f ? 1.0f : row.value) + 0.25f, 1e6f);
  }
  table->native().EndStep({kThreads});
  return twin->EndStep(step);
}

}  // namespace

TEST(FullBucketsGiveUpWhatTheirTwinGivesUp) {
  for (const int64_t half_life : {-1, 0, 3}) {
    sok::TableConfig config = WhenFull(20 * kBuckets + 100, half_life);
    for (uint64_t key = 0; key < 3000; key += 3) config.policies.kept.push_back(key);
    Table table(config);
    Twin twin(config.policies);
    CHECK_EQ(table.native().TakeEvicted(true).keys.size(), size_t{0});  // from now on they are kept
    std::mt19937 random(5);
    std::vector<uint64_t> all;
    for (int64_t step = 1; step <= 8; ++step) {
      std::vector<uint64_t> keys(30000 / kFewer);
      const unsigned most = (step % 3 == 0 ? 4000u : 200000u) / kFewer;
      for (uint64_t& key : keys) key = random() % most * 7;
      const std::vector<uint64_t> gone = Step(&table, &twin, keys, step);
      all.insert(all.end(), gone.begin(), gone.end());
      if (step == 5) {
        for (uint64_t key = 0; key < 7000; key += 7) twin.Erase(key);
        std::vector<uint64_t> erased;
        for (uint64_t key = 0; key < 7000; key += 7) erased.push_back(key);
        table.Erase(erased);
      }
      twin.Check(&table);
    }
    const sok::EmbeddingTable::Evicted evicted = table.native().TakeEvicted(true);
    std::sort(all.begin(), all.end());
    CHECK(evicted.keys == all);
    CHECK_EQ(evicted.rows.size(), all.size() * kDim);
    for (const float value : evicted.rows) CHECK(value >= 1.25f);
    CHECK(kFewer > 1 || all.size() > 1000);
  }
}

TEST(KeysThatWaitShareRowsThatLearn) {
  sok::TableConfig config = Config(kDim, 10000);
  config.initializer.kind = sok::InitKind::kConstant;
  config.initializer.a = 2.0f;
  config.policies.after = 3;
  config.policies.shared_rows = 2 * kBuckets;
  config.policies.older_than = 100;
  const sok::Policies& policies = config.policies;
  // Two keys of one shared row, one of another.
  const uint64_t first = 7, shared = policies.SharedKey(first);
  uint64_t second = 8, other = 8;
  while (policies.SharedKey(second) != shared) ++second;
  while (policies.SharedKey(other) == shared) ++other;
  CHECK(policies.IsShared(shared) && !policies.IsShared(first));
  CHECK_EQ(sok::BucketOf(shared), sok::BucketOf(first));
  Table table(config);
  const auto step = [&](const std::vector<uint64_t>& keys) {
    const Rows rows = table.Lookup(keys);
    const std::vector<float> grads(keys.size() * kDim, 1.0f);
    sok::Scratch scratch;
    sok::EmbeddingTable::Gradients gradients{&table.native(), rows.ids.data(), grads.data(),
                                             static_cast<int64_t>(keys.size())};
    gradients.distinct = true;  // the keys are; that their rows are not is the table's to know
    const std::vector<double> hyper = HyperOf("adagrad", 0.5);
    sok::EmbeddingTable::ApplyGroup({kThreads}, &scratch,
                                    sok::MakeUpdateRule("adagrad", hyper.data(), static_cast<int64_t>(hyper.size()), 1),
                                    "adagrad", sok::Nonfinite::kAllow, &gradients, 1);
    table.native().EndStep({kThreads});
    return rows;
  };
  const auto slot = [&](uint64_t key) {
    std::vector<float> slots(kDim);
    int64_t stamp;
    table.native().Slots("adagrad", &key, 1, slots.data(), &stamp);
    return slots[0];
  };
  const Rows one = step({first, second, other});
  CHECK(one.ids[0] >= 0 && one.ids[0] == one.ids[1] && one.ids[2] >= 0 && one.ids[2] != one.ids[0]);
  CHECK_EQ(table.native().size(), 2);
  CHECK_EQ(table.native().policy_counts().candidates, 3);
  const float start = slot(shared) - 4.0f;                                    // two gradients of 1 are one of 2
  const float learnt = 2.0f - 0.5f * 2.0f / std::sqrt(start + 4.0f + 1e-3f);  // epsilon is in the root
  CHECK(std::fabs(table.Lookup({shared}, false).values[0] - learnt) < 1e-5f);
  for (const uint64_t key : {first, second}) {  // whoever waits reads it, in training or not
    const Rows read = table.Lookup({key}, false);
    CHECK(std::fabs(read.values[0] - learnt) < 1e-5f);
    const Rows pooled = table.LookupCombine({key, key}, {0, 2}, false);
    CHECK(std::fabs(pooled.values[0] - 2 * learnt) < 1e-5f);
  }
  step({first});
  const float before = table.Lookup({shared}, false).values[0], slots = slot(shared);
  const Rows admitted = table.Lookup({first});  // its third step
  CHECK(admitted.ids[0] != one.ids[0]);
  CHECK_EQ(admitted.values[0], before);
  CHECK_EQ(slot(first), slots);
  table.Apply("adagrad", HyperOf("adagrad", 0.5), admitted.ids, {1.0f, 1.0f, 1.0f});
  CHECK_EQ(table.Lookup({shared}, false).values[0], before);  // they are two from here
  CHECK(table.Lookup({first}, false).values[0] < before);
  table.native().EndStep({kThreads});
  for (int64_t n = 0; n < (kFewer > 1 ? 120 : 300); ++n) table.native().EndStep({kThreads});
  CHECK_EQ(table.native().size(), 2);  // shared rows never leave
  CHECK_EQ(table.native().policy_counts().evicted, 1);
}

TEST(WhatMakesNoSenseIsRefused) {
  CHECK_THROWS(Table table(WhenFull(4095, 0)), sok::InvalidArgument, "room for at least 4096");
  sok::TableConfig config = Config(kDim, 10);
  config.policies.shared_rows = kBuckets;
  CHECK_THROWS(Table table(config), sok::InvalidArgument, "it needs an admission");
  config.policies.after = 2;
  config.policies.shared_rows = 1000;
  CHECK_THROWS(Table table(config), sok::InvalidArgument, "a multiple of 4096");
}

// Inserts, updates, evictions, erasures and saves by changes, of a table in memory and of one over a file.
TEST(ALongLifeEndsWhereItsTwinDoes) {
  setenv("SOK_STORAGE_FRAMES", "64", 1);
  setenv("SOK_STORAGE_SEGMENT_BYTES", "65536", 1);
  const char* said = std::getenv("SOK_SOAK_STEPS");
  const int64_t steps = said != nullptr ? std::atoll(said) : kFewer > 1 ? 1000 : 10000;
  for (const bool over_a_file : {false, true}) {
    Folder folder;
    sok::TableConfig config = WhenFull(2 * kBuckets, over_a_file ? 5000 : -1);
    if (over_a_file) config.storage = {int64_t{64} << 20, folder.path()};
    Table table(config);
    Twin twin(config.policies);
    std::mt19937_64 random(9);
    AllRows mirror;  // what whoever follows the saves has
    int64_t memory = 0, file = 0;
    for (int64_t step = 1; step <= steps; ++step) {
      std::vector<uint64_t> keys(8);
      // Few keys come often, and most once.
      for (uint64_t& key : keys) key = random() % 3 != 0 ? random() % 2000 : random() % 1000000000;
      Step(&table, &twin, keys, step);
      if (step % 97 == 0) {
        const uint64_t key = random() % 2000;
        table.Erase({key});
        twin.Erase(key);
      }
      if (step % 1000 == 0 || step == steps) {
        table.native().BeginSave();
        Collector collector(kDim, 1000);
        if (mirror.empty()) {
          table.native().ReadAll({kThreads}, &collector);
        } else {
          table.native().ReadChanges({kThreads}, &collector);
        }
        table.native().EndSave("save " + std::to_string(step));
        for (const uint64_t key : collector.erased) mirror.erase(key);
        for (const auto& [key, kept] : collector.found) mirror[key] = kept;
      }
      const sok::StorageCounts counts = table.native().storage_counts();
      if (step == steps / 2) memory = counts.memory_bytes, file = counts.file_bytes;
      // In the second half there is nothing new.
      if (step > steps / 2 && kFewer == 1) {
        CHECK(counts.memory_bytes < memory + memory / 2 + (1 << 18));
        CHECK(counts.file_bytes <= file + file / 2 + (1 << 18));
      }
    }
    twin.Check(&table);
    CHECK_EQ(static_cast<int64_t>(mirror.size()), twin.size());
    for (const auto& [key, kept] : mirror) {
      const Row* row = twin.Find(key);
      CHECK(row != nullptr);
      CHECK_EQ(kept.row[0], row->value);
    }
    CHECK(kFewer > 1 || table.native().policy_counts().evicted > steps / 10);
    std::printf("%s: %lld steps, %lld rows, %lld evicted, %lld bytes of memory, %lld of the file\n",
                over_a_file ? "over a file" : "in memory", static_cast<long long>(steps),
                static_cast<long long>(twin.size()), static_cast<long long>(table.native().policy_counts().evicted),
                static_cast<long long>(table.native().storage_counts().memory_bytes),
                static_cast<long long>(table.native().storage_counts().file_bytes));
  }
}
