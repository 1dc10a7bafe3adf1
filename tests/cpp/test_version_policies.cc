// Versions of tables with admission and eviction: what every one of them holds, histories too, whatever was counted, admitted or
// evicted since.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "version_tables.h"

namespace {

constexpr int64_t kDim = 4, kCapacity = 9000;
constexpr uint64_t kKeys = 2500;

struct Case {
  std::string name;
  sok::Policies policies;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  auto add = [&](const std::string& name) {
    cases.push_back({name, {}});
    return &cases.back().policies;
  };
  sok::Policies* policies = add("counted");
  policies->after = 2;
  policies->older_than = 12;
  policies->every = 3;
  policies = add("filter");
  policies->after = 2;
  policies->bloom_cells = 8;
  policies->bloom_hashes = 3;
  policies->older_than = 9;
  policies = add("shared");
  policies->after = 3;
  policies->shared_rows = 4096;
  policies->norm_below = 0.3f;
  policies->every = 4;
  policies = add("chance");
  policies->admit_below = UINT64_MAX / 2;
  policies->older_than = 10;
  policies = add("full");
  policies->max_rows = 4096;
  policies->when_full = true;
  policies->keeps_frequent = true;
  policies->half_life = 5;
  return cases;
}

sok::TableConfig ConfigOf(const Case& one, const std::string& folder) {
  sok::TableConfig config = Config(kDim, kCapacity);
  config.policies = one.policies;
  if (!folder.empty()) config.storage = {int64_t{16} << 20, folder};
  return config;
}

// The steps of a program: the same for the same numbers. Some look up and train nothing, some assign, some erase.
void Step(Table* table, unsigned seed, int64_t number) {
  std::mt19937 random(seed * 1000003u + static_cast<unsigned>(number));
  std::vector<uint64_t> keys(1 + random() % 400);
  for (uint64_t& key : keys)
    key = random() % 3 == 0 ? random() % kKeys
                            : random() % (kKeys / 10) + kKeys / 100 * 3 * (static_cast<uint64_t>(number) / 10 % 8);
  const std::vector<uint64_t> some(keys.begin(), keys.begin() + static_cast<long>(1 + keys.size() / 8));
  const auto what = random() % 8;
  if (what == 0) table->Erase(some);
  if (what == 1) table->Assign(some, static_cast<float>(random() % 100) / 100.0f);
  if (what == 2) table->Lookup(some, false);
  if (what == 3)
    table->LookupCombine(keys, {0, static_cast<int64_t>(keys.size())});  // one segment, of more rows than memory has
  if (what > 2) {
    const auto ids = table->Lookup(keys).ids;
    if (what > 4) {
      std::vector<float> grads(ids.size() * kDim);
      for (float& g : grads) g = static_cast<float>(static_cast<int>(random() % 201) - 100) / 100.0f;
      // Slots that widen the records, and a rule that moves rows without gradients.
      const std::string rule = number > 20 && random() % 2 == 0 ? "adam" : "adagrad";
      table->Apply(rule, HyperOf(rule, 0.05), ids, grads, number);
    }
  }
  table->native().EndStep({kThreads});
}

std::vector<sok::RowHistory> Histories(Table* table) {
  std::vector<uint64_t> keys(kKeys);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::vector<sok::RowHistory> histories(kKeys);
  table->native().Histories(keys.data(), static_cast<int64_t>(kKeys), histories.data());
  return histories;
}

bool Same(const std::vector<sok::RowHistory>& a, const std::vector<sok::RowHistory>& b) {
  return std::equal(a.begin(), a.end(), b.begin(),
                    [](const auto& x, const auto& y) { return x.count == y.count && x.last == y.last; });
}

}  // namespace

