#include "sok/shard_file.h"

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "files.h"
#include "shards.h"
#include "sok/error.h"
#include "sok/file_error.h"

namespace {

// key -> row, m, v, accumulator
std::map<uint64_t, std::vector<float>> Contents(Table* table) {
  std::map<uint64_t, std::vector<float>> contents;
  std::vector<uint64_t> keys;
  std::vector<float> rows;
  table->native().Export({kThreads}, "", [&](int64_t n, int64_t) {
    keys.resize(static_cast<size_t>(n));
    rows.resize(static_cast<size_t>(n) * 3);
    return sok::EmbeddingTable::ExportTarget{keys.data(), rows.data(), nullptr, nullptr};
  });
  for (size_t i = 0; i < keys.size(); ++i)
    contents[keys[i]].assign(rows.begin() + static_cast<long>(3 * i), rows.begin() + static_cast<long>(3 * i + 3));
  for (const auto& set : table->native().SlotSets()) {
    const int64_t floats = table->native().SlotFloats(set.name);
    std::vector<float> slots(static_cast<size_t>(floats));
    int64_t stamp;
    for (auto& [key, values] : contents) {
      table->native().Slots(set.name, &key, 1, slots.data(), &stamp);
      values.insert(values.end(), slots.begin(), slots.end());
    }
  }
  return contents;
}

}  // namespace

TEST(ALoadedTableHoldsWhatTheSavedOneHeld) {
  for (const bool hashed : {true, false}) {
    const Folder folder;
    Table table(Shard(0, 1, 6000, hashed)), other(Shard(0, 1, 7000, hashed));
    Train(&table, 1000);
    const sok::ShardSummary saved = Save(&table, folder / "a");
    CHECK_EQ(saved.rows, 1000);
    CHECK_EQ(saved.bytes, static_cast<int64_t>(ReadFile(folder / "a").size()));
    const sok::ShardSummary loaded = Load(&other, folder / "a");
    CHECK_EQ(loaded.rows, 1000);
    CHECK_EQ(loaded.stored, 1000);
    CHECK_EQ(loaded.digest, saved.digest);
    CHECK_EQ(loaded.head.sets[0].calls, 3);
    CHECK(Contents(&other) == Contents(&table));
    CHECK_EQ(sok::VerifyShard(folder / "a").digest, saved.digest);
  }
}

TEST(ManyBlocksAreOneTable) {
  const Folder folder;
  sok::TableConfig config = Config(3, 1000);
  config.dim = 40000;  // 160 KB a row: 26 rows a block
  Table table(config), other(config);
  std::vector<uint64_t> keys;
  for (uint64_t k = 0; k < 100; ++k) keys.push_back(k);
  table.Lookup(keys);
  Save(&table, folder / "a");
  CHECK_EQ(Load(&other, folder / "a").stored, 100);
  CHECK(other.Lookup(keys, false).values == table.Lookup(keys, false).values);
}

TEST(ARowLongerThanABlockIsSavedToo) {
  const Folder folder;
  sok::TableConfig config = Config(3, 10);
  config.dim = int64_t{1} << 20;
  Table table(config), other(config);
  table.Lookup({1, 2});
  Save(&table, folder / "a");
  CHECK_EQ(Load(&other, folder / "a").stored, 2);
  CHECK(other.Lookup({2}, false).values == table.Lookup({2}, false).values);
}

TEST(AnEmptyTableIsSavedToo) {
  const Folder folder;
  Table table(Shard(0, 1)), other(Shard(0, 1));
  CHECK_EQ(Save(&table, folder / "a").rows, 0);
  CHECK_EQ(Load(&other, folder / "a").rows, 0);
  CHECK_EQ(other.native().size(), 0);
}

TEST(AnyWorldSizeBecomesAnyOther) {
  const Folder folder;
  for (int from = 1; from <= 3; ++from) {
    std::map<uint64_t, std::vector<float>> saved, loaded;
    for (int rank = 0; rank < from; ++rank) {
      Table table(Shard(rank, from));
      Train(&table, 200);
      Save(&table, folder / std::to_string(rank));
      saved.merge(Contents(&table));
    }
    CHECK_EQ(saved.size(), size_t{200});
    for (int to = 1; to <= 4; ++to) {
      loaded.clear();
      for (int rank = 0; rank < to; ++rank) {
        Table table(Shard(rank, to));
        for (int file = 0; file < from; ++file) Load(&table, folder / std::to_string(file));
        loaded.merge(Contents(&table));
      }
      CHECK(loaded == saved);
    }
  }
}

TEST(SlotSetsMayBeRenamedAndLeftOut) {
  const Folder folder;
  Table table(Shard(0, 1)), other(Shard(0, 1)), bare(Shard(0, 1));
  Train(&table, 20);
  Save(&table, folder / "a");
  Load(&other, folder / "a", {{"adagrad", "mine"}, {"unknown", "x"}});
  CHECK_EQ(other.native().SlotSets().size(), size_t{1});
  CHECK_EQ(other.native().SlotSets()[0].name, std::string("mine"));
  std::vector<float> a(3), b(3);
  int64_t stamp;
  const uint64_t key = 15;
  table.native().Slots("adagrad", &key, 1, a.data(), &stamp);
  other.native().Slots("mine", &key, 1, b.data(), &stamp);
  CHECK(a == b);
  Load(&bare, folder / "a", {});
  CHECK_EQ(bare.native().SlotSets().size(), size_t{0});
  CHECK_EQ(bare.native().size(), 20);
}

