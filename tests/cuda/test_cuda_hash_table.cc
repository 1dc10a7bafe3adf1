// The device's hash table against std::unordered_map, and its promises one by one.
#include <algorithm>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "chosen_keys.h"
#include "detail/places.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/error.h"
#include "sok/hash_table.h"

namespace {

constexpr uint32_t kNoRow = sok::HashTable::kNoRow;
using Keys = std::vector<uint64_t>;
using Rows = std::vector<uint32_t>;

// A table, and the slow statement of what it shall hold.
class Judged {
 public:
  explicit Judged(int64_t capacity, int64_t budget = 0)
      : memory("table 't'", budget), table("table 't'", capacity, &memory), scratch(cuda) {}

  Rows Find(const Keys& keys) {
    DeviceArray<uint64_t> device_keys(keys);
    DeviceArray<uint32_t> rows(static_cast<int64_t>(keys.size()));
    table.Find(cuda, device_keys, rows.size(), rows);
    return rows.Get();
  }

  Rows FindOrInsert(const Keys& keys) {
    DeviceArray<uint64_t> device_keys(keys);
    const int64_t n = static_cast<int64_t>(keys.size());
    DeviceArray<uint32_t> rows(n), leaders(n);
    table.Find(cuda, device_keys, n, rows);
    scratch.Reset();
    table.InsertMissing(
        cuda, &scratch, device_keys, n, rows, leaders, room, [&](int64_t num_rows) { room = num_rows; },
        [](uint64_t key) { throw sok::TableFull("key " + std::to_string(key) + " is new"); });
    std::unordered_map<uint64_t, uint32_t> first;
    const Rows got_leaders = leaders.Get();
    for (size_t i = 0; i < keys.size(); ++i) {
      const bool is_known = expected.count(keys[i]) != 0 && first.count(keys[i]) == 0;
      CHECK_EQ(got_leaders[i], is_known ? kNoRow : first.emplace(keys[i], static_cast<uint32_t>(i)).first->second);
      if (expected.count(keys[i]) != 0) continue;
      expected[keys[i]] = free.empty() ? next++ : free.back();
      if (!free.empty()) free.pop_back();
    }
    return rows.Get();
  }

  Rows Erase(const Keys& keys) {
    DeviceArray<uint64_t> device_keys(keys);
    DeviceArray<uint32_t> erased(static_cast<int64_t>(keys.size()));
    scratch.Reset();
    table.Erase(cuda, &scratch, device_keys, erased.size(), erased);
    const Rows got = erased.Get();
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto found = expected.find(keys[i]);
      CHECK_EQ(got[i], found == expected.end() ? kNoRow : found->second);
      if (found == expected.end()) continue;
      free.push_back(found->second);
      expected.erase(found);
    }
    return got;
  }

  void CheckRows(const Keys& keys, const Rows& rows) {
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto found = expected.find(keys[i]);
      CHECK_EQ(rows[i], found == expected.end() ? kNoRow : found->second);
    }
  }

  // All keys are found, the export is the whole table in row order, and the size is right.
  void CheckAll() {
    Keys keys;
    for (const auto& [key, row] : expected) keys.push_back(key);
    CheckRows(keys, Find(keys));
    const int64_t n = table.SizeToHost(cuda);
    CHECK_EQ(n, static_cast<int64_t>(keys.size()));
    DeviceArray<uint64_t> all_keys(n);
    DeviceArray<uint32_t> all_rows(n);
    scratch.Reset();
    table.Export(cuda, &scratch, all_keys, all_rows);
    const Rows exported = all_rows.Get();
    CHECK(std::is_sorted(exported.begin(), exported.end()));
    CheckRows(all_keys.Get(), exported);
  }

  const sok::Cuda cuda{};
  sok::DeviceMemory memory;
  sok::DeviceHashTable table;
  sok::StreamScratch scratch;
  std::unordered_map<uint64_t, uint32_t> expected;
  std::vector<uint32_t> free;
  uint32_t next = 0;
  int64_t room = 0;
};

