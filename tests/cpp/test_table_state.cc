#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "collector.h"
#include "sok/error.h"
#include "tables.h"

using sok::EmbeddingTable;

namespace {

Collector ReadAll(Table* table) {
  const ThreadExecutor executor(3);
  Collector all(table->native().dim());
  table->native().ReadAll({executor}, &all);
  return all;
}

int64_t Restore(Table* table, const Collector& saved, sok::TableStore::Columns columns = {}) {
  const ThreadExecutor executor(3);
  sok::Scratch scratch;
  std::vector<uint64_t> keys;
  std::vector<float> rows;
  std::vector<std::vector<float>> slots(saved.sets.size());
  for (const auto& [key, kept] : saved.found) {
    keys.push_back(key);
    rows.insert(rows.end(), kept.row.begin(), kept.row.end());
    for (size_t s = 0; s < slots.size(); ++s)
      slots[s].insert(slots[s].end(), kept.slots[s].begin(), kept.slots[s].end());
  }
  EmbeddingTable::RowValues values{keys.data(), rows.data(), {}, static_cast<int64_t>(keys.size()), columns};
  for (const auto& s : slots) values.slots.push_back(s.data());
  return table->native().Restore({executor}, &scratch, saved.sets, values);
}

std::vector<uint64_t> Range(uint64_t n) {
  std::vector<uint64_t> keys;
  for (uint64_t k = 0; k < n; ++k) keys.push_back(k * 3);
  return keys;
}

// Two optimizers, one of them exact Adam, which owes something to most rows at the end.
void Train(Table* table, uint64_t n, int steps) {
  const size_t dim = static_cast<size_t>(table->native().dim());
  for (int step = 1; step <= steps; ++step) {
    std::vector<uint64_t> keys = Range(n);
    if (step > 1) keys.resize(keys.size() / static_cast<size_t>(step));
    const std::vector<int64_t> ids = table->Lookup(keys).ids;
    std::vector<float> grads(ids.size() * dim);
    for (size_t i = 0; i < grads.size(); ++i) grads[i] = static_cast<float>(i % 13) - 6.0f + static_cast<float>(step);
    table->Apply("adam", {0.01, 0.9, 0.999, 1e-7}, ids, grads, step);
    table->Apply("adagrad", {0.01, 0.1, 1e-7}, ids, grads, step);
  }
}

}  // namespace

TEST(ReadAllGivesWhatExportGivesInBatchesOfTheSizeAskedFor) {
  Table table(Config(3, 1000));
  Train(&table, 100, 4);
  const Collector all = ReadAll(&table);
  CHECK_EQ(all.begins, 1);
  CHECK_EQ(all.expected, 100);
  CHECK_EQ(all.found.size(), size_t{100});
  CHECK_EQ(all.sets.size(), size_t{2});
  CHECK_EQ(all.sets[0].calls, 4);
  for (size_t i = 0; i + 1 < all.batches.size(); ++i) CHECK_EQ(all.batches[i], 7);
  const ThreadExecutor executor(3);
  for (size_t s = 0; s < 2; ++s) {
    std::vector<uint64_t> keys;
    std::vector<float> rows, slots;
    std::vector<int64_t> stamps;
    int64_t floats = 0;
    table.native().Export({executor}, all.sets[s].name, [&](int64_t n, int64_t slot_floats) {
      floats = slot_floats;
      keys.resize(static_cast<size_t>(n));
      rows.resize(static_cast<size_t>(n) * 3);
      slots.resize(static_cast<size_t>(n * slot_floats));
      stamps.resize(static_cast<size_t>(n));
      return EmbeddingTable::ExportTarget{keys.data(), rows.data(), slots.data(), stamps.data()};
    });
    for (size_t i = 0; i < keys.size(); ++i) {
      const Kept& kept = all.found.at(keys[i]);
      CHECK(std::equal(kept.row.begin(), kept.row.end(), rows.begin() + static_cast<long>(3 * i)));
      CHECK(std::equal(kept.slots[s].begin(), kept.slots[s].end(),
                       slots.begin() + static_cast<long>(i) * static_cast<long>(floats)));
    }
  }
}

TEST(ATableWithoutRowsGivesNone) {
  for (const bool hashed : {true, false}) {
    Table table(Config(3, 1000, hashed));
    const Collector all = ReadAll(&table);
    CHECK_EQ(all.begins, 1);
    CHECK_EQ(all.expected, 0);
    CHECK(all.batches.empty());
  }
}

