// Admission and eviction (cpu/table_policies.cc) beside a map that says the same slowly.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "collector.h"
#include "sok/error.h"
#include "tables.h"

namespace {

constexpr size_t kDim = 3;
const ThreadExecutor kThreads(3);

sok::TableConfig WithPolicies(int64_t after, int64_t older_than, int64_t every, int64_t capacity = 100000) {
  sok::TableConfig config = Config(kDim, capacity);
  config.policies.after = after;
  config.policies.older_than = older_than;
  config.policies.every = every;
  return config;
}

sok::RowHistory HistoryOf(Table* table, uint64_t key) {
  sok::RowHistory history;
  table->native().Histories(&key, 1, &history);
  return history;
}

void EndStep(Table* table) { table->native().EndStep({kThreads}); }

// What a key has seen; `has_row` once it was admitted.
struct Seen {
  int64_t count = 0, last = 0;
  bool has_row = false;
};

}  // namespace

TEST(AKeyGetsItsRowInTheStepThatIsItsNth) {
  Table table(WithPolicies(3, 0, 1));
  const std::vector<float> fresh = table.Lookup({7}, false).values;
  for (int step = 0; step < 2; ++step) {
    for (int again = 0; again < 2; ++again) {
      const Rows rows = table.Lookup({7, 7});
      CHECK_EQ(rows.ids[0], -1);
      CHECK_EQ(rows.ids[1], -1);
      CHECK(std::equal(fresh.begin(), fresh.end(), rows.values.begin() + kDim));
    }
    const Rows pooled = table.LookupCombine({7, 7}, {0, 2});
    CHECK_EQ(pooled.values[0], fresh[0] + fresh[0]);
    CHECK_EQ(table.native().size(), 0);
    EndStep(&table);
  }
  CHECK_EQ(HistoryOf(&table, 7).count, 2u);
  CHECK_EQ(table.native().policy_counts().candidates, 1);
  CHECK_EQ(table.native().policy_counts().refused, 2 * (2 * 2 + 2));
  const Rows rows = table.Lookup({7, 8, 7});
  CHECK(rows.ids[0] >= 0 && rows.ids[0] == rows.ids[2] && rows.ids[1] == -1);
  CHECK_EQ(HistoryOf(&table, 7).count, 3u);
  CHECK_EQ(HistoryOf(&table, 7).last, 3u);
  CHECK_EQ(table.native().policy_counts().candidates, 1);  // 8
  CHECK_EQ(table.native().size(), 1);
}

TEST(RowsLeaveThatNoBatchHasHeld) {
  Table table(WithPolicies(0, 4, 2));
  const int64_t id = table.Lookup({1, 2}).ids[0];
  table.Assign({3}, 5.0f);
  for (int64_t step = 0; step < 3; ++step) {
    if (step > 0) table.Lookup({2});
    EndStep(&table);
  }
  CHECK_EQ(HistoryOf(&table, 3).count, 0u);
  CHECK_EQ(HistoryOf(&table, 3).last, 2u);  // a pass has begun to count for it
  table.Lookup({1}, false);                 // counts nothing
  EndStep(&table);
  CHECK_EQ(table.native().size(), 3);  // 4 - 1 < 4
  for (int64_t step = 4; step < 6; ++step) EndStep(&table);
  CHECK(table.native().Keys() == std::vector<uint64_t>({2}));
  CHECK_EQ(table.native().policy_counts().evicted, 2);
  table.Apply("sgd", {1.0}, {id}, {1.0f, 1.0f, 1.0f});  // of a row that has left: ignored
  CHECK_EQ(table.Lookup({9}).ids[0] & 0xFFFFFFFF, 2);   // the number that was freed last
}

TEST(RowsOfSmallNormLeave) {
  sok::TableConfig config = WithPolicies(0, 0, 1);
  config.policies.norm_below = 1.0f;
  Table table(config);
  table.Assign({1}, 0.5f);
  table.Assign({2}, 0.6f);
  EndStep(&table);
  CHECK(table.native().Keys() == std::vector<uint64_t>({2}));
}

