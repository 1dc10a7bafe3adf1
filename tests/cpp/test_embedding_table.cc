#include "sok/embedding_table.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "tables.h"

namespace {

std::vector<float> Fresh(const sok::TableConfig& config, uint64_t key) {
  std::vector<float> row(static_cast<size_t>(config.dim));
  sok::FillRow(config.initializer, key, config.dim, row.data());
  return row;
}

// The rows are those of the keys, in order.
void CheckFresh(const sok::TableConfig& config, const std::vector<uint64_t>& keys, const std::vector<float>& rows) {
  int64_t wrong = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::vector<float> row = Fresh(config, keys[i]);
    for (size_t j = 0; j < row.size(); ++j) wrong += rows[i * row.size() + j] != row[j];
  }
  CHECK_EQ(wrong, 0);
}

std::vector<uint64_t> Extremes() {
  std::vector<uint64_t> keys;
  for (int bit = 0; bit < 64; ++bit) keys.push_back(uint64_t{1} << bit);
  for (int bit = 0; bit < 64; ++bit) keys.push_back(~(uint64_t{1} << bit));
  keys.push_back(0);
  keys.push_back(~uint64_t{0});
  return keys;
}

}  // namespace

TEST(NewKeysGetFreshRowsOfAnyDim) {
  for (const int64_t dim : {1, 3, 5, 7, 16, 17, 64}) {
    const sok::TableConfig config = Config(dim, 1000);
    Table table(config);
    const std::vector<uint64_t> keys = Extremes();
    CheckFresh(config, keys, table.Lookup(keys, false).values);
    CHECK_EQ(table.native().size(), 0);
    const Rows rows = table.Lookup(keys);
    CheckFresh(config, keys, rows.values);
    for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(rows.ids[i], static_cast<int64_t>(i));
    CHECK_EQ(table.native().size(), static_cast<int64_t>(keys.size()));
    CHECK(table.native().Keys() == keys);
  }
}

TEST(RowIdsSurviveGrowth) {
  constexpr int64_t kMany = 150000 / kFewer;
  Table table(Config(3, kMany + 3));
  const Rows first = table.Lookup({7, 8, 9});
  table.Assign({8}, 5.0f);
  std::vector<uint64_t> many(kMany);
  for (size_t i = 0; i < many.size(); ++i) many[i] = i * 977;
  const Rows rows = table.Lookup(many);
  CHECK_EQ(table.native().size(), kMany + 3);
  const Rows again = table.Lookup({7, 8, 9}, false);
  CHECK(again.ids == first.ids);
  CHECK_EQ(again.values[3], 5.0f);
  CHECK(table.Lookup(many, false).ids == rows.ids);
}

TEST(AFullTableChangesNothing) {
  for (const bool pooled : {false, true}) {
    Table table(Config(2, 4));
    const Rows before = table.Lookup({1, 2, 3});
    const std::vector<uint64_t> keys = {9, 1, 8, 9};
    const std::vector<int64_t> splits = {0, 4};
    CHECK_THROWS(pooled ? table.LookupCombine(keys, splits) : table.Lookup(keys), sok::TableFull,
                 "table 'item' (rank 0 of 1): full: all 4 rows are in use and key 8 is new");
    CHECK_THROWS(table.Assign({1, 8, 9}, 7.0f), sok::TableFull, "full");
    CHECK_EQ(table.native().size(), 3);
    CHECK(table.Lookup({1, 2, 3}, false).values == before.values);
    CHECK(table.Lookup({9, 8}, false).ids == std::vector<int64_t>({-1, -1}));
    CHECK(table.Lookup({9, 9}).ids == std::vector<int64_t>({3, 3}));
  }
}

TEST(ErasedRowsAreUsedAgainAndFresh) {
  const sok::TableConfig config = Config(5, 3);
  Table table(config);
  table.Lookup({1, 2, 3});
  table.Assign({1, 2, 3}, 9.0f);
  table.Apply("adagrad", {1.0, 0.5, 0.0}, {0}, {1, 1, 1, 1, 1});
  CHECK_EQ(table.Erase({1, 1, 7}), 1);
  CHECK_EQ(table.native().size(), 2);
  const Rows rows = table.Lookup({4});
  CHECK_EQ(rows.ids[0] & 0xFFFFFFFF, 0);
  CheckFresh(config, {4}, rows.values);
  float slots[5];
  int64_t stamp = 0;
  const uint64_t key = 4;
  table.native().Slots("adagrad", &key, 1, slots, &stamp);
  for (const float slot : slots) CHECK_EQ(slot, 0.5f);
  CHECK_EQ(stamp, -1);
  CHECK_THROWS(table.Lookup({5}), sok::TableFull, "key 5");
}

