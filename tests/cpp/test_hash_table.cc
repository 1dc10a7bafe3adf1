#include "sok/hash_table.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "threads.h"

namespace {

using sok::HashTable;

std::vector<uint32_t> FindAll(const HashTable& table, const std::vector<uint64_t>& keys) {
  std::vector<uint32_t> rows(keys.size());
  table.Find(keys.data(), static_cast<int64_t>(keys.size()), rows.data());
  return rows;
}

void CheckHolds(const HashTable& table, const std::unordered_map<uint64_t, uint32_t>& expected) {
  CHECK_EQ(table.size(), static_cast<int64_t>(expected.size()));
  std::vector<uint64_t> keys;
  for (const auto& [key, row] : expected) keys.push_back(key);
  const std::vector<uint32_t> rows = FindAll(table, keys);
  int64_t wrong = 0;
  for (size_t i = 0; i < keys.size(); ++i) wrong += rows[i] != expected.at(keys[i]) || table.Find(keys[i]) != rows[i];
  CHECK_EQ(wrong, 0);
  std::unordered_map<uint64_t, uint32_t> seen;
  table.ForEach([&](uint64_t key, uint32_t row) { CHECK(seen.emplace(key, row).second); });
  CHECK(seen == expected);
}

// One key at a time: the row of key, and whether it was added just now with row number `row`.
std::pair<uint32_t, bool> FindOrInsert(HashTable* table, uint64_t key, uint32_t row) {
  static sok::Scratch scratch;
  const uint32_t found = table->Find(key);
  if (found != HashTable::kNoRow) return {found, false};
  scratch.Reset();
  const sok::SerialExecutor executor;
  uint32_t got = HashTable::kNoRow;
  table->InsertMissing({executor}, &scratch, &key, 1, &got, [&](const bool*, int64_t) { got = row; });
  return {got, true};
}

}  // namespace

TEST(AnEmptyTableFindsNothing) {
  HashTable table(100);
  CHECK_EQ(table.Find(0), HashTable::kNoRow);
  CHECK_EQ(table.Erase(0), HashTable::kNoRow);
  CHECK_EQ(FindAll(table, {1, 2, 3})[2], HashTable::kNoRow);
  CheckHolds(table, {});
}

TEST(EveryKeyIsLegal) {
  HashTable table(1000);
  std::unordered_map<uint64_t, uint32_t> expected;
  auto add = [&](uint64_t key) {
    const uint32_t row = static_cast<uint32_t>(expected.size());
    if (!expected.emplace(key, row).second) return;
    CHECK_EQ(table.Find(key), HashTable::kNoRow);
    const auto [got, added] = FindOrInsert(&table, key, row);
    CHECK(added);
    CHECK_EQ(got, row);
  };
  for (int bit = 0; bit < 64; ++bit) {
    const uint64_t power = uint64_t{1} << bit;
    for (const uint64_t key : {power - 1, power, power + 1, ~power, ~(power - 1)}) add(key);
  }
  // Round constants of well-known hashes: what an implementation might have reserved.
  for (const uint64_t key : {0xB5C0FBCFEC4D3B2Full, 0xE9B5DBA58189DBBCull, 0xBF58476D1CE4E5B9ull}) add(key);
  CheckHolds(table, expected);
  for (auto it = expected.begin(); it != expected.end(); it = expected.erase(it)) {
    CHECK_EQ(table.Erase(it->first), it->second);
  }
  CheckHolds(table, expected);
}

TEST(InsertingTwiceKeepsTheFirstRow) {
  HashTable table(10);
  CHECK(FindOrInsert(&table, 5, 1).second);
  const auto [row, added] = FindOrInsert(&table, 5, 2);
  CHECK(!added);
  CHECK_EQ(row, 1u);
  CHECK_EQ(table.size(), 1);
}

TEST(KeysThatAreThereKeepTheirRows) {
  // So it is with keys that another call adds between a search and this. Rows that equal positions must not confuse.
  for (const int threads : {1, 4}) {
    const ThreadExecutor executor(threads);
    HashTable table(1 << 21);  // four segments
    std::unordered_map<uint64_t, uint32_t> expected;
    auto key = [](uint32_t i) { return i * 0x9E3779B97F4A7C15ull; };
    for (uint32_t i = 0; i < 20000; ++i) {
      FindOrInsert(&table, key(i), i);
      expected.emplace(key(i), i);
    }
    std::vector<uint64_t> keys;
    for (uint32_t i = 0; i < 60000; ++i) keys.push_back(key(i % 40000));
    std::vector<uint32_t> rows(keys.size());
    sok::Scratch scratch;
    int64_t wrong = 0, num_first = 0;
    table.InsertMissing({executor}, &scratch, keys.data(), 60000, rows.data(), [&](const bool* first, int64_t num_new) {
      for (uint32_t k = 0; k < 60000; ++k) {
        wrong += first[k] != (k >= 20000 && k < 40000);
        if (first[k]) rows[k] = 100000 + k;
        num_first += first[k];
      }
      CHECK_EQ(num_first, num_new);
    });
    for (uint32_t k = 0; k < 60000; ++k) {
      const uint32_t row = k % 40000 < 20000 ? k % 40000 : 100000 + k % 40000;
      wrong += rows[k] != row;
      expected.emplace(keys[k], row);
    }
    CHECK_EQ(wrong, 0);
    CheckHolds(table, expected);
  }
}

