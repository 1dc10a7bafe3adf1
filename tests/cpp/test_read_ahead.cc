// Rows that are read into memory before a call needs them (cpu/table_read_ahead.cc), beside calls, and beside tables in memory.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collector.h"
#include "file_tables.h"
#include "files.h"
#include "rules.h"
#include "sok/error.h"
#include "sok/file_error.h"
#include "sok/row_tier.h"
#include "tables.h"

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kLess = 4;  // of what takes long
#else
constexpr int kLess = 1;
#endif

std::vector<uint64_t> Range(uint64_t begin, uint64_t end) {
  std::vector<uint64_t> keys;
  for (uint64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

int64_t ReadAhead(Table* table, const std::vector<uint64_t>& keys, int64_t batches = 1) {
  return table->native().ReadAhead({kThreads}, keys.data(), static_cast<int64_t>(keys.size()), batches);
}

// What a call adds to the counts.
template <class Call>
sok::StorageCounts CountsOf(Table* table, const Call& call) {
  const sok::StorageCounts before = table->native().storage_counts();
  call();
  sok::StorageCounts now = table->native().storage_counts();
  now.hits -= before.hits;
  now.misses -= before.misses;
  now.read_ahead -= before.read_ahead;
  return now;
}

// Keeps a few rows in memory, and segments that are soon used again, as long as it is there.
class Little {
 public:
  explicit Little(const char* frames) {
    setenv("SOK_STORAGE_FRAMES", frames, 1);
    setenv("SOK_STORAGE_SEGMENT_BYTES", "8192", 1);
  }
  ~Little() {
    unsetenv("SOK_STORAGE_FRAMES");
    unsetenv("SOK_STORAGE_SEGMENT_BYTES");
  }
};

// Where /tmp may be memory or a disk, these are one each.
std::vector<std::string> Parents() {
  const char* disk = std::getenv("SOK_TEST_DISK");
  std::vector<std::string> parents = {disk == nullptr ? "/var/tmp" : disk};
  if (Exists("/dev/shm")) parents.push_back("/dev/shm");
  return parents;
}

// Threads that read ahead in a table, again and again.
class Readers {
 public:
  Readers(Table* table, uint64_t below) {
    for (unsigned t = 0; t < 2; ++t) {
      threads_.emplace_back([this, table, below, t] {
        std::mt19937 random(t);
        while (!is_over_) {
          read_ += ReadAhead(table, SomeKeys(&random, 1 + random() % 600, below + 100), 1 + random() % 3);
          std::this_thread::yield();
        }
      });
    }
  }
  ~Readers() { Join(); }
  int64_t Join() {
    is_over_ = true;
    for (std::thread& thread : threads_)
      if (thread.joinable()) thread.join();
    return read_;
  }

 private:
  std::atomic<bool> is_over_{false};
  std::atomic<int64_t> read_{0};
  std::vector<std::thread> threads_;
};

void RunBeside(const std::string& parent, unsigned seed, bool has_versions) {
  const Folder folder(parent);
  const Little little("400");
  std::mt19937 random(seed);
  const uint64_t below = 3000;
  Pair pair(Config(16, 4000), folder, kMany);
  if (has_versions) pair.file().native().KeepVersions();
  pair.Apply("sgd", 1, pair.Lookup(Range(0, below)), &random);
  Readers readers(&pair.file(), below);
  std::vector<std::string> rules = {"sgd", "adagrad", "ftrl"};  // whose slots make another file
  if (!has_versions) rules.push_back("adam");
  int64_t step = 1;
  for (int turn = 0; turn < 60 / kLess; ++turn) {
    const auto keys = SomeKeys(&random, 1 + random() % 700, below);
    switch (random() % 6) {
      case 0:
        pair.Lookup(keys, false);
        break;
      case 1:
        pair.Erase(std::vector<uint64_t>(keys.begin(), keys.begin() + static_cast<long>(keys.size() / 20)));
        break;
      case 2:
        pair.Assign(keys, static_cast<float>(turn));
        break;
      case 3:
        if (has_versions && turn % 3 == 0) {
          pair.file().native().BeginSave(sok::TableStore::SnapshotOf::kVersion);
          pair.file().native().WriteVersion(folder / "shard");
          pair.file().native().EndSave("v");
        } else if (turn % 3 == 0) {
          pair.Compare();
        }
        break;
      default:
        pair.Apply(rules[random() % rules.size()], ++step, pair.Lookup(keys), &random);
    }
  }
  CHECK(readers.Join() > 0);
  pair.Compare();
}

}  // namespace

TEST(ReadingAheadBesideOtherCallsChangesNothing) {
  unsigned seed = 0;
  for (const std::string& parent : Parents())
    for (const bool has_versions : {false, true}) RunBeside(parent, ++seed, has_versions);
}

TEST(ATableMayBeExchangedOrGoWhileItsRowsAreRead) {
  for (const std::string& parent : Parents()) {
    const Folder folder(parent);
    const Little little("100");
    for (int turn = 0; turn < 8 / kLess + 1; ++turn) {
      Table table(WithFile(Config(16, 4000), folder, kMany));
      table.Lookup(Range(0, 3000));
      Readers readers(&table, 3000);
      for (int i = 0; i < 4; ++i) {
        Table other(WithFile(Config(16, 4000), folder, kMany));
        other.Assign(Range(0, 2000), static_cast<float>(i));
        table.native().Swap(&other.native());  // and the other one's file goes
        CHECK_EQ(table.Lookup({7}, false).values[3], static_cast<float>(i));
      }
      readers.Join();
      CHECK_EQ(table.native().size(), 2000);
    }
    CHECK(FilesIn(folder.path()).empty());
  }
}

TEST(TheFileMayGrowWhileItIsRead) {  // where it is mapped, the mapping moves
  for (const std::string& parent : Parents()) {
    const Folder folder(parent);
    const Little little("400");
    const uint64_t rows = 200000 / kLess;
    Table table(WithFile(Config(16, static_cast<int64_t>(rows)), folder, kMany)),
        other(Config(16, static_cast<int64_t>(rows)));
    table.Lookup(Range(0, 3000));
    Readers readers(&table, 3000);
    for (uint64_t key = 3000; key < rows; key += 1000) table.Lookup(Range(key, std::min(key + 1000, rows)));
    CHECK(readers.Join() > 0);
    other.Lookup(Range(0, rows));
    CHECK(Contents(&table.native()) == Contents(&other.native()));
  }
}

TEST(ALookupFindsInMemoryWhatWasReadAhead) {
  for (const std::string& parent : Parents()) {
    const Folder folder(parent);
    const Little little("1000");
    Table table(WithFile(Config(8, 10000), folder, kMany));
    table.Lookup(Range(0, 6000));
    const AllRows before = Contents(&table.native());
    std::vector<uint64_t> keys = Range(100, 400), more = Range(7000, 7100);  // of which there are no rows
    keys.insert(keys.end(), keys.begin(), keys.begin() + 50);
    keys.insert(keys.end(), more.begin(), more.end());
    const sok::StorageCounts ahead = CountsOf(&table, [&] { CHECK_EQ(ReadAhead(&table, keys), 300); });
    CHECK_EQ(ahead.read_ahead, 300);
    CHECK(ahead.hits == 0 && ahead.misses == 0);
    CHECK_EQ(table.native().size(), 6000);
    CHECK_EQ(ReadAhead(&table, keys), 0);
    CHECK(Contents(&table.native()) == before);
    const sok::StorageCounts step = CountsOf(&table, [&] {
      const auto ids = table.Lookup(Range(100, 400)).ids;
      table.Apply("sgd", HyperOf("sgd", 0.0), ids, std::vector<float>(ids.size() * 8, 1.0f));
    });
    CHECK(step.hits == 600 && step.misses == 0 && step.read_ahead == 0);
  }
}

TEST(WhatIsReadAheadLeavesRoomForTheStep) {
  const Folder folder;
  const Little little("1200");
  Table table(WithFile(Config(8, 20000), folder, kMany));
  table.Lookup(Range(0, 12000));
  for (const int64_t batches : {1, 2, 5}) {
    const int64_t most = sok::EmbeddingTable::MostAhead(1200, batches);
    CHECK_EQ(most, 1200 / (batches + 1));
    const uint64_t few = static_cast<uint64_t>(most) * 9 / 10;
    for (uint64_t step = 0; step < 12; ++step) {
      // All batches in flight have as many rows as may be; one is larger than the cache, and takes no more than its part.
      const uint64_t begin = step * 600;
      if (step == 0) CHECK(ReadAhead(&table, Range(begin, begin + few), batches) > 0);
      const auto now = Range(begin, begin + few), next = Range(begin + 600, begin + 600 + few);
      const sok::StorageCounts counts = CountsOf(&table, [&] {
        const auto ids = table.Lookup(now).ids;
        CHECK(ReadAhead(&table, next, batches) <= most);
        table.Apply("sgd", HyperOf("sgd", 0.1), ids, std::vector<float>(ids.size() * 8, 1.0f));
      });
      CHECK_EQ(counts.misses, 0);
    }
    CHECK_EQ(ReadAhead(&table, Range(0, 12000), batches) <= most, true);
    CHECK(table.native().storage_counts().rows_in_memory <= 1200);
  }
}

TEST(RowsThatWaitForTheirStepOutlastThoseThatHadIt) {
  const Folder folder;
  const Little little("1200");
  Table table(WithFile(Config(8, 20000), folder, kMany));
  table.Assign(Range(0, 12000), 1.0f);
  CHECK_EQ(ReadAhead(&table, Range(0, 130)), 130);
  for (uint64_t begin = 0; begin < 10400; begin += 130) {  // nothing is written to: all stay as long as they may
    ReadAhead(&table, Range(begin + 130, begin + 260));
    CHECK_EQ(CountsOf(&table, [&] { table.Lookup(Range(begin, begin + 130), false); }).misses, 0);
  }
}

TEST(RowsThatAreReadAheadAndNotUsedLeaveInTheEnd) {
  const Folder folder;
  const Little little("100");
  Table table(WithFile(Config(8, 20000), folder, kMany));
  table.Lookup(Range(0, 4000));
  CHECK_EQ(ReadAhead(&table, Range(0, 50)), 50);
  for (uint64_t begin = 1000; begin < 4000; begin += 100) table.Lookup(Range(begin, begin + 90));
  CHECK(CountsOf(&table, [&] { table.Lookup(Range(0, 50), false); }).misses > 40);
}

TEST(ADamagedRowIsLeftToTheStepThatNeedsIt) {
  Damaged damaged;
  Table& table = damaged.table;
  const std::vector<uint64_t> around = {100005, 100006, 100007, 100008};
  CHECK_EQ(ReadAhead(&table, around), 3);
  CHECK_EQ(ReadAhead(&table, around), 0);
  CHECK_THROWS(table.Lookup(around), sok::DamagedFile, "the row of key 100007 of table 'item'");
  CHECK_EQ(CountsOf(&table, [&] { table.Lookup({100005, 100006, 100008}); }).misses, 0);
  damaged.Apply({damaged.ids[6]});
  // A table that is half changed has nothing read.
  std::reverse(damaged.ids.begin(), damaged.ids.end());
  CHECK_THROWS(damaged.Apply(damaged.ids), sok::DamagedFile, "key 100007");
  CHECK_EQ(ReadAhead(&table, Range(100000, 109000)), 0);
}

TEST(ATableInMemoryHasNothingToRead) {
  Table table(Config(4, 100));
  table.Lookup({1, 2, 3});
  CHECK_EQ(ReadAhead(&table, {1, 2, 3, 4}), 0);
  CHECK_EQ(table.native().size(), 3);
}

// The row was changed in between, and lies where it lay.
TEST(WhatASlotHeldBeforeItWasWrittenAgainIsNotTaken) {
  for (const std::string& parent : Parents()) {
    const Folder folder(parent);
    const Little little("8");
    std::mt19937 random(1);
    sok::RowTier tier({kMany, folder.path()}, "table", "rows", 250, 64);
    tier.Touch(0);
    const auto write = [&](uint32_t row, float value) {
      CHECK_EQ(tier.Bring({kThreads}, &row, 1, sok::RowUse::kWrite), 1);
      tier.places()[row][0] = value;
    };
    const uint32_t row = 5;
    const auto push_out = [&] {
      while (!tier.IsInFile(row) || random() % 8 != 0) write(20 + random() % 20, 0.0f);
    };
    write(row, 1.0f);
    for (int i = 0; i < 500; ++i) write(20 + random() % 20, 0.0f);
    push_out();
    CHECK(tier.IsInFile(row));
    const uint32_t slot = tier.SlotOf(row);
    sok::RowTier::Ahead ahead;
    tier.WhatToRead(&row, 1, &ahead);
    sok::RowTier::ReadAside({kThreads}, &ahead);
    const sok::RowTier::Ahead early = ahead;
    float value = 1.0f;
    int64_t turns = 0;
    do {  // other slots
      write(row, ++value);
      push_out();
      if (tier.SlotOf(row) != slot) {
        ahead = early;
        CHECK_EQ(tier.TakeIn(&ahead, 1), 0);
      }
    } while (tier.SlotOf(row) != slot && ++turns < 200000);
    CHECK_EQ(tier.SlotOf(row), slot);
    CHECK_EQ(early.wanted.size(), 1u);
    CHECK_EQ(early.wanted[0].to[0], 1.0f);
    ahead = early;
    CHECK_EQ(tier.TakeIn(&ahead, 1), 0);
    tier.WhatToRead(&row, 1, &ahead);
    sok::RowTier::ReadAside({kThreads}, &ahead);
    CHECK_EQ(tier.TakeIn(&ahead, 1), 1);
    CHECK_EQ(tier.places()[row][0], value);
  }
}
