#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "files.h"
#include "sok/error.h"
#include "sok/file_error.h"
#include "sok/row_changes.h"
#include "sok/shard_file.h"
#include "tables.h"

namespace {

const ThreadExecutor kThreads(3);
const std::vector<std::pair<std::string, std::string>> kAdam = {{"adam", "adam"}};

sok::ShardSummary Save(Table* table, const std::string& path, bool changes, const std::string& generation) {
  table->native().BeginSave();
  const auto save = changes ? sok::SaveShardChanges : sok::SaveShard;
  const sok::ShardSummary summary = save({kThreads}, table->native(), 8, generation, path);
  table->native().EndSave(generation);
  return summary;
}

sok::ShardSummary Load(Table* table, const std::string& path) {
  return sok::LoadShard({kThreads}, path, 8, kAdam, &table->native());
}

void Train(Table* table, const std::vector<uint64_t>& keys, int64_t step, float grad = 0.1f) {
  const std::vector<int64_t> ids = table->Lookup(keys).ids;
  const std::vector<float> grads(ids.size() * static_cast<size_t>(table->native().dim()), grad);
  table->Apply("adam", {0.01, 0.9, 0.999, 1e-7}, ids, grads, step);
}

// key -> row, m, v
std::map<uint64_t, std::vector<float>> Contents(Table* table) {
  std::map<uint64_t, std::vector<float>> contents;
  const int64_t dim = table->native().dim();
  for (const uint64_t key : table->native().Keys()) {
    std::vector<float>& values = contents[key] = table->Lookup({key}, false).values;
    if (table->native().SlotSets().empty()) continue;
    values.resize(static_cast<size_t>(3 * dim));
    int64_t stamp;
    table->native().Slots("adam", &key, 1, values.data() + dim, &stamp);
  }
  return contents;
}

bool Near(const std::map<uint64_t, std::vector<float>>& a, const std::map<uint64_t, std::vector<float>>& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [key, values] : a) {
    const auto other = b.find(key);
    if (other == b.end() || other->second.size() != values.size()) return false;
    for (size_t i = 0; i < values.size(); ++i)
      if (std::abs(values[i] - other->second[i]) > 1e-6f + 1e-5f * std::abs(values[i])) return false;
  }
  return true;
}

}  // namespace

TEST(ChangesOfASaveThatFailsAreNotForgotten) {
  sok::RowChanges changes;
  auto none = [](uint64_t) { return false; };
  changes.MakeRoom(100);  // off: no room is taken
  CHECK_EQ(changes.memory_bytes(), 0);
  changes.Begin(100, none);
  CHECK(changes.is_on() && changes.is_saving());
  changes.Mark(5);
  changes.End("a");
  CHECK_EQ(changes.base(), std::string("a"));
  changes.Mark(70);
  changes.MarkErased(9);
  changes.Begin(100, none);
  changes.Mark(3);
  changes.MarkErased(4);
  CHECK(changes.IsSaved(5) && changes.IsSaved(70) && !changes.IsSaved(3) && !changes.IsSaved(1000));
  CHECK_EQ(changes.saved_erased().size(), size_t{1});
  changes.End("");
  CHECK_EQ(changes.base(), std::string("a"));
  CHECK_EQ(changes.num_rows(), 3);
  changes.Begin(100, none);
  CHECK(changes.saved_erased() == std::vector<uint64_t>({4, 9}));
  changes.Begin(100, none);  // nobody ended the one before
  CHECK(changes.IsSaved(3) && changes.saved_erased() == std::vector<uint64_t>({4, 9}));
  changes.End("b");
  CHECK_EQ(changes.num_rows(), 0);
}

TEST(AFirstSaveThatFailsTurnsNotesOff) {
  sok::RowChanges changes;
  changes.Begin(100, [](uint64_t) { return false; });
  changes.Mark(5);
  changes.End("");
  CHECK(!changes.is_on());
  CHECK_EQ(changes.memory_bytes(), 0);
}

TEST(AKeyThatComesAndGoesIsNotedOnce) {
  sok::RowChanges changes;
  changes.Begin(1, [](uint64_t) { return false; });
  changes.End("a");
  for (int i = 0; i < 1000000; ++i) changes.MarkErased(static_cast<uint64_t>(i % 10));
  CHECK(changes.num_erased() < 200000);
  changes.Begin(1, [](uint64_t key) { return key < 7; });  // these have rows again
  CHECK(changes.saved_erased() == std::vector<uint64_t>({7, 8, 9}));
}