TEST(GrowingLosesNothing) {
  // One segment, several segments, and keys that agree in their low or high bits.
  const int64_t n = 300000 / kFewer;
  for (const int64_t max_keys : {int64_t{1}, n, int64_t{1} << 24}) {
    for (const int shift : {0, 20, 40}) {
      HashTable table(max_keys);
      int64_t wrong = 0;
      for (int64_t i = 0; i < n; ++i) {
        wrong += !FindOrInsert(&table, static_cast<uint64_t>(i) << shift, static_cast<uint32_t>(i)).second;
      }
      for (int64_t i = 0; i < n; ++i) wrong += table.Find(static_cast<uint64_t>(i) << shift) != i;
      for (int64_t i = n; i < 2 * n; ++i) wrong += table.Find(static_cast<uint64_t>(i) << shift) != HashTable::kNoRow;
      CHECK_EQ(wrong, 0);
      CHECK_EQ(table.size(), n);
      if (max_keys > 1) break;  // the pattern of keys matters most where segments overflow
    }
  }
}

TEST(MemoryStaysNearWhatKeysNeed) {
  HashTable table(1 << 20);
  for (uint64_t i = 0; i < 1 << 20; ++i) FindOrInsert(&table, i * 0x9E3779B97F4A7C15ull, static_cast<uint32_t>(i));
  // 64 bytes hold five keys; a load of 53 % is the least that growth by half may leave.
  CHECK(table.memory_bytes() < (int64_t{1} << 20) * 64 / 5 * 15 / 8);
}

TEST(SegmentsDoNotGrowAllAtOnce) {
  const ThreadExecutor executor(4);
  sok::Scratch scratch;
  HashTable table(1 << 23);  // 16 segments
  const int64_t batch = 4096, n = 1 << 20;
  std::vector<uint64_t> keys(batch);
  std::vector<uint32_t> rows(batch);
  int64_t bytes = 0;
  int growing = 0;
  for (int64_t at = 0; at < n; at += batch) {
    for (int64_t i = 0; i < batch; ++i) keys[static_cast<size_t>(i)] = static_cast<uint64_t>(at + i) * 77;
    scratch.Reset();
    table.InsertMissing({executor}, &scratch, keys.data(), batch, rows.data(), [&](const bool*, int64_t) {
      for (int64_t i = 0; i < batch; ++i) rows[static_cast<size_t>(i)] = static_cast<uint32_t>(at + i);
    });
    const int64_t grown = table.memory_bytes() - bytes;
    bytes += grown;
    if (at < n / 4) continue;  // as long as segments are small, a batch is much for each
    growing += grown > 0;
    CHECK(grown * 12 < bytes);  // half of two of the 16, which are not equal
  }
  CHECK(growing > 20);
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) wrong += table.Find(static_cast<uint64_t>(i) * 77) != i;
  CHECK_EQ(wrong, 0);
}

TEST(ReservingRebuildsNothingLater) {
  for (const int64_t n : {1, 100, 100000, 3000000 / kFewer}) {
    HashTable table(n);
    table.Reserve(n);
    const int64_t bytes = table.memory_bytes();
    for (int64_t i = 0; i < n; ++i) FindOrInsert(&table, static_cast<uint64_t>(i) * 77, static_cast<uint32_t>(i));
    CHECK_EQ(table.memory_bytes(), bytes);
    table.Reserve(1);
    CHECK_EQ(table.memory_bytes(), bytes);
    CHECK_EQ(table.size(), n);
  }
}

TEST(BehavesAsAMapUnderRandomUse) {
  std::mt19937_64 random(1);
  HashTable table(1000);
  std::unordered_map<uint64_t, uint32_t> expected;
  for (int step = 0; step < 200000 / kFewer; ++step) {
    // A drifting window of keys: most get erased again, so that erased places pile up and are reclaimed.
    const uint64_t key = static_cast<uint64_t>(step / 40) + random() % 3000;
    if (random() % 2 == 0) {
      const uint32_t row = static_cast<uint32_t>(step);
      const auto [at, added] = expected.emplace(key, row);
      const auto [got, was_added] = FindOrInsert(&table, key, row);
      CHECK_EQ(got, at->second);
      CHECK_EQ(was_added, added);
    } else {
      const auto at = expected.find(key);
      CHECK_EQ(table.Erase(key), at == expected.end() ? HashTable::kNoRow : at->second);
      if (at != expected.end()) expected.erase(at);
    }
    if (step % (40000 / kFewer) == 0) CheckHolds(table, expected);
  }
  CheckHolds(table, expected);
}