Keys Range(uint64_t begin, uint64_t end) {
  Keys keys;
  for (uint64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

}  // namespace

TEST(PlacesOfPositionsAreNeverMoreThanHalfTaken) {
  const int64_t most = (int64_t{1} << 31) - 1;
  for (const int64_t n :
       {int64_t{0}, int64_t{1}, int64_t{32}, int64_t{33}, int64_t{1} << 30, (int64_t{1} << 30) + 1, most}) {
    const int64_t places = sok::PlacesFor(n);
    CHECK(places >= 2 * n && places >= 64 && places <= int64_t{1} << 32);
    CHECK_EQ(places & (places - 1), 0);
  }
}

TEST(AnEmptyTableFindsNothing) {
  Judged t(10);
  CHECK(t.Find({1, 2}) == (Rows{kNoRow, kNoRow}));
  CHECK(t.Find({}).empty());
  CHECK(t.FindOrInsert({}).empty());
  CHECK(t.Erase({}).empty());
  CHECK(t.Erase({5}) == Rows{kNoRow});
  t.CheckAll();
}

TEST(RowsAreNumberedInTheOrderOfFirstAppearance) {
  Judged t(100);
  CHECK(t.FindOrInsert({7, 3, 7, ~0ull, 0, 3, 7}) == (Rows{0, 1, 0, 2, 3, 1, 0}));
  CHECK(t.FindOrInsert({9, 3, 8, 9}) == (Rows{4, 1, 5, 4}));
  CHECK(t.room >= 6);
  t.CheckAll();
}

TEST(EveryKeyIsLegal) {
  const Keys keys = {0, ~0ull, 1ull << 63, 0xFFFFFFFFull, 0xFFFFFFFEull, 1, (1ull << 63) - 1, 0xA5A5A5A5A5A5A5A5ull};
  Judged t(8);
  CHECK(t.Find(keys) == Rows(8, kNoRow));  // the memory of the emulator is full of the last one
  CHECK(t.FindOrInsert(keys) == (Rows{0, 1, 2, 3, 4, 5, 6, 7}));
  t.CheckAll();
}

TEST(OneKeyInsertedByManyThreadsHasOneRow) {
  Judged t(1000);
  Keys keys(5000 / kFewer, 42);
  for (size_t i = 0; i < keys.size(); i += 3) keys[i] = 7 + i % 4;
  const Rows rows = t.FindOrInsert(keys);
  t.CheckRows(keys, rows);
  CHECK_EQ(t.table.SizeToHost(t.cuda), 5);
}

TEST(SizesAroundABlock) {
  for (const uint64_t n : {1, 2, 31, 32, 33, 255, 256, 257}) {
    Judged t(1000);
    const Keys keys = Range(10, 10 + n);
    t.CheckRows(keys, t.FindOrInsert(keys));
    t.CheckAll();
  }
}

TEST(ItGrowsAndKeepsItsRows) {
  constexpr uint64_t kKeys = 20000 / kFewer, kStep = kKeys / 8;
  Judged t(kKeys);
  for (uint64_t at = 0; at < kKeys; at += kStep) {
    const Keys keys = Range(at, at + kStep);
    t.CheckRows(keys, t.FindOrInsert(keys));
  }
  t.CheckAll();
}

TEST(EightTenthsOfThePlacesAreUsed) {
  constexpr uint64_t kBuckets = 700 / kFewer;
  Judged t(8 * kBuckets);
  t.table.Reserve(t.cuda, 8 * kBuckets);
  CHECK_EQ(t.table.view().num_buckets, kBuckets);
  std::mt19937_64 random(3);
  Keys keys(8 * kBuckets);
  for (uint64_t& key : keys) key = random();
  t.CheckRows(keys, t.FindOrInsert(keys));
  CHECK_EQ(t.table.view().num_buckets, kBuckets);
  t.CheckAll();
  // And as full with other keys, after each of the first was erased once.
  for (uint64_t part = 0; part < 8; ++part) {
    const Keys gone(keys.begin() + static_cast<long>(kBuckets * part),
                    keys.begin() + static_cast<long>(kBuckets * (part + 1)));
    t.Erase(gone);
    Keys come(gone);
    for (uint64_t& key : come) key = ~key;
    t.CheckRows(come, t.FindOrInsert(come));
  }
  CHECK_EQ(t.table.view().num_buckets, kBuckets);
  t.CheckAll();
}

// Where all buckets were passed by keys that are still there, none says that a key is not.
TEST(AKeyThatIsNotThereIsNotSoughtForEver) {
  Judged t(16);
  t.table.Reserve(t.cuda, 16);
  CHECK(t.table.view().num_buckets == 2);
  std::mt19937_64 random(5);
  Keys keys = Range(0, 16);
  t.FindOrInsert(keys);
  bool all_passed = false;
  for (int round = 0; round < 1000 && !all_passed; ++round) {  // 60 on average
    std::shuffle(keys.begin(), keys.end(), random);
    t.Erase(Keys(keys.begin(), keys.begin() + 8));
    const Keys come = Range(100 + 8 * static_cast<uint64_t>(round), 108 + 8 * static_cast<uint64_t>(round));
    std::copy(come.begin(), come.end(), keys.begin());
    t.CheckRows(come, t.FindOrInsert(come));
    sok::DeviceBucket buckets[2];
    SOK_CUDA(cudaMemcpy(buckets, t.table.view().buckets, sizeof(buckets), cudaMemcpyDeviceToHost));
    all_passed = buckets[0].passed > 0 && buckets[1].passed > 0;
    CHECK(t.Find({1, 2, 3, ~0ull}).back() == kNoRow);
  }
  CHECK(all_passed);
  t.CheckAll();
}

TEST(AFullTableStoresNothingAndNamesTheKey) {
  Judged t(5);
  t.FindOrInsert({1, 2, 3});
  CHECK_THROWS(t.FindOrInsert({4, 1, 4, 5, 77, 78}), sok::TableFull, "key 77 is new");
  t.next = 3;
  t.expected = {{1, 0}, {2, 1}, {3, 2}};
  t.CheckAll();
  CHECK(t.FindOrInsert({5, 4, 5, 1}) == (Rows{3, 4, 3, 0}));
  CHECK(t.FindOrInsert({5, 4, 3, 2, 1, 5}) == (Rows{3, 4, 2, 1, 0, 3}));  // full, but nothing is new
  CHECK(t.Erase({3}) == Rows{2});
  CHECK(t.FindOrInsert({9}) == Rows{2});
  t.CheckAll();
}

TEST(ErasedNumbersAreUsedAgainTheLastFirst) {
  Judged t(100);
  t.FindOrInsert(Range(0, 10));
  CHECK(t.Erase({3, 3, 50, 7, 3}) == (Rows{3, kNoRow, kNoRow, 7, kNoRow}));
  CHECK(t.FindOrInsert({100, 101, 102, 100}) == (Rows{7, 3, 10, 7}));
  t.CheckAll();
}

TEST(RoomThatCannotBeMadeLeavesTheTableAsItWas) {
  Judged t(100);
  t.FindOrInsert({1, 2});
  DeviceArray<uint64_t> keys(Keys{2, 3});
  DeviceArray<uint32_t> rows(2), leaders(2);
  t.table.Find(t.cuda, keys, 2, rows);
  CHECK_THROWS(
      t.table.InsertMissing(
          t.cuda, &t.scratch, keys, 2, rows, leaders, 0, [](int64_t) { throw sok::OutOfMemory("no slab"); }, nullptr),
      sok::OutOfMemory, "no slab");
  t.CheckAll();
  CHECK(t.FindOrInsert({3}) == Rows{2});
}

TEST(ErasedNumbersAreCountedOnBeforeNewOnes) {
  Judged t(100000);
  t.table.TakeNoSpareRows();
  for (uint64_t round = 0; round < 5; ++round) {
    t.FindOrInsert(Range(1000 * round, 1000 * round + 100));
    CHECK_EQ(t.room, 100);
    t.Erase(Range(1000 * round, 1000 * round + 100));
  }
  t.FindOrInsert(Range(0, 130));
  CHECK_EQ(t.room, 130);
  t.CheckAll();
}

TEST(ABudgetIsKeptAndNamed) {
  constexpr uint32_t kFit = 4000 / kFewer;
  const Keys too_many = Range(0, 9000);
  Judged t(1 << 20, 100 << 10);
  t.FindOrInsert(Range(0, kFit));
  CHECK_THROWS(t.FindOrInsert(too_many), sok::OutOfMemory, "table 't': no device memory for a larger key index");
  CHECK_THROWS(t.FindOrInsert(too_many), sok::OutOfMemory, "of a budget of 102400");
  t.next = kFit;
  t.expected.clear();
  for (uint32_t key = 0; key < kFit; ++key) t.expected[key] = key;
  t.CheckAll();
}

TEST(AThrongOfCallsDoesWhatAMapDoes) {
  std::mt19937_64 random(
      std::getenv("SOK_EMULATOR_SEED") != nullptr ? std::strtoull(std::getenv("SOK_EMULATOR_SEED"), nullptr, 10) : 11);
  Judged t(600);
  for (uint64_t round = 0; round < 40 / kFewer; ++round) {
    Keys keys(random() % 400);
    for (uint64_t& key : keys) key = random() % 700 * (random() % 2 == 0 ? 1 : 0x100000001ull);
    if (round % 3 == 2) {
      t.Erase(keys);
    } else {
      std::set<uint64_t> after(keys.begin(), keys.end());
      for (const auto& [key, row] : t.expected) after.insert(key);
      if (after.size() > 600) continue;
      t.CheckRows(keys, t.FindOrInsert(keys));
    }
    t.CheckRows(keys, t.Find(keys));
  }
  t.CheckAll();
}

TEST(TooManyKeysAtOnceAreRefused) {
  Judged t(10);
  CHECK_THROWS(t.table.Erase(t.cuda, &t.scratch, nullptr, int64_t{1} << 31, nullptr), sok::InvalidArgument, "2^31");
  CHECK_THROWS(
      t.table.InsertMissing(t.cuda, &t.scratch, nullptr, int64_t{1} << 31, nullptr, nullptr, 0, nullptr, nullptr),
      sok::InvalidArgument, "2147483648");
}

// Buckets that keys had to pass by, all together: n^2 / 20 if n keys want one bucket.
TEST(ChosenKeysMakeNoIndexSlow) {
  constexpr uint64_t kKeys = 3000 / kFewer;
  for (const ChosenKeys& chosen : AllChosenKeys(kKeys)) {
    Judged judged(10000);
    judged.CheckRows(chosen.keys, judged.FindOrInsert(chosen.keys));
    const sok::HashTableView view = judged.table.view();
    std::vector<sok::DeviceBucket> buckets(static_cast<size_t>(view.num_buckets));
    SOK_CUDA(
        cudaMemcpy(buckets.data(), view.buckets, buckets.size() * sizeof(sok::DeviceBucket), cudaMemcpyDeviceToHost));
    uint64_t passed = 0;
    for (const sok::DeviceBucket& bucket : buckets) passed += bucket.passed;
    CHECK(passed <= kKeys);
    judged.CheckAll();
  }
}