TEST(CrowdedBucketsKeepWhatWasHeldLastOrMostOften) {
  constexpr int64_t kMaxRows = (16 << sok::kBucketBits) + 2048;
  for (const int64_t half_life : {-1, 0, 2}) {  // -1: the most recent stay
    sok::TableConfig config = WithPolicies(0, half_life < 0 ? 6 : 0, 2, 400000);
    config.policies.max_rows = kMaxRows;
    config.policies.keeps_frequent = half_life >= 0;
    config.policies.half_life = std::max<int64_t>(half_life, 0);
    Table table(config);
    std::map<uint64_t, Seen> seen;
    std::mt19937 random(11);
    for (int64_t step = 1; step <= 8; ++step) {
      std::vector<uint64_t> keys(20000);
      for (uint64_t& key : keys) key = random() % (step % 3 == 0 ? 4000 : 120000);
      table.Lookup(keys);
      for (const uint64_t key : keys) {
        Seen& of = seen[key];
        if (of.last != step) of = {of.count + 1, step, true};
      }
      EndStep(&table);
      if (step % 2 != 0) continue;
      std::map<int, std::vector<std::pair<std::pair<double, uint64_t>, uint64_t>>> buckets;
      for (auto it = seen.begin(); it != seen.end();) {
        const Seen& of = it->second;
        if (half_life < 0 && step - of.last >= 6) {
          it = seen.erase(it);
          continue;
        }
        const double age = half_life > 0 ? static_cast<double>(step - of.last) / static_cast<double>(half_life) : 0.0;
        const double score =
            half_life < 0 ? static_cast<double>(of.last) : std::log2(static_cast<double>(of.count)) - age;
        buckets[sok::BucketOf(it->first)].push_back({{score, sok::HashKey(it->first)}, it->first});
        ++it;
      }
      for (auto& [bucket, rows] : buckets) {
        const size_t most = static_cast<size_t>(kMaxRows * (bucket + 1) / 4096 - kMaxRows * bucket / 4096);
        std::sort(rows.begin(), rows.end());
        for (size_t i = 0; i + most < rows.size(); ++i) seen.erase(rows[i].second);
      }
      std::set<uint64_t> left;
      for (const uint64_t key : table.native().Keys()) left.insert(key);
      CHECK_EQ(left.size(), seen.size());
      for (const auto& [key, of] : seen) CHECK_EQ(left.count(key), size_t{1});
    }
    CHECK(table.native().policy_counts().evicted > 10000);
  }
}

TEST(ChanceDependsOnKeyAndSeedAlone) {
  sok::TableConfig config = WithPolicies(0, 0, 1);
  config.policies.admit_below = uint64_t{1} << 62;
  config.policies.chance_seed = 5;
  Table table(config);
  std::vector<uint64_t> keys;
  for (uint64_t k = 0; k < 4000; ++k) keys.push_back(k);
  for (int step = 0; step < 2; ++step) {
    const Rows rows = table.Lookup(keys);
    for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(rows.ids[i] >= 0, config.policies.HasLuck(keys[i]));
  }
  CHECK(table.native().size() > 850 && table.native().size() < 1150);
}

TEST(RandomProgramsGiveWhatAMapGives) {
  for (const int64_t after : {0, 1, 3}) {
    const int64_t older_than = 5, every = 3;
    Table table(WithPolicies(after, older_than, every));
    std::map<uint64_t, Seen> seen;
    std::mt19937 random(7);
    const auto draw = [&](int n) { return static_cast<uint64_t>(random() % static_cast<unsigned>(n)); };
    for (int64_t step = 1; step <= 60; ++step) {
      std::set<uint64_t> held;
      for (int call = 0; call < 2; ++call) {
        std::vector<uint64_t> keys(50);
        for (uint64_t& key : keys) key = draw(step % 7 == 0 ? 300 : 40);
        held.insert(keys.begin(), keys.end());
        const Rows rows = call == 0 ? table.Lookup(keys) : table.LookupCombine(keys, {0, 20, 50});
        for (size_t i = 0; i < keys.size(); ++i) {
          Seen& of = seen[keys[i]];
          if (of.last != step) of = {of.count + 1, step, of.has_row};
          of.has_row = of.has_row || of.count >= after;
          CHECK_EQ(rows.ids[i] >= 0, of.has_row);
        }
      }
      if (step % 9 == 0) {
        const uint64_t key = draw(40);
        table.Erase({key});
        seen.erase(key);
        table.Assign({draw(40)}, 1.0f);
        const uint64_t assigned = 1000 + static_cast<uint64_t>(step);
        table.Assign({assigned}, 1.0f);
        seen[assigned].has_row = true;
      }
      for (uint64_t key = 0; key < 40; ++key) {  // what was assigned above
        float row[kDim];
        int64_t id;
        sok::Scratch scratch;
        table.native().Lookup({kThreads}, &scratch, &key, 1, false, nullptr, row, &id);
        if (id >= 0) seen[key].has_row = true;
      }
      EndStep(&table);
      if (step % every == 0) {
        for (auto it = seen.begin(); it != seen.end();) {
          if (it->second.last == 0) it->second.last = step;
          it = step - it->second.last >= older_than ? seen.erase(it) : std::next(it);
        }
      }
      int64_t rows = 0;
      for (const auto& [key, of] : seen) {
        rows += of.has_row;
        const sok::RowHistory history = HistoryOf(&table, key);
        CHECK_EQ(history.count, static_cast<uint32_t>(of.count));
        CHECK_EQ(history.last, static_cast<uint32_t>(of.last));
      }
      CHECK_EQ(table.native().size(), rows);
      CHECK_EQ(table.native().policy_counts().candidates, static_cast<int64_t>(seen.size()) - rows);
    }
  }
}

TEST(ABucketHasAKeyOfItsOwn) {
  for (int bucket = 0; bucket < 1 << sok::kBucketBits; ++bucket)
    CHECK_EQ(sok::BucketOf(sok::KeyOfBucket(bucket)), bucket);
}