TEST(RestoredRowsGoOnAsIfNothingHadHappened) {
  for (const bool hashed : {true, false}) {
    Table table(Config(3, 1000, hashed)), other(Config(3, 700, hashed));
    Train(&table, 100, 4);
    const Collector saved = ReadAll(&table);
    CHECK_EQ(Restore(&other, saved), 100);
    CHECK(ReadAll(&other).found == saved.found);
    CHECK_EQ(other.native().SlotSets()[0].calls, 0);
    for (Table* t : {&table, &other}) {
      for (int step = 5; step < 9; ++step) {
        const std::vector<int64_t> ids = t->Lookup({3, 297, 6, 501}).ids;
        t->Apply("adam", {0.01, 0.9, 0.999, 1e-7}, ids, std::vector<float>(12, 0.5f), step);
        t->Apply("adagrad", {0.01, 0.1, 1e-7}, ids, std::vector<float>(12, 0.5f), step);
      }
    }
    const Collector a = ReadAll(&table), b = ReadAll(&other);
    CHECK_EQ(a.found.size(), b.found.size());
    for (const auto& [key, kept] : a.found) {
      for (size_t i = 0; i < 3; ++i) CHECK(std::abs(kept.row[i] - b.found.at(key).row[i]) < 1e-6f);
    }
  }
}

TEST(RowsAreRestoredColumnByColumn) {
  Table table(Config(3, 1000)), other(Config(3, 700)), narrow(Config(2, 700));
  Train(&table, 100, 4);
  const Collector saved = ReadAll(&table);
  CHECK_EQ(Restore(&other, saved, {3, 2, 2, 1}), 100);
  for (const auto& [key, kept] : ReadAll(&other).found) {
    std::vector<float> expected(3);  // what a fresh row holds, but for the column that was stored
    sok::FillRow(other.native().config().initializer, key, 3, expected.data());
    expected[2] = saved.found.at(key).row[2];
    CHECK(kept.row == expected);
  }
  CHECK_EQ(Restore(&other, saved, {3, 0, 0, 2}), 0);
  CHECK(ReadAll(&other).found == saved.found);
  CHECK_EQ(Restore(&narrow, saved, {3, 1, 0, 2}), 100);
  const Collector cut = ReadAll(&narrow);
  for (const auto& [key, kept] : cut.found) {
    const Kept& whole = saved.found.at(key);
    CHECK(kept.row == (std::vector<float>{whole.row[1], whole.row[2]}));
    for (size_t s = 0; s < kept.slots.size(); ++s) {
      std::vector<float> expected;
      for (size_t j = 0; j < whole.slots[s].size(); ++j)
        if (j % 3 != 0) expected.push_back(whole.slots[s][j]);
      CHECK(kept.slots[s] == expected);
    }
  }
  CHECK_EQ(Restore(&other, cut, {2, 0, 1, 2}), 0);  // and back
  CHECK(ReadAll(&other).found == saved.found);
}

TEST(RestoreReplacesRowsThatExistAndLeavesOthers) {
  Table table(Config(3, 1000)), other(Config(3, 1000));
  Train(&table, 10, 3);
  Train(&other, 20, 5);
  const Collector saved = ReadAll(&table), before = ReadAll(&other);
  CHECK_EQ(Restore(&other, saved), 0);
  const Collector after = ReadAll(&other);
  CHECK_EQ(after.found.size(), size_t{20});
  for (const auto& [key, kept] : after.found) CHECK(kept == (key < 30 ? saved.found.at(key) : before.found.at(key)));
}

TEST(RestoreLeavesOtherRanksKeysOut) {
  sok::TableConfig config = Config(3, 1000);
  config.world_size = 3;
  config.rank = 1;
  Table table(Config(3, 1000)), shard(config);
  Train(&table, 50, 2);
  Collector saved = ReadAll(&table);
  Restore(&shard, saved);
  const Collector mine = ReadAll(&shard);
  for (const auto& [key, kept] : mine.found) CHECK(key % 3 == 1);
  std::map<uint64_t, Kept> expected;
  for (const auto& [key, kept] : saved.found)
    if (key % 3 == 1) expected.emplace(key, kept);
  CHECK(mine.found == expected);
}