TEST(EndlessTurnoverDoesNotGrowTheTable) {
  HashTable table(1 << 16);
  const uint64_t live = 10000;
  for (uint64_t i = 0; i < live; ++i) FindOrInsert(&table, i, static_cast<uint32_t>(i));
  const int64_t bytes = table.memory_bytes();
  for (uint64_t i = live; i < 60 * live / kFewer; ++i) {
    CHECK(table.Erase(i - live) != HashTable::kNoRow);
    FindOrInsert(&table, i, static_cast<uint32_t>(i % live));
  }
  CHECK_EQ(table.size(), static_cast<int64_t>(live));
  CHECK(table.memory_bytes() <= 2 * bytes);
}

// Of a segment of few buckets, each may have been passed by a key that is still there: none says then that a key is not.
TEST(AKeyThatIsNotThereIsNotSoughtForEver) {
  std::mt19937_64 random(5);
  uint64_t next = 0;
  for (const size_t size : {5, 8, 12, 16, 30}) {
    HashTable table(1000);
    std::vector<uint64_t> keys(size);
    uint32_t rows = 0;
    for (uint64_t& key : keys) FindOrInsert(&table, key = ++next, rows++);
    for (int turn = 0; turn < 20000; ++turn) {
      uint64_t& key = keys[random() % size];
      CHECK(table.Erase(key) != HashTable::kNoRow);
      CHECK(FindOrInsert(&table, key = ++next, rows++).second);
      CHECK_EQ(table.Find(~next), HashTable::kNoRow);
      CHECK(FindAll(table, {~next, key, ~next - 1}) ==
            std::vector<uint32_t>({HashTable::kNoRow, rows - 1, HashTable::kNoRow}));
      CHECK(table.Probes(~next) > 0);
    }
    CHECK_EQ(table.size(), static_cast<int64_t>(size));
  }
}

TEST(TheOrderOfKeysRepeats) {
  std::vector<uint64_t> order[2];
  for (auto& keys : order) {
    HashTable table(5000);
    for (uint64_t i = 0; i < 5000; ++i) FindOrInsert(&table, i * i, static_cast<uint32_t>(i));
    table.ForEach([&](uint64_t key, uint32_t) { keys.push_back(key); });
  }
  CHECK(order[0] == order[1]);
}

TEST(ManyThreadsFindAtTheSameTime) {
  constexpr uint64_t kKeys = 100000 / kFewer;
  HashTable table(kKeys);
  std::vector<uint64_t> keys;
  for (uint64_t i = 0; i < kKeys; ++i) {
    keys.push_back(i * 0x9E3779B97F4A7C15ull);
    FindOrInsert(&table, keys.back(), static_cast<uint32_t>(i));
  }
  std::vector<int64_t> wrong(4);
  RunTogether(4, [&](int thread) {
    const std::vector<uint32_t> rows = FindAll(table, keys);
    for (size_t i = 0; i < keys.size(); ++i) wrong[static_cast<size_t>(thread)] += rows[i] != i;
  });
  for (const int64_t count : wrong) CHECK_EQ(count, 0);
}

TEST(ManyKeysAtOnceGetTheRowsOfTheirFirstPositions) {
  for (const int threads : {1, 4}) {
    const ThreadExecutor executor(threads);
    HashTable table(1 << 21);  // four segments
    std::unordered_map<uint64_t, uint32_t> expected;
    std::mt19937_64 rng(11);
    for (int batch = 0; batch < 8; ++batch) {
      std::vector<uint64_t> keys;  // new to the table, with repeats among themselves
      for (int k = 0; k < 20000; ++k)
        keys.push_back((rng() % 15000 * 8 + static_cast<uint64_t>(batch)) * 0x9E3779B97F4A7C15ull);
      std::vector<uint32_t> rows(keys.size(), 12345);
      std::unordered_map<uint64_t, uint32_t> fresh;
      sok::Scratch scratch;
      const int64_t m = static_cast<int64_t>(keys.size());
      auto number = [&](const bool* first, int64_t num_new) {
        int64_t count = 0;
        for (size_t k = 0; k < keys.size(); ++k) {
          const uint32_t row = static_cast<uint32_t>(expected.size() + fresh.size());
          CHECK_EQ(first[k], fresh.emplace(keys[k], row).second);
          if (first[k]) rows[k] = row;
          count += first[k];
        }
        CHECK_EQ(count, num_new);
      };
      if (batch % 2 == 1) {  // refused at the last moment: nothing must be left
        auto refuse = [&](const bool*, int64_t) { throw sok::TableFull("no"); };
        CHECK_THROWS(table.InsertMissing({executor}, &scratch, keys.data(), m, rows.data(), refuse), sok::TableFull,
                     "no");
        CheckHolds(table, expected);
      }
      table.InsertMissing({executor}, &scratch, keys.data(), m, rows.data(), number);
      int64_t wrong = 0;
      for (size_t k = 0; k < keys.size(); ++k) wrong += rows[k] != fresh[keys[k]];
      CHECK_EQ(wrong, 0);
      expected.insert(fresh.begin(), fresh.end());
      CheckHolds(table, expected);
    }
  }
}
