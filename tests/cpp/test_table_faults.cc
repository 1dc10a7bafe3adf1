// A disk that fails at the k-th read or write of a table over a file, for every k, in every operation: what the table says, and
// what it has afterwards. A twin in memory does the same, and has no disk.
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "file_tables.h"
#include "sok/error.h"
#include "sok/file_error.h"

namespace {

// Calls of the system until one fails, negative: none does; and whether all after it do.
std::atomic<int64_t> reads_left{-1}, writes_left{-1};
std::atomic<bool> stays_broken{false}, has_failed{false};

bool Fails(std::atomic<int64_t>* left) {
  if (left->load() < 0 || left->fetch_sub(1) > 0) return false;
  left->store(stays_broken ? 0 : -1);
  has_failed = true;
  errno = EIO;
  return true;
}

}  // namespace

// The layer under the library. No ring of reads is to be had, and no file lies in memory: what is read passes here.
extern "C" ssize_t pread(int file, void* data, size_t n, off_t at) {
  return Fails(&reads_left) ? -1 : syscall(SYS_pread64, file, data, n, at);
}
extern "C" ssize_t pwrite(int file, const void* data, size_t n, off_t at) {
  return Fails(&writes_left) ? -1 : syscall(SYS_pwrite64, file, data, n, at);
}
extern "C" void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  if (file >= 0 && (flags & MAP_POPULATE) != 0) {
    errno = EPERM;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, protection, flags, file, offset));
}
extern "C" int fstatfs(int file, struct statfs* system) noexcept {
  const int done = static_cast<int>(syscall(SYS_fstatfs, file, system));
  system->f_type = 0xEF53;
  return done;
}

namespace {

constexpr size_t kDim = 6;
constexpr uint64_t kRows = 800;

std::vector<uint64_t> KeysOf(uint64_t first, uint64_t n, uint64_t step = 1) {
  std::vector<uint64_t> keys(n);
  for (uint64_t i = 0; i < n; ++i) keys[i] = 1000 + first + i * step;
  return keys;
}

void Update(Table* table, const std::string& rule, const std::vector<uint64_t>& keys, bool insert = true) {
  const Rows rows = table->Lookup(keys, insert);
  std::vector<float> grads;
  for (const uint64_t key : keys) grads.insert(grads.end(), kDim, static_cast<float>(key % 5) * 0.25f);
  table->Apply(rule, HyperOf(rule, 0.5), rows.ids, grads);
}

void EndStep(Table* table) { table->native().EndStep({kThreads}); }

struct Operation {
  const char* name;
  std::function<void(Table*)> run;
  bool may_break = false;    // a table that an error leaves half changed says so from then on
  bool is_end = false;       // of a step, which says nothing itself: the next lookup for training does
  bool may_be_done = false;  // though it has said an error: new rows are there, with their initial values, all or none
  bool reads = true;
  sok::Policies policies = {};
};

sok::Policies Small(int64_t max_rows = 0) {
  sok::Policies policies;
  if (max_rows == 0) policies.norm_below = 0.3f;
  policies.max_rows = max_rows;
  policies.when_full = max_rows > 0;
  return policies;
}

// Rows of small norm leave after each step, and the others after the second.
sok::Policies Ageing() {
  sok::Policies policies = Small();
  policies.older_than = 1;
  return policies;
}

std::vector<Operation> Operations() {
  return {
      {"lookup", [](Table* t) { t->Lookup(KeysOf(0, 500), false); }},
      {"lookup of sums", [](Table* t) { t->LookupCombine(KeysOf(0, 100), {0, 50, 100}, false); }},
      {"lookup for training", [](Table* t) { t->Lookup(KeysOf(0, 1100)); }, true, false, true},
      {"update", [](Table* t) { Update(t, "sgd", KeysOf(100, 500)); }, true},
      {"first update of another optimizer", [](Table* t) { Update(t, "adagrad", KeysOf(0, 3)); }},
      {"assign", [](Table* t) { t->Assign(KeysOf(500, 500, 2), 3.0f); }, true},
      {"erase", [](Table* t) { t->Erase(KeysOf(0, 100, 3)); }, false, false, false, false},
      {"read all", [](Table* t) { Contents(&t->native()); }},
      {"save",
       [](Table* t) {
         t->native().BeginSave(sok::TableStore::SnapshotOf::kAllRows);
         Collector collector(kDim, 50);
         try {
           t->native().ReadSnapshot({kThreads}, &collector);
         } catch (const std::exception&) {
           t->native().EndSave("");
           throw;
         }
         t->native().EndSave("saved");
         CHECK_EQ(collector.found.size(), size_t{kRows});
       }},
      {"rows of small norm leave", EndStep, false, true, false, true, Small()},
      {"rows leave that somebody wants", EndStep, false, true, false, true, Small(4096)},
      {"a pass comes behind one that could not be made",
       [](Table* t) {
         EndStep(t);
         EndStep(t);
       },
       false, true, false, true, Ageing()},
  };
}

// Rows that differ, most of them in the file alone.
void Fill(Table* table, const Operation& operation) {
  const bool is_full = operation.policies.when_full;
  if (is_full) CHECK(table->native().TakeEvicted(true).keys.empty());
  // A full table has one row for each bucket: buckets that have more give some up.
  const uint64_t rows = is_full ? 2000 : kRows;
  for (uint64_t first = 0; first < rows; first += 50) Update(table, "sgd", KeysOf(first, 50));
}

struct Twins {
  explicit Twins(const Operation& operation)
      : file(WithFile(ConfigOf(operation), folder, int64_t{4} << 20)), memory(ConfigOf(operation)) {
    Fill(&file, operation);
    Fill(&memory, operation);
  }
  static sok::TableConfig ConfigOf(const Operation& operation) {
    sok::TableConfig config = Config(kDim, 6000);
    config.policies = operation.policies;
    return config;
  }
  void CheckSame() {
    CHECK(Contents(&file.native()) == Contents(&memory.native()));
    CHECK_EQ(file.native().policy_counts().evicted, memory.native().policy_counts().evicted);
    const auto mine = file.native().TakeEvicted(true), theirs = memory.native().TakeEvicted(true);
    CHECK(mine.keys == theirs.keys);
    CHECK(SameBits(mine.rows, theirs.rows));
    CHECK_EQ(file.native().step.load(), memory.native().step.load());
  }

