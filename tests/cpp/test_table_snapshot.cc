// Saving beside training. Run with the thread sanitizer, too.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collector.h"
#include "files.h"
#include "sok/error.h"
#include "sok/shard_file.h"
#include "tables.h"

using sok::EmbeddingTable;
using Of = EmbeddingTable::SnapshotOf;

namespace {

const ThreadExecutor kThreads(3);
const sok::SerialExecutor kAlone;

AllRows Everything(Table* table) {
  Collector all(table->native().dim(), 100);
  table->native().ReadAll({kThreads}, &all);
  return all.found;
}

void Train(Table* table, const std::vector<uint64_t>& keys, int64_t step, const std::string& rule = "adam") {
  const std::vector<int64_t> ids = table->Lookup(keys).ids;
  const std::vector<float> grads(ids.size() * static_cast<size_t>(table->native().dim()), 0.1f);
  const std::vector<double> hyper =
      rule == "adagrad" ? std::vector<double>{0.01, 0.1, 1e-7} : std::vector<double>{0.01, 0.9, 0.999, 1e-7};
  table->Apply(rule, hyper, ids, grads, step);
}

std::vector<uint64_t> Range(uint64_t begin, uint64_t end) {
  std::vector<uint64_t> keys;
  for (uint64_t k = begin; k < end; ++k) keys.push_back(k);
  return keys;
}

}  // namespace

TEST(ASnapshotIsTheTableOfThatMomentWhateverIsDoneAfterwards) {
  for (const bool hashed : {true, false}) {
    for (const std::string rule : {"adagrad", "adam"}) {
      Table table(Config(3, 600, hashed));
      table.Assign(Range(0, 300), 1.0f);
      Train(&table, Range(0, 200), 1, rule);
      Train(&table, Range(0, 50), 2, rule);
      table.Erase(Range(10, 20));  // their row numbers are free now
      const AllRows before = Everything(&table);
      table.native().BeginSave(Of::kAllRows);
      std::mt19937 random(5);
      int64_t step = 2;
      Collector read(3, 7, [&] {
        const uint64_t from = random() % 290;
        Train(&table, Range(from, from + 10), ++step, rule);  // makes rows of those that were erased, too
        table.Assign(Range(400, 405), 2.0f);
        table.Erase({random() % 300, random() % 300, 400});
        table.Assign({random() % 300}, 3.0f);
      });
      table.native().ReadSnapshot({kThreads}, &read);
      CHECK_EQ(read.expected, 290);
      CHECK(read.found == before);
      CHECK(Everything(&table) != before);
      CHECK(table.native().Changes().copied_bytes > 0);
      table.native().EndSave("g1");
      CHECK_EQ(table.native().Changes().copied_bytes, 0);
    }
  }
}

TEST(ASlotSetThatComesDuringASaveIsNotOfIt) {
  Table table(Config(3, 100));
  table.Assign(Range(0, 50), 1.0f);
  const AllRows before = Everything(&table);
  table.native().BeginSave(Of::kAllRows);
  Train(&table, Range(0, 20), 1);
  Collector read(3, 7, [&] { Train(&table, Range(20, 30), 2, "adagrad"); });
  table.native().ReadSnapshot({kThreads}, &read);
  CHECK_EQ(read.sets.size(), size_t{0});
  CHECK(read.found == before);
  table.native().EndSave("g1");
  CHECK_EQ(table.native().Changes().rows, 30);
}

TEST(ASnapshotOfChangesHoldsThoseAlone) {
  Table table(Config(3, 1000));
  table.Assign(Range(0, 500), 1.0f);
  Train(&table, Range(0, 500), 1);
  table.native().BeginSave();
  Everything(&table);
  table.native().EndSave("g0");
  Train(&table, Range(100, 130), 2);
  Train(&table, Range(120, 140), 3);
  table.Erase({100, 499});
  const AllRows before = Everything(&table);
  table.native().BeginSave(Of::kChanges);
  int64_t step = 3;
  Collector read(3, 4, [&] {
    Train(&table, Range(90, 135), ++step);
    table.Erase({139});
  });
  table.native().ReadSnapshot({kThreads}, &read);
  CHECK(read.erased == std::vector<uint64_t>({100, 499}));
  CHECK_EQ(read.found.size(), size_t{39});
  for (const auto& [key, row] : read.found) CHECK(before.at(key) == row);
  CHECK_EQ(read.sets[0].num_missed(), 2);
  CHECK_EQ(read.sets[0].calls, 3);
  table.native().EndSave("g1");
  const auto after = table.native().Changes();
  CHECK_EQ(after.base, std::string("g1"));
  CHECK_EQ(after.sets[0].num_missed(), step - 3);
}