TEST(EveryVersionHoldsTheHistoriesOfItsStep) {
  const Small small;
  for (const Case& one : Cases()) {
    for (unsigned seed = 1; seed <= (4 + kLess - 1) / kLess; ++seed) {
      const Folder logs, shards;
      Table table(ConfigOf(one, logs.path())), twin(ConfigOf(one, ""));
      table.native().KeepVersions();
      std::map<int64_t, AllRows> kept;
      std::thread writer;
      int64_t version = 0;
      bool has_failed = false;
      auto join = [&] {
        if (writer.joinable()) writer.join();
        if (has_failed) kept.erase(version);
        has_failed = false;
      };
      size_t most_gone = 0;
      for (int64_t number = 1; number <= (kLess > 1 ? 70 : 200); ++number) {
        Step(&table, seed, number);
        Step(&twin, seed, number);
        if (number % 9 != 0) continue;
        join();
        ++version;
        kept[version] = Contents(&twin.native());
        table.native().BeginSave(sok::TableStore::SnapshotOf::kVersion);
        writer = std::thread([&, version] {
          try {
            WriteBegun(&table, ShardOf(shards.path(), version), version);
          } catch (const sok::FileError& error) {  // other slots came, which begin a new log
            CHECK(std::string(error.what()).find("other slots") != std::string::npos);
            has_failed = true;
          }
        });
        if (version < 5) continue;
        kept.erase(version - 4);
        unlink(ShardOf(shards.path(), version - 4).c_str());
        const auto some = kept.find(version - 1 - static_cast<int64_t>(seed % 3));
        if (some == kept.end()) continue;
        Table fresh(Config(kDim, kCapacity));
        LoadAll(ShardOf(shards.path(), some->first), &fresh);
        CHECK(Contents(&fresh.native()) == some->second);
        size_t gone = 0;
        for (const auto& [key, row] : some->second) gone += kept[version].count(key) == 0;
        most_gone = std::max(most_gone, gone);
      }
      join();
      CHECK(kept.size() >= 4);
      CHECK(most_gone > 0);  // rows that left after the mark are in the version
      for (const auto& [number, rows] : kept) {
        Table fresh(ConfigOf(one, ""));
        LoadAll(ShardOf(shards.path(), number), &fresh);
        CHECK(Contents(&fresh.native()) == rows);
      }
      CHECK(Contents(&table.native()) == Contents(&twin.native()));
      CHECK(Same(Histories(&table), Histories(&twin)));
      const sok::PolicyCounts counts = table.native().policy_counts(), expected = twin.native().policy_counts();
      CHECK_EQ(counts.made, expected.made);
      CHECK_EQ(counts.refused, expected.refused);
      CHECK_EQ(counts.evicted, expected.evicted);
      CHECK_EQ(counts.candidates, expected.candidates);
      CHECK(counts.evicted > 0);
    }
  }
}

TEST(RowsThatAreOnlyCountedAreWrittenAnew) {
  const Folder logs, shards;
  sok::TableConfig config = Config(kDim, kCapacity);
  config.policies.older_than = 100;
  config.storage = {int64_t{16} << 20, logs.path()};
  Table table(config);
  table.native().KeepVersions();
  std::vector<uint64_t> keys(1000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  table.Lookup(keys);
  table.native().EndStep({kThreads});
  Save(&table, shards / "v1", 1);
  const int64_t first = table.native().storage_counts().written_bytes;
  table.Lookup(keys, false);  // counts nothing
  Save(&table, shards / "v2", 2);
  CHECK_EQ(table.native().storage_counts().written_bytes, first);
  table.Lookup({5, 6, 7});
  table.Lookup({5, 6, 7});
  table.native().EndStep({kThreads});
  Save(&table, shards / "v3", 3);
  CHECK_EQ(table.native().storage_counts().written_bytes - first, 4096);  // one block
  CHECK(ReadFile(shards / "v3").size() < 1000);
  for (const auto& [name, count, last] : {std::tuple{"v2", 1u, 1u}, std::tuple{"v3", 2u, 2u}}) {
    Table fresh(config);
    LoadAll(shards / name, &fresh);
    sok::RowHistory history;
    const uint64_t key = 6;
    fresh.native().Histories(&key, 1, &history);
    CHECK_EQ(history.count, count);
    CHECK_EQ(history.last, last);
  }
}

TEST(ADamagedRowAgesAndKeepsNobodyFromAging) {
  const Small small;
  const Folder logs, shards;
  sok::TableConfig config = Config(kDim, kCapacity);
  config.policies.older_than = 3;
  config.policies.every = 2;
  config.storage = {int64_t{16} << 20, logs.path()};
  Table table(config);
  table.native().KeepVersions();
  std::vector<uint64_t> keys(600);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  table.Assign(keys, 1.0f);
  table.Assign({2}, 2.5f);
  table.Assign(std::vector<uint64_t>(keys.begin() + 100, keys.end()), 3.0f);  // 2 leaves memory
  Save(&table, shards / "v1", 1);
  const std::string log = sok::VerifyShard(shards / "v1").head.log.path, bytes = ReadFile(log);
  const std::vector<float> row(kDim, 2.5f);
  const size_t at = bytes.find(std::string(reinterpret_cast<const char*>(row.data()), kDim * sizeof(float)));
  CHECK(at != std::string::npos);
  const int file = open(log.c_str(), O_WRONLY);
  CHECK_EQ(pwrite(file, "x", 1, static_cast<off_t>(at)), 1);
  close(file);
  for (int step = 0; step < 2; ++step) table.native().EndStep({kThreads});
  for (const sok::RowHistory& history : {Histories(&table)[2], Histories(&table)[7], Histories(&table)[599]})
    CHECK_EQ(history.last, 2u);
  CHECK_THROWS(table.Lookup({2}, false), sok::DamagedFile, "key 2");
  CHECK_THROWS(LoadAll(shards / "v1", std::make_unique<Table>(config).get()), sok::DamagedFile,
               "Restore another version");
  for (int step = 0; step < 4; ++step) table.native().EndStep({kThreads});
  CHECK_EQ(table.native().size(), 0);  // the damaged one leaves with the others
  CHECK_THROWS(Save(&table, shards / "v2", 2), sok::FailedPrecondition, "has lost a row to damage");
}