// What a file says of a rule that it does not know are its slots, their beginnings and its name.
TEST(NamedRulesAreSavedAndGoOn) {
  const Folder folder;
  Table table(Shard(0, 1)), other(Shard(0, 1)), renamed(Shard(0, 1));
  UseNamedRule(&table, {1, 2, 3});
  Save(&table, folder / "a");
  CHECK_EQ(Load(&other, folder / "a", {{"rmsprop", "rmsprop"}}).stored, 3);
  CHECK(Contents(&other) == Contents(&table));
  const sok::TableStore::SlotSetInfo set = other.native().SlotSets().at(0);
  CHECK_EQ(std::string(sok::RuleName(set.rule.rule)), std::string(kNamedRule));
  CHECK_EQ(set.rule.slot_inits[0], 0.5f);
  CHECK_EQ(set.rule.slot_inits[1], -2.0f);
  // A row that comes later has slots that begin as those did.
  other.Lookup({9});
  CHECK(Contents(&other)[9].size() == 9 && Contents(&other)[9][3] == 0.5f && Contents(&other)[9][8] == -2.0f);
  Save(&other, folder / "b");
  CHECK_EQ(Load(&renamed, folder / "b", {{"rmsprop", "mine"}}).stored, 4);
  CHECK(Contents(&renamed) == Contents(&other));
  CHECK_EQ(renamed.native().SlotSets().at(0).name, std::string("mine"));

  Table taken(Shard(0, 1));
  Train(&taken, 4);
  CHECK_THROWS(Load(&taken, folder / "a", {{"rmsprop", "adagrad"}}), sok::InvalidArgument, kNamedRule);
  CHECK_EQ(taken.native().size(), 4);
}

TEST(NothingIsWrittenThatNoReaderWouldTake) {
  const Folder folder;
  sok::Scratch scratch;
  Table table(Shard(0, 1)), wide(Config(int64_t{1} << 20, 10));
  auto attach = [&](Table* to, const std::string& set) {
    const double hyper[] = {0.01, 0.9, 0.999, 1e-7};
    ApplyTo({kThreads}, &scratch, &to->native(), sok::MakeUpdateRule("lazy_adam", hyper, 4, 1), set,
            sok::Nonfinite::kAllow, nullptr, nullptr, 0);
  };
  auto refuses = [&](Table* from, const std::string& generation, const std::string& why) {
    CHECK_THROWS(sok::SaveShard({kThreads}, from->native(), 8, generation, folder / "a"), sok::InvalidArgument, why);
    CHECK(!Exists(folder / "a") && !Exists(folder / "a.tmp"));
  };
  refuses(&table, std::string(70000, 'g'), "the generation has 70000 bytes");
  attach(&table, std::string(70000, 's'));
  refuses(&table, "g1", "a slot set's name has 70000 bytes");
  for (char set = 'a'; set < 'i'; ++set) attach(&wide, std::string(1, set));
  refuses(&wide, "g1", "rows of 71303176 bytes with their slots");
  Table many(Shard(0, 1));
  for (int set = 0; set < 70; ++set) attach(&many, std::string(65000, static_cast<char>(set + 1)));
  refuses(&many, "g1", "its names and steps have");
}

TEST(TablesThatDoNotFitAreRefused) {
  const Folder folder;
  Table table(Shard(0, 1));
  Train(&table, 20);
  Save(&table, folder / "a");
  Table narrow(Config(2, 100)), small(Shard(0, 1, 7)), identity(Shard(0, 1, 50, false)), right(Shard(0, 1));
  CHECK_THROWS(Load(&narrow, folder / "a"), sok::InvalidArgument, "its rows have dim 2, those in " + folder.path());
  CHECK_THROWS(Load(&small, folder / "a"), sok::TableFull, "all 7 rows are in use");
  CHECK_THROWS(Load(&identity, folder / "a"), sok::InvalidArgument, "is outside [0, 50)");
  CHECK_THROWS(Load(&right, folder / "a", {}, 4), sok::InvalidArgument, "its keys are int32, those in");
}

TEST(ASummaryIsJson) {
  const Folder folder;
  Table table(Shard(1, 2));
  table.Assign({1}, 1.0f);
  const std::string json = sok::ShardSummaryJson(Save(&table, folder / "a"));
  CHECK(json.find("\"table\": \"item\", \"generation\": \"g1\", \"dim\": 3, \"key_dtype\": \"int64\"") !=
        std::string::npos);
  CHECK(json.find("\"rank\": 1, \"owner\": -1, \"rows\": 1") != std::string::npos);
}