TEST(TheLastOfEqualKeysIsRestored) {
  Table table(Config(2, 10));
  const ThreadExecutor executor(3);
  sok::Scratch scratch;
  const std::vector<uint64_t> keys = {5, 6, 5};
  const std::vector<float> rows = {1, 1, 2, 2, 3, 3};
  CHECK_EQ(table.native().Restore({executor}, &scratch, {}, {keys.data(), rows.data(), {}, 3}), 2);
  CHECK(table.Lookup({5, 6}).values == (std::vector<float>{3, 3, 2, 2}));
}

TEST(SlotsOfOtherSetsAreFreshInNewRows) {
  Table table(Config(2, 10));
  const std::vector<int64_t> ids = table.Lookup({1}).ids;
  table.Apply("adagrad", {0.5, 0.25, 1e-7}, ids, {1, 1});
  const ThreadExecutor executor(1);
  sok::Scratch scratch;
  const std::vector<uint64_t> keys = {2};
  const std::vector<float> rows = {9, 9};
  table.native().Restore({executor}, &scratch, {}, {keys.data(), rows.data(), {}, 1});
  const Collector all = ReadAll(&table);
  CHECK(all.found.at(2).slots[0] == (std::vector<float>{0.25f, 0.25f}));
  CHECK(all.found.at(1).slots[0] == (std::vector<float>{1.25f, 1.25f}));
}

TEST(ARowThatTakesThePlaceOfAnErasedOneOwesNothingToOtherSets) {
  Table table(Config(2, 10));
  for (int step = 1; step <= 3; ++step) {
    const std::vector<int64_t> ids = table.Lookup({1}).ids;
    table.Apply("adam", {0.01, 0.9, 0.999, 1e-7}, ids, {1, 1}, step);
    table.Apply("adagrad", {0.5, 0.25, 1e-7}, ids, {1, 1});
  }
  table.Erase({1});
  const std::vector<int64_t> others = table.Lookup({7}).ids;  // takes the row of key 1, and leaves a stamp
  table.Apply("adam", {0.01, 0.9, 0.999, 1e-7}, others, {1, 1}, 4);
  table.Erase({7});
  const std::vector<int64_t> far = table.Lookup({8, 9}).ids;
  table.Apply("adam", {0.01, 0.9, 0.999, 1e-7}, far, {1, 1, 1, 1}, 5);
  table.Erase({8, 9});
  const ThreadExecutor executor(1);
  sok::Scratch scratch;
  const std::vector<uint64_t> keys = {2, 3};
  const std::vector<float> rows = {9, 9, 8, 8};
  CHECK_EQ(table.native().Restore({executor}, &scratch, {}, {keys.data(), rows.data(), {}, 2}), 2);
  const Collector all = ReadAll(&table);
  CHECK_EQ(all.found.size(), size_t{2});
  CHECK(all.found.at(2).row == (std::vector<float>{9, 9}));
  CHECK(all.found.at(3).row == (std::vector<float>{8, 8}));
  for (const uint64_t key : keys) {
    CHECK(all.found.at(key).slots[0] == (std::vector<float>{0, 0, 0, 0}));
    CHECK(all.found.at(key).slots[1] == (std::vector<float>{0.25f, 0.25f}));
  }
}

TEST(RowsOfManySegmentsAreReadInTheOrderInWhichTheyCame) {
  const ThreadExecutor executor(2);
  Table table(Config(1, 3000000), 2);
  std::vector<uint64_t> keys;
  for (uint64_t k = 0; k < 1200000; ++k) keys.push_back(k * 7919 % 1500000);
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  std::reverse(keys.begin(), keys.end());
  table.Lookup(keys);
  std::map<uint64_t, size_t> came;
  for (size_t i = 0; i < keys.size(); ++i) came[keys[i]] = i;
  struct Order : sok::EmbeddingTable::RowSink {
    int64_t Begin(int64_t, const std::vector<sok::EmbeddingTable::SlotSetInfo>&) override { return 4096; }
    sok::EmbeddingTable::RowTarget Allocate(int64_t n) override {
      const size_t before = read.size();
      read.resize(before + static_cast<size_t>(n));
      rows.resize(static_cast<size_t>(n));
      return {read.data() + before, rows.data(), {}};
    }
    void Commit() override {}
    std::vector<uint64_t> read;
    std::vector<float> rows;
  } order;
  table.native().ReadAll({executor}, &order);
  CHECK_EQ(order.read.size(), keys.size());
  size_t falls = 0;  // one where a segment of the index ends
  for (size_t i = 1; i < order.read.size(); ++i) falls += came.at(order.read[i]) < came.at(order.read[i - 1]);
  CHECK(falls > 0);
  CHECK(falls < 64);
}

