// Versions of tables over files (cpu/row_versions.cc, storage/version_scan.cc): what every one of them holds, whatever happened since.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "version_tables.h"

namespace {

constexpr int64_t kDim = 6, kCapacity = 3000;
constexpr uint64_t kKeys = 2000;

// What the test's disk has been told of one log, if it is told: see AfterAPowerCut.
struct Write {
  std::string file;
  off_t at;
  std::string bytes;
  bool is_synced;
};
std::mutex disk_mutex;
int watched = -1;
std::vector<Write> writes;
std::atomic<int64_t> calls_left{-1};  // of the system, until it kills the process; negative: it never does

void CountCall() {
  if (calls_left.load() >= 0 && calls_left.fetch_sub(1) == 0) raise(SIGKILL);
}

std::string PathOf(int file) {
  char path[4096];
  const ssize_t n = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof(path) - 1);
  return {path, static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

}  // namespace

// The layer under the library: what it asks of the disk goes through here.
extern "C" ssize_t pwrite(int file, const void* data, size_t n, off_t at) {
  CountCall();
  const ssize_t done = syscall(SYS_pwrite64, file, data, n, at);
  if (watched >= 0 && done > 0) {
    const std::lock_guard<std::mutex> lock(disk_mutex);
    writes.push_back({PathOf(file), at, std::string(static_cast<const char*>(data), static_cast<size_t>(done)), false});
  }
  return done;
}

extern "C" int fdatasync(int file) {
  CountCall();
  size_t known;
  {
    const std::lock_guard<std::mutex> lock(disk_mutex);
    known = writes.size();
  }
  const int done = static_cast<int>(syscall(SYS_fdatasync, file));
  if (watched >= 0) {
    const std::lock_guard<std::mutex> lock(disk_mutex);
    const std::string path = PathOf(file);
    for (size_t i = 0; i < known; ++i) writes[i].is_synced |= writes[i].file == path;
  }
  return done;
}

extern "C" int rename(const char* from, const char* to) {
  CountCall();
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

namespace {

sok::TableConfig ConfigIn(const std::string& folder, bool hashed) {
  sok::TableConfig config = Config(kDim, kCapacity, hashed);
  if (!folder.empty()) config.storage = {int64_t{8} << 20, folder};
  return config;
}

// The steps of a program: the same for the same numbers, whatever table they are done to.
void Step(Table* table, unsigned seed, int64_t number) {
  std::mt19937 random(seed * 1000003u + static_cast<unsigned>(number));
  std::vector<uint64_t> keys(1 + random() % 120);
  for (uint64_t& key : keys) key = random() % 3 == 0 ? random() % kKeys : random() % (kKeys / 10);
  switch (random() % 8) {
    case 0:
      table->Erase(std::vector<uint64_t>(keys.begin(), keys.begin() + static_cast<long>(1 + keys.size() / 8)));
      return;
    case 1:
      table->Assign(keys, static_cast<float>(random() % 100));
      return;
    case 2:
      table->Lookup(keys, false);
      return;
    default: {
      const auto ids = table->Lookup(keys).ids;
      std::vector<float> grads(ids.size() * kDim);
      for (float& g : grads) g = static_cast<float>(static_cast<int>(random() % 201) - 100) / 100.0f;
      // Slots that widen the records, and rules that move rows without gradients.
      const std::string rule = number > 60 && random() % 2 == 0   ? "nadam"
                               : number > 25 && random() % 2 == 0 ? "adam"
                                                                  : "adagrad";
      table->Apply(rule, HyperOf(rule, 0.05), ids, grads, number);
    }
  }
}

AllRows Loaded(const std::string& shard, bool hashed, int64_t capacity = kCapacity) {
  Table fresh(Config(kDim, capacity, hashed));
  LoadAll(shard, &fresh);
  return Contents(&fresh.native());
}

#ifndef __SANITIZE_THREAD__
// What the program has made of a table in memory after so many steps.
AllRows After(unsigned seed, int64_t steps, bool hashed) {
  Table table(ConfigIn("", hashed));
  for (int64_t number = 1; number <= steps; ++number) Step(&table, seed, number);
  return Contents(&table.native());
}
#endif

}  // namespace

TEST(EveryVersionHoldsWhatTheTableHeld) {
  const Small small;
  for (const bool hashed : {true, false}) {
    for (unsigned seed = 1; seed <= (6 + kLess - 1) / kLess; ++seed) {
      const Folder logs, shards;
      Table table(ConfigIn(logs.path(), hashed)), twin(ConfigIn("", hashed));
      table.native().KeepVersions();
      std::map<int64_t, AllRows> kept;
      std::thread writer;
      int64_t version = 0, most = 0;
      bool has_failed = false;
      auto join = [&] {
        if (writer.joinable()) writer.join();
        if (has_failed) kept.erase(version);
        has_failed = false;
      };
      for (int64_t number = 1; number <= (kLess > 1 ? 150 : 400); ++number) {
        Step(&table, seed, number);
        Step(&twin, seed, number);
        most = std::max(most, table.native().storage_counts().file_bytes);
        if (number % 17 != 0 && number != 2) continue;
        join();
        ++version;
        kept[version] = Contents(&twin.native());
        table.native().BeginSave(sok::TableStore::SnapshotOf::kVersion);
        writer = std::thread([&, version] {
          try {
            sok::SaveShardVersion(&table.native(), 8, "v", ShardOf(shards.path(), version));
            table.native().EndSave("v");
          } catch (const sok::FileError& error) {  // other slots came, which begin a new log
            CHECK(std::string(error.what()).find("other slots") != std::string::npos);
            table.native().EndSave("");
            has_failed = true;
          }
        });
        if (version < 5) continue;
        kept.erase(version - 4);
        unlink(ShardOf(shards.path(), version - 4).c_str());
        const int64_t some = version - 1 - static_cast<int64_t>(seed % 3);
        if (kept.count(some) == 1) CHECK(Loaded(ShardOf(shards.path(), some), hashed) == kept[some]);
      }
      join();
      CHECK(kept.size() >= 4);
      for (const auto& [number, rows] : kept) CHECK(Loaded(ShardOf(shards.path(), number), hashed) == rows);
      CHECK(Contents(&table.native()) == Contents(&twin.native()));
      // Four versions beside the rows that there are.
      CHECK(most < 5 * 3 * kCapacity * 120 / 2 + 41 * 8192);
      CHECK(kLess > 1 || table.native().storage_counts().written_bytes > most / 2);
    }
  }
}

TEST(WhatIsWrittenForAVersionIsWhatMemoryHeldAlone) {
  const Folder logs, shards;
  Table table(ConfigIn(logs.path(), true));
  table.native().KeepVersions();
  std::vector<uint64_t> keys(1000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  table.Lookup(keys);
  Save(&table, shards / "v1", 1);
  const int64_t first = table.native().storage_counts().written_bytes;
  table.Assign({5, 6, 7}, 1.0f);
  Save(&table, shards / "v2", 2);
  CHECK_EQ(table.native().storage_counts().written_bytes - first, 4096);  // one block
  CHECK(ReadFile(shards / "v2").size() < 1000);
  CHECK_EQ(Loaded(shards / "v1", true).size(), 1000u);
  CHECK(Loaded(shards / "v1", true)[5].row != Loaded(shards / "v2", true)[5].row);
}

TEST(LogsStayAsLongAsAShardNamesThem) {
  const Folder logs, shards;
  {
    Table table(ConfigIn(logs.path(), true));
    table.native().KeepVersions();
    table.Lookup({1, 2, 3});
    Save(&table, shards / "v1", 1);
  }
  auto num_logs = [&] { return system(("test $(ls " + logs.path() + "/*.rows | wc -l) = 2").c_str()) == 0; };
  {
    Table other(ConfigIn(logs.path(), true));
    other.native().KeepVersions();
    other.native().BeginSave(sok::TableStore::SnapshotOf::kVersion);
    CHECK(num_logs());
    other.native().EndSave("");
    CHECK_EQ(Loaded(shards / "v1", true).size(), 3u);
    // As if nothing were mounted there: who knows whether it comes back.
    CHECK_EQ(rename((shards / "v1").c_str(), (logs / "v1 away").c_str()), 0);
    other.native().BeginSave(sok::TableStore::SnapshotOf::kVersion);
    CHECK(num_logs());
    other.native().EndSave("");
    WriteFile(shards / "v2", "something else");
    other.native().BeginSave(sok::TableStore::SnapshotOf::kVersion);
    CHECK(!num_logs());
    other.native().EndSave("");
  }
}

TEST(DamageIsAnErrorAndNotAnOlderRow) {
  const Folder logs, shards;
  Table table(ConfigIn(logs.path(), true));
  table.native().KeepVersions();
  table.Assign({1, 2, 3}, 1.0f);
  Save(&table, shards / "v1", 1);
  table.Assign({2}, 2.5f);
  Save(&table, shards / "v2", 2);
  const std::string log = sok::VerifyShard(shards / "v2").head.log.path;
  const std::string bytes = ReadFile(log);
  const std::vector<float> row(kDim, 2.5f);
  const size_t at = bytes.find(std::string(reinterpret_cast<const char*>(row.data()), kDim * sizeof(float)));
  CHECK(at != std::string::npos);
  const int file = open(log.c_str(), O_WRONLY);
  CHECK_EQ(pwrite(file, "x", 1, static_cast<off_t>(at)), 1);
  close(file);
  CHECK_THROWS(Loaded(shards / "v2", true), sok::DamagedFile, "some are not what was written");
  CHECK_EQ(Loaded(shards / "v1", true)[2].row[0], 1.0f);
  CHECK_EQ(ftruncate(open(log.c_str(), O_WRONLY | O_CLOEXEC), 4096), 0);
  unlink(log.c_str());
  CHECK_THROWS(Loaded(shards / "v1", true), sok::FileError, log);
}

TEST(TablesThatCannotKeepVersionsSaySo) {
  const Folder logs, shards;
  Table in_memory(Config(kDim, 100));
  CHECK_THROWS(in_memory.native().KeepVersions(), sok::FailedPrecondition, "its rows are in memory");
  Table table(ConfigIn(logs.path(), true));
  CHECK_THROWS(table.native().BeginSave(sok::TableStore::SnapshotOf::kVersion), sok::FailedPrecondition,
               "keeps no versions");
  CHECK_THROWS(table.native().WriteVersion("x"), sok::FailedPrecondition, "no version to write");
  table.native().KeepVersions();
  table.native().BeginSave(sok::TableStore::SnapshotOf::kVersion);
  CHECK_THROWS(table.native().BeginSave(sok::TableStore::SnapshotOf::kVersion), sok::FailedPrecondition,
               "save is under way");
  Table other(ConfigIn(logs.path(), true));
  CHECK_THROWS(table.native().Swap(&other.native()), sok::FailedPrecondition, "save is under way");
  table.native().EndSave("");
  table.native().Swap(&other.native());
  table.Lookup({4, 5});
  Save(&table, shards / "v1", 1);  // what was swapped in keeps versions, too
  CHECK_EQ(Loaded(shards / "v1", true).size(), 2u);
}

namespace {

// As if the disk had no more room than the files have now.
class NoMoreRoom {
 public:
  explicit NoMoreRoom(int64_t bytes) {
    signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit few = {static_cast<rlim_t>(bytes), before_.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &few), 0);
  }
  ~NoMoreRoom() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_;
};

}  // namespace

TEST(AFullDiskGivesUpTheVersionThatIsWrittenAndKeepsThoseThatAre) {
  const Small small;
  const Folder logs, shards;
  sok::TableConfig config = Config(kDim, 20000);
  config.storage = {int64_t{8} << 20, logs.path()};
  Table table(config);
  table.native().KeepVersions();
  std::vector<uint64_t> keys(16000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  table.Assign(keys, 1.0f);
  const int64_t bytes = table.native().storage_counts().file_bytes;
  {
    const NoMoreRoom full(bytes);
    table.native().BeginSave(sok::TableStore::SnapshotOf::kVersion);
    table.Assign(keys, 2.0f);  // training goes on
    CHECK_THROWS(table.native().WriteVersion(shards / "v1"), sok::FileError, "the disk was full");
    table.native().EndSave("");
    CHECK_EQ(table.native().storage_counts().file_bytes, bytes);
  }
  Save(&table, shards / "v1", 1);
  const AllRows saved = Contents(&table.native());
  {
    const NoMoreRoom full(table.native().storage_counts().file_bytes);
    const auto change = [&] { table.Assign(keys, 3.0f); };
    CHECK_THROWS(change(), sok::FileError, "make room for");
  }
  CHECK(Loaded(shards / "v1", true, 20000) == saved);
}

// ---- The process dies, the power fails

namespace {

#ifndef __SANITIZE_THREAD__
// Trains and saves until it is killed; a version is listed when its shard is there. Says on `out` what it is about to list.
[[noreturn]] void TrainUntilKilled(const std::string& logs, const std::string& shards, unsigned seed, int64_t calls) {
  Table table(ConfigIn(logs, true), 1);
  table.native().KeepVersions();
  calls_left.store(calls);
  for (int64_t number = 1; number < 100000; ++number) {
    Step(&table, seed, number);
    if (number % 9 != 0) continue;
    try {
      Save(&table, ShardOf(shards, number), number);  // its number says after how many steps
    } catch (const sok::FileError&) {
      continue;
    }
    if (number > 27) unlink(ShardOf(shards, number - 27).c_str());
  }
  _exit(1);
}

std::vector<int64_t> ListedIn(const std::string& shards) {
  std::vector<int64_t> listed;
  for (int64_t number = 9; number < 100000; number += 9)
    if (Exists(ShardOf(shards, number))) listed.push_back(number);
  return listed;
}
#endif

}  // namespace

#ifndef __SANITIZE_THREAD__  // which does not follow processes that are forked beside threads
TEST(EveryListedVersionOutlivesItsProcess) {
  const Small small;
  const char* wish = std::getenv("SOK_TEST_KILLS");
  const int kills = wish == nullptr ? 40 / kLess : std::atoi(wish);
  int64_t listed = 0;
  std::mt19937 random(7);
  for (int k = 0; k < kills; ++k) {
    const Folder logs, shards;
    const unsigned seed = 100 + random() % 1000;
    // At a call of the system, or at any time.
    const int64_t calls = k % 2 == 0 ? static_cast<int64_t>(random() % 1500) : -1;
    const pid_t child = fork();
    if (child == 0) TrainUntilKilled(logs.path(), shards.path(), seed, calls);
    if (calls < 0) {
      usleep(20000 + random() % 150000);
      kill(child, SIGKILL);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    const Table next(ConfigIn(logs.path(), true));  // which removes what is left over
    for (const int64_t number : ListedIn(shards.path())) {
      ++listed;
      CHECK(Loaded(ShardOf(shards.path(), number), true) == After(seed, number, true));
    }
  }
  std::printf("       %lld listed versions after %d kills: all recovered\n", static_cast<long long>(listed), kills);
  CHECK(listed > kills);
}
#endif

TEST(EveryListedVersionOutlivesAPowerCut) {
  const Small small;
  std::mt19937 random(3);
  int64_t checked = 0;
  for (unsigned seed = 1; seed <= (12 + kLess - 1) / kLess; ++seed) {
    const Folder logs, shards;
    writes.clear();
    watched = 1;
    Table table(ConfigIn(logs.path(), true));
    table.native().KeepVersions();
    int64_t last = 0;
    for (int64_t number = 1; number <= 25; ++number) Step(&table, seed, number);  // as wide as it gets
    for (int64_t number = 26; number <= 150; ++number) {
      std::mt19937 of_step(seed + static_cast<unsigned>(number));
      std::vector<uint64_t> keys(1 + of_step() % 200);
      for (uint64_t& key : keys) key = of_step() % kKeys;
      table.Assign(keys, static_cast<float>(number));
      if (number % 7 == 0) {
        Save(&table, ShardOf(shards.path(), number), number);
        last = number;
        if (number > 28) unlink(ShardOf(shards.path(), number - 21).c_str());
      }
      if (last == 0 || number % (kLess > 1 ? 25 : 5) != 0) continue;
      // The disk has all that was synced, and of the rest any parts, in any order.
      const std::string log = sok::VerifyShard(ShardOf(shards.path(), last)).head.log.path, now = ReadFile(log);
      std::string image(now.size(), '\0');
      std::vector<std::pair<size_t, size_t>> rest;  // of writes, their sectors
      constexpr size_t kSector = 512;
      auto put = [&](const Write& write, size_t first) {
        const size_t n = std::min(kSector, write.bytes.size() - first);
        std::memcpy(&image[static_cast<size_t>(write.at) + first], write.bytes.data() + first, n);
      };
      for (size_t w = 0; w < writes.size(); ++w) {
        for (size_t first = 0; writes[w].file == log && first < writes[w].bytes.size(); first += kSector) {
          if (writes[w].is_synced) {
            put(writes[w], first);
          } else if (random() % 2 == 0) {
            rest.emplace_back(w, first);
          }
        }
      }
      std::shuffle(rest.begin(), rest.end(), random);
      for (const auto& [w, first] : rest) put(writes[w], first);
      std::map<int64_t, AllRows> before;
      for (int64_t v = last; v > 0 && Exists(ShardOf(shards.path(), v)); v -= 7)
        before[v] = Loaded(ShardOf(shards.path(), v), true);
      // The table must not see it: another file has the log's name meanwhile.
      const std::string aside = log + ".aside";
      CHECK_EQ(rename(log.c_str(), aside.c_str()), 0);
      WriteFile(log, image);
      for (const auto& [v, rows] : before) {
        ++checked;
        CHECK(Loaded(ShardOf(shards.path(), v), true) == rows);
      }
      CHECK_EQ(rename(aside.c_str(), log.c_str()), 0);
    }
    watched = -1;
  }
  std::printf("       %lld versions after power cuts: all recovered\n", static_cast<long long>(checked));
}
