// Rows out and in by row id (cpu/table_rows.cc).
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

Floats Gather(Table* table, const std::vector<int64_t>& ids) {
  Floats rows(ids.size() * kDim, 99.0f);
  table->native().Gather({kThreads}, ids.data(), static_cast<int64_t>(ids.size()), rows.data());
  return rows;
}

void Scatter(Table* table, const std::vector<int64_t>& ids, const Floats& rows) {
  table->native().Scatter({kThreads}, ids.data(), static_cast<int64_t>(ids.size()), rows.data());
}

Floats Counted(size_t n, float first) {
  Floats values(n);
  for (size_t i = 0; i < n; ++i) values[i] = first + static_cast<float>(i);
  return values;
}

}  // namespace

TEST(WhatIsScatteredIsGathered) {
  for (const bool hashed : {true, false}) {
    Table table(Config(kDim, 5000, hashed));
    std::vector<uint64_t> keys;
    for (uint64_t k = 0; k < 3000; ++k) keys.push_back(k);
    const Rows looked = table.Lookup(keys);
    CHECK(Gather(&table, looked.ids) == looked.values);

    const Floats other = Counted(keys.size() * kDim, 1.0f);
    Scatter(&table, looked.ids, other);
    CHECK(table.Lookup(keys, false).values == other);
    // Some of them, in another order: the rest stays.
    Scatter(&table, {looked.ids[7], looked.ids[3]}, Counted(2 * kDim, 100.0f));
    const Floats some = Gather(&table, {looked.ids[3], looked.ids[4], looked.ids[7]});
    CHECK(some == Floats({103, 104, 105, other[12], other[13], other[14], 100, 101, 102}));
  }
}

TEST(IdsOfNoRowReadAsZerosAndAreNotWritten) {
  Table table(Config(kDim, 4));
  const std::vector<int64_t> ids = table.Lookup({1, 2, 3}).ids;
  table.Erase({2});
  const Floats newcomer = table.Lookup({9}).values;  // in the row that key 2 had
  const std::vector<int64_t> asked = {ids[1], -1, ids[2]};
  Floats expected = table.Lookup({3}).values;
  expected.insert(expected.begin(), 6, 0.0f);
  CHECK(Gather(&table, asked) == expected);
  Scatter(&table, asked, Floats(9, 5.0f));
  CHECK(table.Lookup({9}).values == newcomer);
  CHECK(table.Lookup({3}).values == Floats(3, 5.0f));
}

TEST(WhatCannotBeGatheredOrScatteredChangesNothing) {
  Table table(Config(kDim, 4000));
  const Rows looked = table.Lookup({1, 2});
  for (const int64_t bad : {int64_t{3}, int64_t{1} << 32, (int64_t{1} << 32) - 1}) {
    const std::vector<int64_t> ids = {looked.ids[0], bad};
    CHECK_THROWS(Gather(&table, ids), sok::InvalidArgument, "row id " + std::to_string(bad));
    CHECK_THROWS(Scatter(&table, ids, Floats(6, 5.0f)), sok::InvalidArgument, "which this shard does not have");
    CHECK(table.Lookup({1, 2}).values == looked.values);
  }
}

// An exact Adam owes steps to rows: they are gathered as they stand after all of them, and go on from what is scattered.
TEST(MissedStepsAreTakenBeforeRowsAreGathered) {
  Table table(Config(kDim, 10)), same(Config(kDim, 10));
  for (Table* each : {&table, &same}) {
    const std::vector<int64_t> ids = each->Lookup({1, 2}).ids;
    each->Apply("adam", {0.1, 0.9, 0.999, 1e-7}, ids, Floats(6, 1.0f), 1);
    for (int step = 2; step < 9; ++step) each->Apply("adam", {0.1, 0.9, 0.999, 1e-7}, {ids[0]}, Floats(3, 1.0f), step);
  }
  CHECK(Gather(&table, {1}) == same.Lookup({2}, false).values);
  Scatter(&same, {1}, Floats(3, 4.0f));
  CHECK(same.Lookup({2}, false).values == Floats(3, 4.0f));  // nothing is owed to the new weights
}

TEST(ScatteredRowsBelongToTheNextSave) {
  Table table(Config(kDim, 10));
  const std::vector<int64_t> ids = table.Lookup({1, 2, 3}).ids;
  table.native().BeginSave();
  table.native().EndSave("g0");
  Gather(&table, ids);
  CHECK_EQ(table.native().Changes().rows, 0);
  table.native().BeginSave(sok::TableStore::SnapshotOf::kAllRows);
  const Floats before = table.Lookup({2}).values;
  Scatter(&table, {ids[1], -1}, Floats(6, 5.0f));
  CHECK_EQ(table.native().Changes().rows, 1);
  Collector read(kDim, 7);
  table.native().ReadSnapshot({kThreads}, &read);
  CHECK(read.found.at(2).row == before);
  table.native().EndSave("g1");
  CHECK_EQ(table.native().Changes().rows, 1);
}