TEST(AChainIsTheTableAgain) {
  for (const bool hashed : {true, false}) {
    Folder folder;
    Table table(Config(3, 1000, hashed)), other(Config(3, 1000, hashed)), compacted(Config(3, 1000, hashed));
    std::vector<uint64_t> keys;
    for (uint64_t k = 0; k < 400; ++k) keys.push_back(k);
    table.Assign(keys, 1.0f);
    int64_t step = 0;
    Train(&table, keys, ++step);
    CHECK_EQ(Save(&table, folder / "0", false, "g0").rows, 400);
    std::vector<std::vector<std::string>> links = {{folder / "0"}};
    for (int link = 1; link <= 3; ++link) {
      keys.resize(keys.size() / 2);
      for (int i = 0; i < 5; ++i) Train(&table, keys, ++step, 0.1f * static_cast<float>(link));
      table.Erase({static_cast<uint64_t>(300 + link), static_cast<uint64_t>(link)});
      const std::string name = folder / std::to_string(link);
      const sok::ShardSummary saved = Save(&table, name, true, "g" + std::to_string(link));
      CHECK_EQ(saved.rows, static_cast<int64_t>(keys.size()) - 1);
      CHECK_EQ(saved.erased, 2);
      CHECK_EQ(saved.held, 400 - 2 * link);
      CHECK_EQ(saved.head.sets[0].num_missed(), 5);
      keys.erase(std::find(keys.begin(), keys.end(), static_cast<uint64_t>(link)));
      links.push_back({name});
    }
    for (const auto& link : links) Load(&other, link[0]);
    CHECK(Near(Contents(&other), Contents(&table)));
    for (const int64_t passes : {1, 3}) {
      sok::ShardHead head;
      head.generation = "g4";
      const sok::ShardSummary one = sok::CompactShards({kThreads}, links, head, passes, folder / "one");
      CHECK_EQ(one.rows, 394);
      CHECK_EQ(one.head.sets[0].calls, 16);
      CHECK(!sok::VerifyShard(folder / "one").head.is_delta);
      Table whole(Config(3, 1000, hashed));
      CHECK_EQ(Load(&whole, folder / "one").stored, 394);
      CHECK(Near(Contents(&whole), Contents(&table)));
    }
    // Rows that were not touched were not in the deltas: the steps alone have moved them.
    Table forgot(Config(3, 1000, hashed));
    Load(&forgot, folder / "0");
    CHECK(!Near({{350, Contents(&forgot)[350]}}, {{350, Contents(&table)[350]}}));
  }
}

// Two ranks that saved together took the same steps, or their files are of different saves.
TEST(FilesOfOneLinkThatDisagreeAreNotCompacted) {
  const Folder folder;
  std::vector<std::string> full, same, other;
  for (int rank = 0; rank < 2; ++rank) {
    sok::TableConfig config = Config(3, 100);
    config.world_size = 2;
    config.rank = rank;
    for (const bool disagrees : {false, true}) {
      Table table(config);
      const uint64_t key = static_cast<uint64_t>(rank);
      const std::string name = std::to_string(rank) + (disagrees ? "b" : "a");
      Train(&table, {key, key + 2}, 1);
      Save(&table, folder / ("full" + name), false, "g0");
      for (int step = 2; step < (disagrees && rank == 1 ? 5 : 4); ++step) Train(&table, {key}, step);
      Save(&table, folder / ("delta" + name), true, "g1");
      if (!disagrees) full.push_back(folder / ("full" + name));
      (disagrees ? other : same).push_back(folder / ("delta" + name));
    }
  }
  sok::ShardHead head;
  head.generation = "g2";
  CHECK_EQ(sok::CompactShards({kThreads}, {full, same}, head, 1, folder / "one").rows, 4);
  CHECK_THROWS(sok::CompactShards({kThreads}, {full, other}, head, 1, folder / "two"), sok::DamagedFile,
               "slot set 'adam' has other steps than in another file of the same save");
  CHECK(!Exists(folder / "two") && !Exists(folder / "two.tmp"));
}