TEST(AKeyThatIsErasedTwiceAtOnceCountsOnce) {
  for (const bool hashed : {true, false}) {
    sok::TableConfig config = Config(2, 3);
    config.hashed = hashed;
    Table table(config);
    table.Lookup({0, 1, 2});  // full
    CHECK_EQ(table.Erase({1, 1, 2, 1}), 2);
    CHECK_EQ(table.native().size(), 1);
    CHECK(table.native().Keys() == std::vector<uint64_t>({0}));
  }
}

TEST(AGradientOfAnErasedKeyReachesNoOther) {
  Table table(Config(2, 3));
  const Rows before = table.Lookup({1, 2});
  table.Erase({1});
  const Rows after = table.Lookup({7});  // takes the row that key 1 had
  CHECK_EQ(after.ids[0] & 0xFFFFFFFF, before.ids[0]);
  table.Apply("sgd", {1.0}, before.ids, {1, 1, 1, 1});
  CHECK(table.Lookup({7}).values == after.values);
  const Rows other = table.Lookup({2});  // not erased: its gradient counts, though the id is as old
  CHECK_EQ(other.values[0], before.values[2] - 1.0f);
  table.Apply("sgd", {1.0}, after.ids, {1, 1});
  CHECK_EQ(table.Lookup({7}).values[0], after.values[0] - 1.0f);
}

// Row ids have 31 bits for the erasures before them, erasures of a row once had 32.
TEST(GradientsReachTheirRowsHoweverOftenKeysWereErased) {
  for (const bool hashed : {true, false}) {
    for (const int64_t erasures : {int64_t{1} << 31, int64_t{1} << 32, int64_t{3} << 31}) {
      Table table(Config(2, 4, hashed));
      TableForTests::SetErasures(&table.native(), erasures - 2);
      for (int round = 0; round < 4; ++round) {
        table.Lookup({0, 1, 2});
        const Rows before = table.Lookup({0, 1, 2});
        for (const int64_t id : before.ids) CHECK(id >= 0);
        CHECK_EQ(table.Erase({1}), 1);
        const Rows again = table.Lookup({1});
        table.Apply("sgd", {1.0}, before.ids, {1, 1, 1, 1, 1, 1});
        CHECK_EQ(table.Lookup({0}).values[0], before.values[0] - 1.0f);
        CHECK_EQ(table.Lookup({1}).values[0], again.values[0]);
        CHECK_EQ(table.Lookup({2}).values[0], before.values[4] - 1.0f);
        table.Apply("sgd", {1.0}, again.ids, {1, 1});
        CHECK_EQ(table.Lookup({1}).values[0], again.values[0] - 1.0f);
      }
      Table other(Config(2, 4, hashed));
      other.Lookup({0, 1, 2});
      const Rows before = table.Lookup({0, 1, 2});
      table.native().Swap(&other.native());
      const Rows after = table.Lookup({0, 1, 2});
      table.Apply("sgd", {1.0}, before.ids, {1, 1, 1, 1, 1, 1});
      CHECK(table.Lookup({0, 1, 2}).values == after.values);
    }
  }
}

TEST(IdsOfErasuresThatHaveNotBeenAreRefused) {
  Table table(Config(2, 4));
  const std::vector<int64_t> ids = table.Lookup({0, 1}).ids;
  table.Erase({1});
  CHECK_THROWS(table.Apply("sgd", {1.0}, {ids[0] + (int64_t{2} << 32)}, {1, 1}), sok::InvalidArgument,
               "which this shard does not have");
}

TEST(OneRowUnderTwoIdsIsUpdatedOnce) {
  Table table(Config(2, 9));
  const Rows before = table.Lookup({1, 2});
  table.Erase({2});
  const Rows after = table.Lookup({1});  // the same row, another id
  CHECK(after.ids[0] != before.ids[0]);
  table.Apply("adagrad", {1.0, 0.0, 0.0}, {before.ids[0], before.ids[1], after.ids[0]}, {1, 1, 9, 9, 2, 2});
  float slots[2];
  int64_t stamp = 0;
  const uint64_t key = 1;
  table.native().Slots("adagrad", &key, 1, slots, &stamp);
  CHECK_EQ(slots[0], 9.0f);  // (1 + 2)^2: one update with the sum
}