TEST(WhatCannotBeRestoredLeavesTheTableAlone) {
  Table table(Config(3, 1000)), small(Config(3, 5)), identity(Config(3, 5, false)), lazy(Config(3, 1000));
  Train(&table, 10, 2);
  Collector saved = ReadAll(&table);
  small.Assign({1}, 4.0f);
  CHECK_THROWS(Restore(&small, saved), sok::TableFull, "all 5 rows are in use");
  CHECK_EQ(small.native().size(), 1);
  identity.Assign({1}, 4.0f);
  CHECK_THROWS(Restore(&identity, saved), sok::InvalidArgument, "key 6 is outside [0, 5)");
  CHECK_EQ(identity.native().size(), 1);
  saved.sets[0].name = "adagrad";
  saved.sets.pop_back();
  Train(&lazy, 1, 1);
  CHECK_THROWS(Restore(&lazy, saved), sok::InvalidArgument, "'adagrad' belongs to rule 'adagrad' here, and to 'adam'");
  CHECK_EQ(lazy.native().size(), 1);
}

TEST(SwappedTablesHoldEachOthersRows) {
  Table a(Config(3, 1000)), b(Config(3, 1000));
  Train(&a, 30, 3);
  b.Assign({7}, 2.0f);
  const Collector of_a = ReadAll(&a), of_b = ReadAll(&b);
  a.native().Swap(&b.native());
  CHECK(ReadAll(&a).found == of_b.found);
  CHECK(ReadAll(&b).found == of_a.found);
  CHECK_EQ(a.native().size(), 1);
  CHECK_EQ(b.native().SlotSets().size(), size_t{2});
  a.native().Swap(&a.native());
  CHECK(ReadAll(&a).found == of_b.found);
  // Both go on.
  Train(&a, 40, 2);
  CHECK_EQ(a.native().size(), 41);
}

TEST(AFullIdentityTableThatIsRestoredFirstOfAllHasItsKeysAsRowIds) {
  const std::vector<uint64_t> keys = {0, 1, 2, 3};
  Table saved(Config(2, 4, false)), restored(Config(2, 4, false)), used(Config(2, 4, false)), more(Config(2, 4, false));
  saved.Assign(keys, 2.0f);
  restored.native().Swap(&saved.native());
  CHECK(restored.Lookup(keys).ids == (std::vector<int64_t>{0, 1, 2, 3}));
  restored.Apply("sgd", {1.0}, {0, 1, 2, 3}, std::vector<float>(8, 1.0f));
  CHECK(restored.Lookup({3}, false).values == (std::vector<float>{1, 1}));
  // One that had rows before has given ids away, and must tell them from its new ones.
  const std::vector<int64_t> old = used.Lookup({1}).ids;
  more.Assign(keys, 3.0f);
  used.native().Swap(&more.native());
  CHECK(used.Lookup({1}).ids != old);
  used.Apply("sgd", {1.0}, old, {1, 1});
  CHECK(used.Lookup({1}, false).values == (std::vector<float>{3, 3}));
}

TEST(KeysAreReservedWithoutRecords) {
  const ThreadExecutor executor(2);
  Table keys_only(Config(64, 100000)), both(Config(64, 100000));
  keys_only.native().Reserve({executor}, 100000, /*rows=*/false);
  both.native().Reserve({executor}, 100000);
  CHECK(keys_only.native().memory_bytes() < both.native().memory_bytes() - 100000 * 64 * 4);
}

TEST(GradientsOfLookupsBeforeASwapAreIgnored) {
  Table a(Config(2, 100)), b(Config(2, 100));
  const std::vector<int64_t> old = a.Lookup({1, 2, 3}).ids;
  b.Assign({1}, 2.0f);
  a.native().Swap(&b.native());
  a.Apply("sgd", {1.0}, old, std::vector<float>(6, 1.0f));
  CHECK(a.Lookup({1}, false).values == (std::vector<float>{2, 2}));
  a.Apply("sgd", {1.0}, a.Lookup({1}).ids, {1, 1});
  CHECK(a.Lookup({1}, false).values == (std::vector<float>{1, 1}));
}

TEST(TablesOfOtherConfigurationsDoNotSwap) {
  Table a(Config(2, 100)), b(Config(3, 100)), c(Config(2, 101));
  CHECK_THROWS(a.native().Swap(&b.native()), sok::InvalidArgument, "configured differently");
  CHECK_THROWS(a.native().Swap(&c.native()), sok::InvalidArgument, "configured differently");
}