  const Folder folder;
  Table file, memory;
};

void Heal() { reads_left = writes_left = -1; }

// What the table says while its disk fails; empty: nothing.
std::string SaidBy(const std::function<void()>& run) {
  try {
    run();
  } catch (const sok::FileError& error) {
    CHECK_EQ(error.error_number, EIO);
    return error.what();
  }
  return "";
}

void CheckSaid(const Operation& operation, bool is_read, const std::string& said) {
  const bool names = said.find("item_r0.") != std::string::npos &&  // the file
                     (!is_read || said.find("of table 'item'") != std::string::npos);
  if (!names || (is_read && said.find("the row of key ") == std::string::npos))
    check::Fail(__FILE__, __LINE__, std::string(operation.name) + ": " + said);
}

// True if the operation came to its fault.
bool FailsOnce(const Operation& operation, bool is_read, bool stays, int64_t k, int* broke) {
  Twins twins(operation);
  has_failed = false;
  stays_broken = stays;
  (is_read ? reads_left : writes_left) = k;
  std::string said = SaidBy([&] { operation.run(&twins.file); });
  const bool came = has_failed;
  if (operation.is_end) {
    CHECK(said.empty());
    if (came && stays) {
      said = SaidBy([&] { twins.file.Lookup(KeysOf(0, 1)); });
      // Of rows that all leave by their age none is read: the one is what the lookup has made.
      if (!said.empty() || twins.file.native().size() > 1) CheckSaid(operation, is_read, said);
    }
    Heal();
    operation.run(&twins.memory);
    for (Table* table : {&twins.file, &twins.memory}) table->Lookup(KeysOf(0, 1));
    twins.CheckSame();
    return came;
  }
  Heal();
  if (said.empty()) {  // nothing that the caller has to know has failed: what it was for is done
    operation.run(&twins.memory);
    twins.CheckSame();
    return came;
  }
  CheckSaid(operation, is_read, said);
  try {
    twins.file.Lookup(KeysOf(0, 1), false);
  } catch (const sok::FailedPrecondition& error) {
    ++*broke;
    CHECK(operation.may_break);
    CHECK(std::string(error.what()).find("Restore it from a checkpoint") != std::string::npos);
    sok::EmbeddingTable whole(twins.file.native().config());
    twins.file.native().Swap(&whole);
    CHECK(Contents(&twins.file.native()).empty());
    twins.file.Lookup(KeysOf(0, 100));
    return came;
  }
  if (operation.may_be_done && twins.file.native().size() > static_cast<int64_t>(kRows)) operation.run(&twins.memory);
  twins.CheckSame();  // as before
  for (Table* table : {&twins.file, &twins.memory}) operation.run(table);
  twins.CheckSame();
  return came;
}

struct Frames {
  Frames() {
    setenv("SOK_STORAGE_SEGMENT_BYTES", "4096", 1);
    setenv("SOK_STORAGE_FRAMES", "64", 1);
  }
};
const Frames frames;

}  // namespace

