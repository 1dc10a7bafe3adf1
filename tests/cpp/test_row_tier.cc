// Tables of which only some rows are in memory (cpu/row_tier.cc, storage/row_log.cc), beside the same tables in memory.
#include "sok/row_tier.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "collector.h"
#include "file_tables.h"
#include "files.h"
#include "rules.h"
#include "sok/error.h"
#include "sok/file_error.h"
#include "tables.h"

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kLess = 4;  // of what takes long
#else
constexpr int kLess = 1;
#endif
void RunProgram(unsigned seed, int64_t dim, bool hashed, int64_t more_bytes) {
  const Folder folder;
  std::mt19937 random(seed);
  const int64_t capacity = 20000;
  const uint64_t below = hashed ? 15000 : 20000;
  Pair pair(Config(dim, capacity, hashed), folder, LeastBytes(6 * dim, capacity) + more_bytes + (768 << 10));
  const std::vector<std::string> rules = {"sgd", "adagrad", "adam", "ftrl"};
  int64_t step = 0;
  const size_t most_keys = 6000 / (dim > 1000 ? kLess * kFewer : 1);
  for (int turn = 0; turn < 40 / kLess; ++turn) {
    const auto keys = SomeKeys(&random, 1 + random() % most_keys, below);
    switch (random() % 8) {
      case 0:
        pair.Lookup(keys, false);
        break;
      case 1: {  // segments of all sizes, one of which may be more than there is room for
        std::vector<int64_t> splits = {0};
        while (splits.back() < static_cast<int64_t>(keys.size()))
          splits.push_back(std::min<int64_t>(static_cast<int64_t>(keys.size()),
                                             splits.back() + (random() % 3 == 0 ? 5000 : random() % 40)));
        const auto ids = pair.Pool(keys, splits, random() % 2 == 0);
        if (random() % 2 == 0) pair.Apply(rules[random() % 2], ++step, ids, &random);
        break;
      }
      case 2:
        pair.Erase(std::vector<uint64_t>(keys.begin(), keys.begin() + static_cast<long>(keys.size() / 50)));
        break;
      case 3:
        pair.Assign(keys, static_cast<float>(turn));
        break;
      case 4:
        if (turn % 3 == 0) pair.Compare();
        break;
      default:
        pair.Apply(rules[random() % rules.size()], ++step, pair.Lookup(keys), &random);
    }
  }
  pair.Compare();
  const sok::StorageCounts counts = pair.file().native().storage_counts();
  CHECK(counts.misses > 0 && counts.hits > 0);
  CHECK(kLess > 1 || (counts.written_bytes > 0 && counts.read_bytes > 0));
}

}  // namespace

TEST(ATableWithAFileGivesWhatOneInMemoryGives) {
  unsigned seed = 0;
  for (const int64_t dim : {1, 3, 16, 64}) {
    if (kLess > 1 && (dim == 1 || dim == 64)) continue;
    for (const bool hashed : {true, false}) RunProgram(++seed, dim, hashed, dim * 4096);
  }
  RunProgram(++seed, 1300, true, 0);  // records larger than a block
}

TEST(AHandfulOfRowsInMemoryIsEnough) {
  setenv("SOK_STORAGE_FRAMES", "5", 1);
  RunProgram(40, 16, /*hashed=*/false, (480 << 10) - (768 << 10));
  unsetenv("SOK_STORAGE_FRAMES");
}

TEST(OnDisksTooThatGoPastTheCache) {
  const char* parent = std::getenv("SOK_TEST_DISK");  // a folder on a disk, where /tmp is none
  const Folder folder(parent == nullptr ? "/var/tmp" : parent);
  std::mt19937 random(5);
  Pair pair(Config(16, 20000), folder, LeastBytes(16, 20000) + (2 << 20));
  for (int64_t step = 1; step <= 8; ++step) {
    pair.Apply("adagrad", step, pair.Lookup(SomeKeys(&random, 9000, 15000)), &random);
    pair.Lookup(SomeKeys(&random, 3, 15000), false);
  }
  pair.Compare();
}