TEST(BehavesAsAMapUnderRandomUse) {
  for (const bool hashed : {true, false}) {
    Table table(Config(3, 400, hashed));
    std::map<uint64_t, float> expected;
    std::mt19937_64 random(6);
    for (int step = 0; step < 3000; ++step) {
      std::vector<uint64_t> keys(random() % 12);
      for (uint64_t& key : keys) key = random() % 400;
      if (random() % 3 == 0) {
        int64_t erased = 0;
        for (const uint64_t key : keys) erased += static_cast<int64_t>(expected.erase(key));
        CHECK_EQ(table.Erase(keys), erased);
      } else {
        table.Assign(keys, static_cast<float>(step));
        for (const uint64_t key : keys) expected[key] = static_cast<float>(step);
      }
      CHECK_EQ(table.native().size(), static_cast<int64_t>(expected.size()));
    }
    std::vector<uint64_t> keys;
    for (const auto& [key, value] : expected) keys.push_back(key);
    const Rows rows = table.Lookup(keys, false);
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK(rows.ids[i] >= 0);
      for (size_t j = 0; j < 3; ++j) CHECK_EQ(rows.values[3 * i + j], expected[keys[i]]);
    }
    std::vector<uint64_t> exported = table.native().Keys();
    std::sort(exported.begin(), exported.end());
    CHECK(exported == keys);
  }
}

TEST(PooledRowsAreSumsOfRows) {
  const sok::TableConfig config = Config(7, 1000);
  Table table(config);
  const std::vector<uint64_t> keys = {5, 6, 5, 900, 6, 7};
  for (const bool insert : {false, true, true}) {
    const Rows pooled = table.LookupCombine(keys, {0, 3, 3, 6}, insert);
    for (size_t j = 0; j < 7; ++j) {
      const float first = Fresh(config, 5)[j] + Fresh(config, 6)[j] + Fresh(config, 5)[j];
      CHECK(std::fabs(pooled.values[j] - first) <= 1e-6f);
      CHECK_EQ(pooled.values[7 + j], 0.0f);
    }
    CHECK_EQ(pooled.ids[0], insert ? 0 : -1);
  }
}

TEST(IdentityTablesDivideByTheWorld) {
  sok::TableConfig config = Config(2, 4, false);
  config.world_size = 3;
  config.rank = 2;
  Table table(config);
  CHECK(table.Lookup({11, 2}).ids == std::vector<int64_t>({3, 0}));
  CHECK(table.native().Keys() == std::vector<uint64_t>({2, 11}));
  CHECK_THROWS(table.Lookup({14}), sok::InvalidArgument, "key 14 is outside [0, 12)");
  CHECK_THROWS(table.Lookup({~uint64_t{0}}), sok::InvalidArgument, "key -1 is outside [0, 12)");
  CHECK_THROWS(table.Lookup({3}), sok::InvalidArgument, "key 3 belongs to rank 0");
  CHECK_THROWS(table.Erase({12}), sok::InvalidArgument, "outside");
  table.Assign({3, 5}, 1.0f);  // 3 is another rank's
  CHECK_EQ(table.native().size(), 3);
}

TEST(KeysArePrintedAsTheUserWroteThem) {
  sok::TableConfig config = Config(1, 4, false);
  Table is_signed(config);
  config.is_unsigned = true;
  Table is_unsigned(config);
  CHECK_EQ(is_signed.native().KeyText(~uint64_t{0}), std::string("-1"));
  CHECK_EQ(is_unsigned.native().KeyText(~uint64_t{0}), std::string("18446744073709551615"));
}

TEST(UpdatesSumDuplicatesAndIgnoreNegativeIds) {
  sok::TableConfig config = Config(2, 10);
  config.initializer.kind = sok::InitKind::kConstant;
  config.initializer.a = 0.0f;
  Table table(config);
  table.Lookup({1, 2, 3});
  table.Apply("sgd", {0.5}, {2, -1, 0, 2}, {1, 2, 9, 9, 3, 4, 5, 6});
  CHECK(table.Lookup({1, 2, 3}).values == std::vector<float>({-1.5f, -2.0f, 0.0f, 0.0f, -3.0f, -4.0f}));
}