TEST(ADiskThatFailsIsToldAndNothingIsLost) {
  for (const Operation& operation : Operations()) {
    for (const bool is_read : {true, false}) {
      int came = 0, broke = 0;
      for (const bool stays : {false, true}) {
        int64_t k = 0;
        while (FailsOnce(operation, is_read, stays, k, &broke)) {
          ++came;
          k += 1 + k;
        }
      }
      if (is_read) CHECK_EQ(came > 0, operation.reads);
      CHECK(operation.may_break || broke == 0);
    }
  }
}

// Changes a bit of a row, wherever it lies in the file.
void DamageRow(const Folder& folder, const float* row) {
  const std::string path = FilesIn(folder.path()).at(0), bytes = ReadFile(path);
  const std::string sought(reinterpret_cast<const char*>(row), kDim * sizeof(float));
  const int file = open(path.c_str(), O_WRONLY);
  size_t at = bytes.find(sought);
  CHECK(at != std::string::npos);
  for (; at != std::string::npos; at = bytes.find(sought, at + 1)) {
    const char other = static_cast<char>(bytes[at] ^ 1);
    CHECK_EQ(pwrite(file, &other, 1, static_cast<off_t>(at)), 1);
  }
  close(file);
}

TEST(ADamagedRowOutlivesAPassAndIsTold) {
  Twins twins({"", EndStep, false, true, false, true, Small()});
  const uint64_t key = 1000;  // one of those of small norm, which have left memory
  DamageRow(twins.folder, twins.memory.Lookup({key}, false).values.data());
  for (Table* table : {&twins.file, &twins.memory}) EndStep(table);
  CHECK_EQ(twins.memory.native().policy_counts().evicted, twins.file.native().policy_counts().evicted + 1);
  CHECK_THROWS(twins.file.Lookup({key}, false), sok::DamagedFile, "the row of key 1000 of table 'item'");
  CHECK_THROWS(Contents(&twins.file.native()), sok::DamagedFile, "the row of key 1000 of table 'item'");
  EndStep(&twins.file);  // stays in the next pass, too, and keeps none from ending
  CHECK_EQ(twins.file.native().step.load(), 2);
  CHECK_EQ(twins.file.Erase({key}), 1);
  CHECK(Contents(&twins.file.native()) == Contents(&twins.memory.native()));
}

TEST(ADamagedRowThatLeavesIsHandedOverAsNothing) {
  Twins twins({"", EndStep, false, true, false, true, Small(4096)});
  EndStep(&twins.memory);
  const auto expected = twins.memory.native().TakeEvicted(true);
  CHECK(expected.keys.size() > 3);
  DamageRow(twins.folder, expected.rows.data());
  EndStep(&twins.file);
  auto found = twins.file.native().TakeEvicted(true);
  CHECK(found.keys == expected.keys);
  for (size_t i = 0; i < kDim; ++i) {
    CHECK(std::isnan(found.rows[i]));
    found.rows[i] = expected.rows[i];
  }
  CHECK(SameBits(found.rows, expected.rows));
  CHECK(Contents(&twins.file.native()) == Contents(&twins.memory.native()));
}