TEST(SavesBesideTrainingHoldWhatWasThere) {
  const Folder folder;
  std::mt19937 random(9);
  Pair pair(Config(8, 20000), folder, LeastBytes(8, 20000) + (2 << 20));
  for (int64_t step = 1; step <= 5; ++step)
    pair.Apply("adam", step, pair.Lookup(SomeKeys(&random, 8000, 15000)), &random);
  const AllRows before = Contents(&pair.memory().native());
  AllRows saved[2];
  const auto train = [&](Table* table, int64_t* step) {
    std::mt19937 again(static_cast<unsigned>(*step));
    const auto ids = table->Lookup(SomeKeys(&again, 3000, 15000)).ids;
    table->Apply("adam", HyperOf("adam", 0.01), ids, std::vector<float>(ids.size() * 8, 0.5f), ++*step);
    table->Erase({again() % 15000, again() % 15000});
  };
  for (Table* table : {&pair.memory(), &pair.file()}) {
    int64_t step = 5;
    table->native().BeginSave(sok::TableStore::SnapshotOf::kAllRows);
    Collector collector(8, 2000, [&] { train(table, &step); });
    table->native().ReadSnapshot({kThreads}, &collector);
    table->native().EndSave("one");
    saved[table == &pair.file()] = collector.found;
  }
  CHECK(saved[0] == before);
  CHECK(saved[1] == before);
}

TEST(ContentsMoveToAnotherTable) {
  const Folder folder;
  std::mt19937 random(3);
  const sok::TableConfig config = WithFile(Config(4, 20000), folder, LeastBytes(4, 20000) + (2 << 20));
  Table table(config), other(config);
  const auto keys = SomeKeys(&random, 9000, 15000);
  table.Apply("adagrad", HyperOf("adagrad", 0.1), table.Lookup(keys).ids, std::vector<float>(keys.size() * 4, 1.0f));
  const AllRows before = Contents(&table.native());
  table.native().Swap(&other.native());
  CHECK(Contents(&other.native()) == before);
  CHECK_EQ(table.native().size(), 0);
  other.Lookup(SomeKeys(&random, 5000, 15000));
  CHECK_EQ(FilesIn(folder.path()).size(), 2u);
}

