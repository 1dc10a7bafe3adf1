// Rows and slots of named rules, out and in by row id (cpu/table_rows.cc).
#include <string>
#include <vector>

#include "check.h"
#include "collector.h"
#include "sok/error.h"
#include "tables.h"

namespace {

constexpr size_t kDim = 3;
const ThreadExecutor kThreads(3);
using Floats = std::vector<float>;

sok::UpdateRule Named(const std::string& name, const Floats& inits) {
  sok::UpdateRule rule;
  rule.rule = sok::ParseRule(name);
  std::copy(inits.begin(), inits.end(), rule.slot_inits);
  return rule;
}

const sok::UpdateRule kRmsprop = Named("named(velocity,momentum)", {0.5f, -2.0f});

struct Gathered {
  Floats rows, slots;
};

Gathered Gather(Table* table, const std::vector<int64_t>& ids, const sok::UpdateRule& rule = kRmsprop) {
  const size_t floats = kDim * static_cast<size_t>(rule.num_slots());
  Gathered got{Floats(ids.size() * kDim, 99.0f), Floats(ids.size() * floats, 99.0f)};
  table->native().Gather({kThreads}, rule, "set", ids.data(), static_cast<int64_t>(ids.size()), got.rows.data(),
                         got.slots.data());
  return got;
}

void Scatter(Table* table, const std::vector<int64_t>& ids, const Gathered& values,
             const sok::UpdateRule& rule = kRmsprop) {
  table->native().Scatter({kThreads}, rule, "set", ids.data(), static_cast<int64_t>(ids.size()), values.rows.data(),
                          values.slots.data());
}

Floats Counted(size_t n, float first) {
  Floats values(n);
  for (size_t i = 0; i < n; ++i) values[i] = first + static_cast<float>(i);
  return values;
}

// The fresh slots of n rows.
Floats Fresh(size_t n) {
  Floats slots(n * 2 * kDim, 0.5f);
  for (size_t i = 0; i < slots.size(); ++i)
    if (i % (2 * kDim) >= kDim) slots[i] = -2.0f;
  return slots;
}

}  // namespace

TEST(WhatIsScatteredIsGathered) {
  for (const bool hashed : {true, false}) {
    Table table(Config(kDim, 5000, hashed));
    std::vector<uint64_t> keys;
    for (uint64_t k = 0; k < 3000; ++k) keys.push_back(k);
    const Rows looked = table.Lookup(keys);
    const Gathered fresh = Gather(&table, looked.ids);
    CHECK(fresh.rows == looked.values);
    CHECK(fresh.slots == Fresh(keys.size()));

    const Gathered other{Counted(keys.size() * kDim, 1.0f), Counted(keys.size() * 2 * kDim, -7.0f)};
    Scatter(&table, looked.ids, other);
    CHECK(table.Lookup(keys, false).values == other.rows);
    const Gathered again = Gather(&table, looked.ids);
    CHECK(again.rows == other.rows);
    CHECK(again.slots == other.slots);

    // Some of them, in another order: the rest stays.
    Scatter(&table, {looked.ids[7], looked.ids[3]}, {Counted(2 * kDim, 100.0f), Counted(4 * kDim, 200.0f)});
    const Gathered some = Gather(&table, {looked.ids[3], looked.ids[4], looked.ids[7]});
    CHECK(some.rows == Floats({103, 104, 105, other.rows[12], other.rows[13], other.rows[14], 100, 101, 102}));
    CHECK_EQ(some.slots[0], 206.0f);
    CHECK_EQ(some.slots[6], other.slots[24]);
    CHECK_EQ(some.slots[12], 200.0f);
    // Rows that come later begin with fresh slots.
    CHECK(Gather(&table, table.Lookup({4000}).ids).slots == Fresh(1));
  }
}

TEST(IdsOfNoRowReadAsFreshAndAreNotWritten) {
  Table table(Config(kDim, 4));
  const std::vector<int64_t> ids = table.Lookup({1, 2, 3}).ids;
  table.Erase({2});
  const Floats newcomer = table.Lookup({9}).values;  // in the row that key 2 had
  const std::vector<int64_t> asked = {ids[1], -1, ids[2]};
  const Gathered got = Gather(&table, asked);
  Floats expected = table.Lookup({3}).values;
  expected.insert(expected.begin(), 6, 0.0f);
  CHECK(got.rows == expected);
  CHECK(got.slots == Fresh(3));
  Scatter(&table, asked, {Floats(9, 5.0f), Floats(18, 6.0f)});
  CHECK(table.Lookup({9}).values == newcomer);
  CHECK(table.Lookup({3}).values == Floats(3, 5.0f));
  CHECK(Gather(&table, table.Lookup({9}).ids).slots == Fresh(1));
  CHECK(Gather(&table, {ids[2]}).slots == Floats(6, 6.0f));
}