TEST(AFailedSnapshotForgetsNothing) {
  Table table(Config(3, 100));
  table.Assign(Range(0, 50), 1.0f);
  table.native().BeginSave();
  table.native().EndSave("g0");
  table.Assign(Range(0, 5), 2.0f);
  table.native().BeginSave(Of::kChanges);
  table.Assign({7}, 2.0f);
  table.native().EndSave("");
  CHECK_EQ(table.native().Changes().rows, 6);
  CHECK_EQ(table.native().Changes().base, std::string("g0"));
}

TEST(MisuseIsTold) {
  Table table(Config(3, 100)), other(Config(3, 100));
  Collector read(3, 7);
  auto read_it = [&] { table.native().ReadSnapshot({kThreads}, &read); };
  CHECK_THROWS(read_it(), sok::FailedPrecondition, "there is no snapshot to read");
  CHECK_THROWS(table.native().BeginSave(Of::kChanges), sok::FailedPrecondition, "no save that its changes");
  CHECK(!table.native().Changes().is_on);
  table.native().BeginSave(Of::kAllRows);
  CHECK_THROWS(table.native().BeginSave(), sok::FailedPrecondition, "an asynchronous save is under way");
  CHECK_THROWS(table.native().Swap(&other.native()), sok::FailedPrecondition, "an asynchronous save is under way");
  CHECK_THROWS(other.native().Swap(&table.native()), sok::FailedPrecondition, "an asynchronous save is under way");
  read_it();
  CHECK_THROWS(read_it(), sok::FailedPrecondition, "there is no snapshot to read");
  table.native().EndSave("");
  table.native().Swap(&other.native());
}

TEST(ASaveThatEndsWhileItsSnapshotIsReadIsTold) {
  const auto all = Range(0, 50);
  for (const int at : {0, 1, 4, 7}) {  // as the first batch is asked for; among batches; among those of erased keys
    Table table(Config(3, 100));
    table.Assign(all, 1.0f);
    table.native().BeginSave(Of::kAllRows);
    table.Erase(Range(30, 50));
    int calls = 0;
    Collector read(3, 7, [&] {
      if (calls++ == at) table.native().EndSave("");
      table.Assign(all, 2.0f);  // copied aside for nobody any more
    });
    CHECK_THROWS(table.native().ReadSnapshot({kThreads}, &read), sok::FailedPrecondition,
                 "table 'item' (rank 0 of 1): the save ended while its snapshot was read");
    for (const auto& [key, kept] : read.found) CHECK(kept.row == std::vector<float>(3, 1.0f));
    table.native().BeginSave(Of::kAllRows);
    Collector again(3, 7);
    table.native().ReadSnapshot({kThreads}, &again);
    CHECK_EQ(again.found.size(), size_t{50});
  }
}

// What the thread sanitizer is for: lookups, updates, insertions and erasures beside the one who writes.
TEST(TrainingGoesOnWhileASnapshotIsWritten) {
  for (const bool hashed : {true, false}) {
    Folder folder;
    Table table(Config(4, 20000, hashed));
    std::vector<uint64_t> keys = Range(0, 12000);
    table.Assign(keys, 1.0f);
    Train(&table, Range(0, 6000), 1);
    for (int round = 0; round < 3; ++round) {
      const AllRows before = Everything(&table);
      table.native().BeginSave(Of::kAllRows);
      std::atomic<bool> written{false};
      std::thread writer([&] {
        sok::SaveShardSnapshot({kAlone}, &table.native(), 8, "g", folder / "a", false);
        written.store(true);
      });
      RunTogether(3, [&](int t) {
        std::mt19937 random(static_cast<unsigned>(10 * round + t));
        for (int i = 0; i < 4 || !written.load(); ++i) {
          const uint64_t from = random() % 15000;
          if (t == 0) Train(&table, Range(from, from + 500), i + 2);
          if (t == 1) table.Lookup(Range(from, from + 500), false);
          if (t == 2) table.Erase({random() % 15000, random() % 15000});
          if (t == 2) table.Assign(Range(from, from + 20), 5.0f);
        }
      });
      writer.join();
      table.native().EndSave("g");
      Table other(Config(4, 20000, hashed));
      sok::LoadShard({kThreads}, folder / "a", 8, {{"adam", "adam"}}, &other.native());
      CHECK(Everything(&other) == before);
    }
  }
}