TEST(ABloomFilterCountsAtTheEndOfAStep) {
  for (const int64_t cells : {8, 1024}) {
    sok::TableConfig config = WithPolicies(3, 0, 1);
    config.policies.bloom_cells = cells;
    config.policies.bloom_hashes = 4;
    Table table(config);
    const sok::Policies& policies = config.policies;
    std::map<std::pair<int, int64_t>, int64_t> counted;  // by bucket and cell
    std::set<uint64_t> rows;
    std::mt19937 random(5);
    int64_t early = 0;
    std::map<uint64_t, int64_t> times;
    for (int64_t step = 1; step <= 30; ++step) {
      std::set<uint64_t> refused, held;
      for (int call = 0; call < 2; ++call) {
        std::vector<uint64_t> keys(2000);
        for (uint64_t& key : keys) key = random() % 40000;
        const Rows looked = table.Lookup(keys);
        for (size_t i = 0; i < keys.size(); ++i) {
          int64_t count = UINT8_MAX;
          for (int64_t h = 0; h < 4; ++h)
            count = std::min(count, counted[{sok::BucketOf(keys[i]), policies.CellOf(keys[i], h)}]);
          const bool passes = rows.count(keys[i]) > 0 || count + 1 >= 3;
          CHECK_EQ(looked.ids[i] >= 0, passes);
          if (held.insert(keys[i]).second) ++times[keys[i]];
          early += passes && times[keys[i]] < 3;
          CHECK(passes || times[keys[i]] < 3);  // never late
          passes ? rows.insert(keys[i]) : refused.insert(keys[i]);
        }
      }
      EndStep(&table);
      for (const uint64_t key : refused) {
        std::set<int64_t> once;
        for (int64_t h = 0; h < 4; ++h) once.insert(policies.CellOf(key, h));
        for (const int64_t cell : once) ++counted[{sok::BucketOf(key), cell}];
      }
      CHECK_EQ(table.native().size(), static_cast<int64_t>(rows.size()));
    }
    CHECK((early > 100) == (cells == 8));  // some ten keys in each bucket
  }
}

TEST(ThreadsThatMeetInARowCountItOnce) {
  Table table(WithPolicies(2, 100, 1));
  std::vector<uint64_t> keys(20000 / kFewer, 0);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i % 50;
  for (int step = 0; step < 4; ++step) {
    RunTogether(3, [&](int) { table.Lookup(keys); });
    EndStep(&table);
  }
  for (uint64_t key = 0; key < 50; ++key) CHECK_EQ(HistoryOf(&table, key).count, 4u);
}

TEST(ASnapshotHoldsWhatRowsHadSeenThen) {
  Table table(WithPolicies(0, 2, 1));
  for (int step = 0; step < 2; ++step) {
    table.Lookup({1, 2});
    EndStep(&table);
  }
  table.native().BeginSave(sok::TableStore::SnapshotOf::kAllRows);
  for (int step = 0; step < 2; ++step) {
    table.Lookup({1, 3});
    EndStep(&table);
  }
  CHECK(table.native().Keys() == std::vector<uint64_t>({1, 3}));
  Collector collector(kDim);
  table.native().ReadSnapshot({kThreads}, &collector);
  table.native().EndSave("one");
  const AllRows rows = collector.found;
  CHECK_EQ(rows.size(), size_t{2});
  for (const uint64_t key : {1, 2}) {
    const std::vector<float>& slots = rows.at(key).slots.at(0);
    uint32_t words[2];
    std::memcpy(words, slots.data(), sizeof(words));
    CHECK_EQ(words[0], 2u);
    CHECK_EQ(words[1], 2u);
  }
}

TEST(WhatMakesNoSenseIsRefused) {
  CHECK_THROWS(Table table(WithPolicies(-1, 0, 1)), sok::InvalidArgument, "admission after n steps");
  CHECK_THROWS(Table table(WithPolicies(0, 5, 0)), sok::InvalidArgument, "`every` must be at least 1");
  sok::TableConfig few = WithPolicies(0, 0, 1);
  few.policies.max_rows = 1000;
  CHECK_THROWS(Table table(few), sok::InvalidArgument, "`max_rows` must be at least 65536");
  sok::TableConfig many = WithPolicies(256, 0, 1);
  many.policies.bloom_cells = 8;
  many.policies.bloom_hashes = 2;
  CHECK_THROWS(Table table(many), sok::InvalidArgument, "counts up to 255");
  many.policies.bloom_cells = 7;
  CHECK_THROWS(Table table(many), sok::InvalidArgument, "multiple of 4");
  sok::TableConfig identity = WithPolicies(2, 0, 1);
  identity.hashed = false;
  CHECK_THROWS(Table table(identity), sok::InvalidArgument, "admits every key");
  Table plain(Config(kDim, 10));
  CHECK_THROWS(HistoryOf(&plain, 1), sok::FailedPrecondition, "neither admission nor eviction");
}