TEST(WhatCannotBeGatheredOrScatteredChangesNothing) {
  Table table(Config(kDim, 4000));
  const Rows looked = table.Lookup({1, 2});
  const Gathered values{Floats(6, 5.0f), Floats(12, 6.0f)};
  for (const int64_t bad : {int64_t{3}, int64_t{1} << 32, (int64_t{1} << 32) - 1}) {
    const std::vector<int64_t> ids = {looked.ids[0], bad};
    CHECK_THROWS(Gather(&table, ids), sok::InvalidArgument, "row id " + std::to_string(bad));
    CHECK_THROWS(Scatter(&table, ids, values), sok::InvalidArgument, "which this shard does not have");
    CHECK(table.native().SlotSets().empty());
    CHECK(table.Lookup({1, 2}).values == looked.values);
  }
  Gather(&table, looked.ids);
  const sok::UpdateRule other = Named("Ftrl(accumulator,linear)", {0.1f, 0.0f});
  CHECK_THROWS(Gather(&table, looked.ids, other), sok::InvalidArgument, "slot set 'set' belongs to another rule");
  CHECK_THROWS(Scatter(&table, looked.ids, values, other), sok::InvalidArgument,
               "slot set 'set' belongs to another rule");
  CHECK(table.Lookup({1, 2}).values == looked.values);
}

// An exact Adam owes steps to rows: they are gathered as they stand after all of them, and go on from what is scattered.
TEST(MissedStepsAreTakenBeforeRowsAreGathered) {
  Table table(Config(kDim, 10)), same(Config(kDim, 10));
  for (Table* each : {&table, &same}) {
    const std::vector<int64_t> ids = each->Lookup({1, 2}).ids;
    each->Apply("adam", {0.1, 0.9, 0.999, 1e-7}, ids, Floats(6, 1.0f), 1);
    for (int step = 2; step < 9; ++step) each->Apply("adam", {0.1, 0.9, 0.999, 1e-7}, {ids[0]}, Floats(3, 1.0f), step);
  }
  const Floats expected = same.Lookup({2}, false).values;
  const std::vector<int64_t> ids = {1};
  const Gathered got = Gather(&table, ids);
  CHECK(got.rows == expected);
  Scatter(&table, ids, {Floats(3, 4.0f), got.slots});
  CHECK(table.Lookup({2}, false).values == Floats(3, 4.0f));  // nothing is owed to the new weights
}

TEST(ScatteredRowsBelongToTheNextSave) {
  Table table(Config(kDim, 10));
  const std::vector<int64_t> ids = table.Lookup({1, 2, 3}).ids;
  Gather(&table, ids);
  table.native().BeginSave();
  table.native().EndSave("g0");
  Gather(&table, ids);
  CHECK_EQ(table.native().Changes().rows, 0);
  table.native().BeginSave(sok::TableStore::SnapshotOf::kAllRows);
  const Floats before = table.Lookup({2}).values;
  Scatter(&table, {ids[1], -1}, {Floats(6, 5.0f), Floats(12, 6.0f)});
  CHECK_EQ(table.native().Changes().rows, 1);
  Collector read(kDim, 7);
  table.native().ReadSnapshot({kThreads}, &read);
  CHECK(read.found.at(2).row == before);
  CHECK(read.found.at(2).slots.at(0) == Fresh(1));
  table.native().EndSave("g1");
  CHECK_EQ(table.native().Changes().rows, 1);
}

TEST(RowsAreGatheredWhole) {
  Table table(Config(kDim, 100), 2);
  std::vector<uint64_t> keys;
  for (uint64_t k = 0; k < 64; ++k) keys.push_back(k);
  const std::vector<int64_t> ids = table.Lookup(keys).ids;
  Scatter(&table, ids, {Floats(64 * kDim, 1.0f), Floats(128 * kDim, 1.0f)});
  RunTogether(4, [&](int t) {
    for (int step = 0; step < 20; ++step) {
      const float value = static_cast<float>(t * 100 + step);
      if (t < 2) {
        Scatter(&table, ids, {Floats(64 * kDim, value), Floats(128 * kDim, value)});
      } else {
        const Gathered got = Gather(&table, ids);
        CHECK(got.rows == Floats(64 * kDim, got.rows[0]));
        CHECK(got.slots == Floats(128 * kDim, got.rows[0]));
        CHECK_EQ(table.Lookup(keys, false).values.size(), 64 * kDim);
      }
    }
  });
}