TEST(ABudgetThatIsTooSmallIsRefusedWithTheLeast) {
  const Folder folder;
  const int64_t least = LeastBytes(16, 100000);
  CHECK(least > 0);
  CHECK_THROWS(sok::EmbeddingTable(WithFile(Config(16, 100000), folder, least - 1)), sok::InvalidArgument,
               "storage needs memory_bytes of at least " + std::to_string(least));
  Table table(WithFile(Config(16, 100000), folder, least + (1 << 20)));
  std::vector<uint64_t> keys(50000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  // Keys take more than a megabyte then. Nothing of the call is stored.
  table.Lookup({1, 2, 3});
  CHECK_THROWS(table.Lookup(keys), sok::OutOfMemory, "has no room for");
  CHECK_EQ(table.native().size(), 3);
  CHECK_EQ(table.Lookup({2}, false).ids[0] & 0xFFFFFFFF, 1);
  sok::TableConfig both = Config(2, 100);
  both.storage = {1 << 20, ""};
  CHECK_THROWS(sok::EmbeddingTable{both}, sok::InvalidArgument, "takes memory_bytes and a path, or neither");
}

TEST(MemoryStaysWithinTheBudget) {
  const Folder folder;
  const int64_t budget = LeastBytes(16, 200000) + (int64_t{6} << 20);
  Table table(WithFile(Config(16, 200000), folder, budget));
  std::vector<uint64_t> keys(2000);
  for (uint64_t first = 0; first < 100000; first += keys.size()) {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = first + i;
    table.Apply("adagrad", HyperOf("adagrad", 0.1), table.Lookup(keys).ids, std::vector<float>(keys.size() * 16, 1.0f));
    CHECK(table.native().memory_bytes() <= budget);
  }
  CHECK(table.native().storage_counts().rows_in_memory < 50000);
}

TEST(TheFileIsBoundedHoweverOftenRowsChange) {
  const Folder folder;
  std::mt19937 random(1);
  const char* steps = std::getenv("SOK_TEST_STEPS");
  Pair pair(Config(16, 20000), folder, LeastBytes(16, 20000) + (1 << 20));
  const int64_t num_steps = steps == nullptr ? 200 / kLess : std::atoll(steps);
  int64_t most = 0;
  for (int64_t step = 1; step <= num_steps; ++step) {
    pair.Apply("sgd", step, pair.Lookup(SomeKeys(&random, 4000, 15000)), &random);
    if (step % 10 == 0) pair.Erase(SomeKeys(&random, 20, 15000));
    most = std::max(most, pair.file().native().storage_counts().file_bytes);
  }
  pair.Compare();
  const sok::StorageCounts counts = pair.file().native().storage_counts();
  CHECK(most <= 16384 * 72 * 2 + (6 << 18));
  CHECK(kLess > 1 || counts.written_bytes > 4 * most);
}

TEST(ARowThatLookupsFindStaysAndOneThatIsOnlyWrittenLeaves) {
  using sok::RowUse;
  for (const RowUse use : {RowUse::kRead, RowUse::kReadAndWrite, RowUse::kWrite}) {
    const Folder folder;
    setenv("SOK_STORAGE_FRAMES", "100", 1);
    sok::RowTier tier({kMany, folder.path()}, "table", "rows", 16, 4096);
    unsetenv("SOK_STORAGE_FRAMES");
    tier.Touch(0);
    const auto bring = [&](uint32_t begin, uint32_t end, RowUse what) {
      std::vector<uint32_t> rows(end - begin);
      std::iota(rows.begin(), rows.end(), begin);
      CHECK_EQ(tier.Bring({kThreads}, rows.data(), end - begin, what), end - begin);
    };
    const auto are_here = [&] {
      int64_t count = 0;
      for (int64_t row = 0; row < 20; ++row) count += tier.IsHere(row);
      return count;
    };
    bring(0, 20, RowUse::kWrite);
    bring(0, 20, use);
    bring(20, 100, RowUse::kRead);
    bring(100, 180, RowUse::kRead);  // the hand comes by once
    CHECK_EQ(are_here(), use == RowUse::kWrite ? 0 : 20);
    bring(200, 280, RowUse::kRead);
    bring(300, 380, RowUse::kRead);  // and has taken what heat they had
    CHECK_EQ(are_here(), 0);
  }
}

TEST(ARowThatLeavesIsWrittenAboutOnce) {
  const Folder folder;
  setenv("SOK_STORAGE_FRAMES", "64", 1);
  setenv("SOK_STORAGE_SEGMENT_BYTES", "8192", 1);
  const int64_t num_rows = 4096, floats = 30, slot_bytes = 128, num_turns = 8 * num_rows;
  sok::RowTier tier({kMany, folder.path()}, "table", "rows", floats, num_rows);
  tier.Touch(0);
  std::mt19937 random(1);
  for (int64_t i = 0; i < num_turns; ++i) {
    const uint32_t row = i < num_rows ? static_cast<uint32_t>(i) : random() % num_rows;
    tier.Bring({kThreads}, &row, 1, sok::RowUse::kWrite);
  }
  unsetenv("SOK_STORAGE_FRAMES");
  unsetenv("SOK_STORAGE_SEGMENT_BYTES");
  const double written = static_cast<double>(tier.counts().written_bytes);
  CHECK(written > 0.9 * num_turns * slot_bytes && written < 1.4 * num_turns * slot_bytes);
}

TEST(ADamagedRowIsAnErrorThatNamesItsKey) {
  Damaged damaged;
  Table& table = damaged.table;
  for (const bool insert : {false, true}) {
    CHECK_THROWS(table.Lookup({100006, 100007, 100008}, insert), sok::DamagedFile,
                 "the row of key 100007 of table 'item'");
    CHECK_EQ(table.Lookup({100006, 100008}, insert).ids[0] & 0xFFFFFFFF, 6);
  }
  Collector collector(64);
  CHECK_THROWS(table.native().ReadAll({kThreads}, &collector), sok::DamagedFile, "key 100007");
  CHECK_THROWS(damaged.Apply({damaged.ids[6], damaged.ids[7]}), sok::DamagedFile,
               "key 100007");  // before any was written
  const AllRows others = [&] {
    CHECK_EQ(table.Erase({100007}), 1);
    return Contents(&table.native());
  }();
  CHECK_EQ(others.size(), 8999u);
  CHECK(SameBits(table.Lookup({100007}).values, damaged.values));  // a fresh row
  table.Lookup(damaged.keys);
}

TEST(ASaveOfADamagedRowFailsThoughItsKeyIsErased) {
  Damaged damaged;
  damaged.table.native().BeginSave(sok::TableStore::SnapshotOf::kAllRows);
  CHECK_EQ(damaged.table.Erase({100007}), 1);
  damaged.table.Lookup({100006});  // hears nothing of it
  Collector collector(64, 1000);
  CHECK_THROWS(damaged.table.native().ReadSnapshot({kThreads}, &collector), sok::DamagedFile, "The save is given up");
  damaged.table.native().EndSave("");
  CHECK_EQ(Contents(&damaged.table.native()).size(), 8999u);
}

TEST(WideningMeetsDamage) {
  Damaged damaged;
  const auto widen = [&] {
    damaged.table.Apply("adagrad", HyperOf("adagrad", 0.1), {damaged.ids[6]}, std::vector<float>(64, 1.0f));
  };
  CHECK_THROWS(widen(), sok::DamagedFile, "the row of key 100007 of table 'item'");
  damaged.table.Lookup({100006});
  damaged.table.Erase({100007});
  widen();
}

TEST(AnUpdateThatFailsInItsMiddleBreaksTheTable) {
  Damaged damaged;
  damaged.Apply({damaged.ids[6]});
  std::reverse(damaged.ids.begin(), damaged.ids.end());
  CHECK_THROWS(damaged.Apply(damaged.ids), sok::DamagedFile, "key 100007");
  CHECK_THROWS(damaged.table.Lookup({100006}), sok::FailedPrecondition, "an error has left it half changed");
  CHECK_THROWS(damaged.table.Lookup({5}), sok::FailedPrecondition, "Restore it from a checkpoint");
  Collector collector(64);
  const auto half = "has left it half changed";
  CHECK_THROWS(damaged.table.native().ReadAll({kThreads}, &collector), sok::FailedPrecondition, half);
  CHECK_THROWS(damaged.table.native().BeginSave(), sok::FailedPrecondition, half);  // which would replace a good one
  CHECK_THROWS(damaged.table.Erase({5}), sok::FailedPrecondition, half);
  sok::EmbeddingTable whole(damaged.table.native().config());
  damaged.table.native().Swap(&whole);
  damaged.table.Lookup({5, 100007});
}

TEST(AFullDiskIsAnErrorBeforeAnyRowIsMade) {
  const Folder folder;
  Table table(WithFile(Config(64, 200000), folder, kMany));
  table.Lookup({1, 2, 3});
  rlimit before;
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, SIG_IGN);
  const rlimit few = {4 << 20, before.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &few), 0);
  std::vector<uint64_t> keys(40000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  CHECK_THROWS(table.Lookup(keys), sok::FileError, "make room for");
  CHECK_EQ(table.native().size(), 3);
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  table.Lookup(keys);
  CHECK_EQ(table.native().size(), 40000);
}

TEST(FilesGoWithTheirTablesAndThoseOfOthersThatAreGone) {
  const Folder folder;
  const std::string left = folder / "item.r0.0123456789abcdef.rows", other = folder / "notes.txt",
                    held = folder / "item.r1.0123456789abcdef.rows";
  for (const std::string& path : {left, other, held}) WriteFile(path, "x");
  const int file = open(held.c_str(), O_RDWR);
  CHECK_EQ(flock(file, LOCK_EX), 0);
  {
    const Table table(WithFile(Config(4, 1000), folder, kMany));
    CHECK(!Exists(left) && Exists(other) && Exists(held));
    CHECK_EQ(FilesIn(folder.path()).size(), 3u);
  }
  CHECK_EQ(FilesIn(folder.path()).size(), 2u);
  close(file);
  const Table deep(WithFile(Config(4, 1000), folder, kMany));
  sok::TableConfig config = Config(4, 1000);
  config.storage = {kMany, folder / "a/b"};
  const sok::EmbeddingTable made(config);
  CHECK(Exists(folder / "a/b"));
  config.storage.path = other;
  CHECK_THROWS(sok::EmbeddingTable{config}, sok::FileError, "use as a folder");
}