TEST(AnUpdateThatFailsChangesNothing) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const char* rule : {"sgd", "adagrad", "lazy_adam", "adam"}) {
    const std::vector<double> hyper = rule[0] == 's'                   ? std::vector<double>{0.5}
                                      : std::string(rule) == "adagrad" ? std::vector<double>{0.5, 0.1, 1e-7}
                                                                       : std::vector<double>{0.5, 0.9, 0.999, 1e-7};
    Table table(Config(1, 10));
    const std::vector<float> before = table.Lookup({10, 11}).values;
    auto values = [&] { return table.Lookup({10, 11}, false).values; };
    CHECK_THROWS(table.Apply(rule, hyper, {0, 2}, {1, 1}), sok::InvalidArgument, "row id 2, which this shard does not");
    for (const float bad : {inf, -inf, nan}) {
      CHECK_THROWS(table.Apply(rule, hyper, {0, 1}, {1, bad}, 1, sok::Nonfinite::kRaise), sok::InvalidArgument,
                   "gradient of key 11 holds NaN or infinity");
    }
    CHECK_THROWS(table.Apply(rule, hyper, {1, 1}, {3e38f, 3e38f}, 1, sok::Nonfinite::kRaise), sok::InvalidArgument,
                 "gradient of key 11");
    CHECK(values() == before);
    table.Apply(rule, hyper, {1, 0}, {nan, 1}, 1, sok::Nonfinite::kSkip);
    CHECK_EQ(values()[1], before[1]);
    CHECK(values()[0] < before[0]);
  }
}

TEST(SlotSetsBelongToOneRule) {
  Table table(Config(2, 10));
  sok::Scratch scratch;
  const sok::SerialExecutor executor;
  const double hyper[] = {0.5, 0.1, 1e-7};
  const int64_t id = 0;
  const float grad[] = {1, 1};
  table.Lookup({1});
  CHECK_THROWS(table.native().SlotFloats("mine"), sok::FailedPrecondition, "slot set 'mine' yet. Known: none");
  ApplyTo({executor}, &scratch, &table.native(), sok::MakeUpdateRule("adagrad", hyper, 3, 1), "mine",
          sok::Nonfinite::kAllow, &id, grad, 1);
  CHECK_EQ(table.native().SlotFloats("mine"), 2);
  CHECK_THROWS(ApplyTo({executor}, &scratch, &table.native(), sok::MakeUpdateRule("sgd", hyper, 1, 1), "mine",
                       sok::Nonfinite::kAllow, &id, grad, 1),
               sok::InvalidArgument, "slot set 'mine' belongs to another rule");
  float slots[2];
  int64_t stamp;
  const uint64_t unknown = 5;
  CHECK_THROWS(table.native().Slots("mine", &unknown, 1, slots, &stamp), sok::InvalidArgument, "key 5 has no row");
}

// Exact Adam against all rows stepped densely, with rows that are new, rest, are read, erased and assigned on the way.
TEST(AdamReplaysWhatRowsMissed) {
  const int64_t dim = 5, keys = 30;
  sok::TableConfig config = Config(dim, keys);
  Table table(config);
  struct State {
    std::vector<double> w, m, v;
  };
  std::map<uint64_t, State> expected;
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  for (int64_t step = 1; step <= 120; ++step) {
    const double lr = step % 30 < 15 ? 0.01 : 0.05;
    std::vector<uint64_t> batch;
    for (int i = 0; i < 4; ++i) batch.push_back(random() % (step < 60 ? 10 : 30));
    if (step % 17 == 0) {
      table.Erase({3});
      expected.erase(3);
    }
    const Rows rows = table.Lookup(batch);
    std::map<uint64_t, std::vector<double>> sums;
    std::vector<float> grads;
    for (const uint64_t key : batch) {
      if (expected.find(key) == expected.end()) {
        const std::vector<float> fresh = Fresh(config, key);
        expected[key] = {{fresh.begin(), fresh.end()}, std::vector<double>(dim), std::vector<double>(dim)};
      }
      std::vector<double>& sum = sums[key];
      sum.resize(dim);
      for (double& s : sum) {
        grads.push_back(normal(random));
        s += static_cast<double>(grads.back());
      }
    }
    table.Apply("adam", {lr, 0.9, 0.999, 1e-7}, rows.ids, grads, step);
    const double hyper[] = {lr, 0.9, 0.999, 1e-7};
    const double alpha = sok::MakeUpdateRule("adam", hyper, 4, step).lr;
    for (auto& [key, state] : expected) {
      const auto found = sums.find(key);
      for (size_t j = 0; j < static_cast<size_t>(dim); ++j) {
        const double g = found == sums.end() ? 0.0 : found->second[j];
        state.m[j] += (g - state.m[j]) * 0.1;
        state.v[j] += (g * g - state.v[j]) * 0.001;
        state.w[j] -= alpha * state.m[j] / (std::sqrt(state.v[j]) + 1e-7);
      }
    }
    if (step % 23 == 0) {
      table.Assign({5}, 2.0f);
      if (expected.find(5) == expected.end()) expected[5] = {{}, std::vector<double>(dim), std::vector<double>(dim)};
      expected[5].w.assign(dim, 2.0);
    }
  }
  for (const auto& [key, state] : expected) {
    const Rows row = table.Lookup({key}, false);
    std::vector<float> slots(2 * dim);
    int64_t stamp;
    table.native().Slots("adam", &key, 1, slots.data(), &stamp);
    CHECK_EQ(stamp, 120);
    for (size_t j = 0; j < static_cast<size_t>(dim); ++j) {
      CHECK(std::fabs(row.values[j] - state.w[j]) <= 2e-5 * std::max(1.0, std::fabs(state.w[j])));
      CHECK(std::fabs(slots[j] - state.m[j]) <= 1e-5);
      CHECK(std::fabs(slots[static_cast<size_t>(dim) + j] - state.v[j]) <= 1e-5);
    }
  }
}