// A stamp has 32 bits, and two of its values mean something else.
TEST(CallsAreCountedToTheEndOfTheirRoom) {
  Table table(Config(3, 100)), never(Config(3, 100));
  Train(&table, {1, 2}, 1);
  sok::EmbeddingTable::SlotSetInfo skipped = table.native().SlotSets()[0];
  skipped.calls = 4294967292;  // one is there already: 2^32 - 3 in all
  skipped.missed = {{1, 0.0f}};
  table.native().SkipCalls("g1", {skipped});
  CHECK_EQ(table.native().SlotSets()[0].calls, 4294967293);
  const auto before = Contents(&table);
  skipped.calls = 1;
  CHECK_THROWS(table.native().SkipCalls("g2", {skipped}), sok::InvalidArgument, "more than can be counted");
  CHECK(Contents(&table) == before);
  table.Lookup({1, 2, 3});  // a fresh row has missed none of them
  const auto after = Contents(&table);
  for (const auto& [key, values] : before)
    for (size_t i = 0; i < values.size(); ++i) CHECK(after.at(key)[i] == values[i] && std::isfinite(values[i]));
}

TEST(FilesOfOneSaveSkipItsCallsOnce) {
  Folder folder;
  Table table(Config(3, 100)), other(Config(3, 100));
  Train(&table, {1, 2, 3}, 1);
  Save(&table, folder / "0", false, "g0");
  Train(&table, {1}, 2);
  Save(&table, folder / "1", true, "g1");
  Load(&other, folder / "0");
  Load(&other, folder / "1");
  Load(&other, folder / "1");  // as a second rank's
  CHECK(Near(Contents(&other), Contents(&table)));
  CHECK_EQ(other.native().SlotSets()[0].calls, 1);
  auto sets = table.native().SlotSets();
  sets[0].missed = {{1, 0.5f}};
  CHECK_THROWS(other.native().SkipCalls("g1", sets), sok::InvalidArgument, "two files of the save g1 disagree");
  sets[0].rule.rule = sok::Rule::kLazyAdam;
  CHECK_THROWS(other.native().SkipCalls("g2", sets), sok::InvalidArgument, "belongs to rule 'adam' here");
  sets[0].rule.rule = sok::Rule::kAdam;
  sets[0].calls = int64_t{1} << 40;
  CHECK_THROWS(other.native().SkipCalls("g2", sets), sok::InvalidArgument, "more than can be counted");
}

TEST(ChangesNeedASaveBefore) {
  Folder folder;
  Table table(Config(3, 100));
  auto save = [&] { sok::SaveShardChanges({kThreads}, table.native(), 8, "g", folder / "a"); };
  CHECK_THROWS(save(), sok::FailedPrecondition, "no save that its changes could be counted from");
  table.native().BeginSave();
  CHECK_THROWS(save(), sok::FailedPrecondition, "no save that its changes could be counted from");
  CHECK(!Exists(folder / "a") && !Exists(folder / "a.tmp"));
  table.native().EndSave("g0");
  CHECK(table.native().Changes().is_on);
  Table other(Config(3, 100));
  table.native().Swap(&other.native());
  CHECK(!table.native().Changes().is_on);
}

TEST(ManyErasedKeysTakeSeveralBlocks) {
  Folder folder;
  Table table(Config(1, 700000)), other(Config(1, 700000));
  std::vector<uint64_t> keys(600000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 3;
  table.Assign(keys, 1.0f);
  Save(&table, folder / "0", false, "g0");
  table.Erase(keys);
  const sok::ShardSummary saved = Save(&table, folder / "1", true, "g1");
  CHECK_EQ(saved.erased, 600000);
  CHECK_EQ(sok::VerifyShard(folder / "1").erased, 600000);
  Load(&other, folder / "0");
  Load(&other, folder / "1");
  CHECK_EQ(other.native().size(), 0);
}

TEST(UpdatesMarkRowsFromManyThreads) {
  Folder folder;
  Table table(Config(4, 5000));
  std::vector<uint64_t> keys(4000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  table.Assign(keys, 1.0f);
  Save(&table, folder / "0", false, "g0");
  RunTogether(4, [&](int t) {
    for (int i = 0; i < 5; ++i) {
      std::vector<uint64_t> mine(keys.begin() + t * 900, keys.begin() + t * 900 + 950);
      table.Assign(mine, static_cast<float>(t));
      Train(&table, mine, 1);
      if (t == 0) Save(&table, folder / "1", true, "g1");
    }
  });
  CHECK(table.native().Changes().rows <= 3650);
  const sok::ShardSummary all = Save(&table, folder / "2", true, "g2");
  CHECK(all.rows <= 3650);
}