TEST(ConfigurationsThatMakeNoSenseAreRefused) {
  auto make = [](auto change) {
    sok::TableConfig config = Config(2, 10);
    change(&config);
    sok::EmbeddingTable table(std::move(config));
  };
  CHECK_THROWS(make([](auto* c) { c->dim = 0; }), sok::InvalidArgument, "dim must lie in [1, 1048576]. Received: 0");
  CHECK_THROWS(make([](auto* c) { c->dim = int64_t{1} << 60; }), sok::InvalidArgument, "dim must lie in");
  CHECK_THROWS(make([](auto* c) { c->capacity = 0; }), sok::InvalidArgument, "capacity must lie in");
  CHECK_THROWS(make([](auto* c) { c->capacity = int64_t{1} << 32; }), sok::InvalidArgument, "capacity must lie in");
  CHECK_THROWS(make([](auto* c) { c->rank = 1; }), sok::InvalidArgument, "rank 1 of 1");
  CHECK_THROWS(make([](auto* c) { c->initializer.kind = sok::InitKind::kBank; }), sok::InvalidArgument, "bank");
}

TEST(AnEmptyTableOfAnyCapacityCostsLittle) {
  Table table(Config(64, INT64_C(0xFFFFFFFE)));
  CHECK(table.native().memory_bytes() < int64_t{64} << 20);
}

TEST(WhatErasingLeavesBehindIsCountedAndBounded) {
  constexpr int64_t kKeys = 200'000;  // fewer would be of the size of what memory comes in
  for (const bool hashed : {true, false}) {
    Table table(Config(16, kKeys, hashed));
    std::vector<uint64_t> keys(kKeys);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
    const std::vector<int64_t> first = table.Lookup(keys).ids;
    const int64_t none_erased = table.native().memory_bytes();
    CHECK_EQ(table.Erase(keys), kKeys);
    const int64_t once = table.native().memory_bytes();
    CHECK(once - none_erased >= 8 * kKeys);   // an epoch a row
    CHECK(once - none_erased <= 16 * kKeys);  // and numbers to give out again, with room for more
    for (int round = 0; round < 3; ++round) {
      const Rows rows = table.Lookup(keys);
      table.Apply("sgd", {1.0}, first, std::vector<float>(keys.size() * 16, 1.0f));  // of rows that are gone
      CHECK(table.Lookup(keys).values == rows.values);
      CHECK_EQ(table.Erase(keys), kKeys);
      CHECK_EQ(table.native().memory_bytes(), once);
    }
  }
}

TEST(MoreRowsThanThereIsMemoryAreNotReserved) {
  for (const bool hashed : {true, false}) {
    constexpr int64_t kRows = INT64_C(0xFFFFFFFE);  // 4.4 TB
    Table table(Config(256, kRows, hashed));
    const sok::SerialExecutor executor;
    const int64_t bytes = table.native().memory_bytes();
    CHECK_THROWS(table.native().Reserve({executor}, kRows), sok::OutOfMemory,
                 "to reserve 4294967294 rows takes 4" + std::string(hashed ? "1" : "0"));
    CHECK_EQ(table.native().memory_bytes(), bytes);
    table.native().Reserve({executor}, 1000);
    CHECK(table.native().memory_bytes() > bytes);
  }
}
