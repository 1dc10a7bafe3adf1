// Keys that were chosen against the hash make no table slow. What is bounded is work, not time.
#include <algorithm>
#include <set>

#include "../../cpu/numbering.h"
#include "check.h"
#include "chosen_keys.h"
#include "sok/hash_table.h"
#include "threads.h"

namespace {

constexpr int64_t kKeys = 40000;
constexpr int64_t kBatch = 2000;

// How many steps the searches for some keys take.
struct Work {
  double average = 0.0;
  int64_t most = 0;
};

template <class Searched>
Work WorkOf(const Searched& table, const std::vector<uint64_t>& keys) {
  Work work;
  int64_t all = 0;
  for (const uint64_t key : keys) {
    const int64_t probes = table.Probes(key);
    all += probes;
    work.most = std::max(work.most, probes);
  }
  work.average = static_cast<double>(all) / static_cast<double>(keys.size());
  return work;
}

// Inserts keys batch by batch, as steps do; gives how often the index grew.
int64_t InsertAll(sok::HashTable* table, const std::vector<uint64_t>& keys) {
  const ThreadExecutor executor(2);
  sok::Scratch scratch;
  std::set<int64_t> sizes;
  std::vector<uint32_t> rows(kBatch);
  uint32_t next = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kBatch) {
    const int64_t n = std::min<int64_t>(kBatch, static_cast<int64_t>(keys.size() - begin));
    scratch.Reset();
    table->InsertMissing({executor}, &scratch, keys.data() + begin, n, rows.data(), [&](const bool* first, int64_t) {
      for (int64_t k = 0; k < n; ++k)
        if (first[k]) rows[static_cast<size_t>(k)] = next++;
    });
    sizes.insert(table->memory_bytes());
  }
  return static_cast<int64_t>(sizes.size());
}

std::vector<uint64_t> Distinct(std::vector<uint64_t> keys) {
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

}  // namespace

TEST(HashesRunBackwards) {
  for (const uint64_t key : RandomKeys(1000)) {
    CHECK_EQ(KeyOfHash(sok::HashKey(key)), key);
    CHECK_EQ(KeyOfHash(sok::HashKey(key ^ 99), 99), key);
  }
  for (const ChosenKeys& chosen : AllChosenKeys(kKeys)) {
    CHECK_EQ(Distinct(chosen.keys).size(), chosen.keys.size());
  }
}

TEST(ChosenKeysMakeNoIndexSlow) {
  const std::vector<uint64_t> random = RandomKeys(kKeys);
  for (const int64_t max_keys : {int64_t{1} << 17, int64_t{1} << 30}) {  // one segment; 2,048 of them
    for (const ChosenKeys& chosen : AllChosenKeys(2 * kKeys)) {
      const std::vector<uint64_t> keys(chosen.keys.begin(), chosen.keys.begin() + kKeys);
      const std::vector<uint64_t> others(chosen.keys.begin() + kKeys, chosen.keys.end());
      sok::HashTable table(max_keys);
      // Each growth is by a quarter, so that all of them together move a key about five times.
      const int64_t growths = InsertAll(&table, keys);
      CHECK(max_keys > kKeys * 16 || growths <= 24);
      CHECK_EQ(table.size(), kKeys);
      for (const std::vector<uint64_t>* wanted : {&keys, &others, &random}) {
        const Work work = WorkOf(table, *wanted);
        CHECK(work.average <= 2.0);
        CHECK(work.most <= 100);
        if (work.average > 2.0 || work.most > 100) {
          std::fprintf(stderr, "%s: %.1f, at most %lld\n", chosen.name, work.average,
                       static_cast<long long>(work.most));
        }
      }
    }
  }
}

// The measure sees what it is for: with a seed that is known, keys can be chosen.
TEST(AnIndexOfAKnownSeedIsSlow) {
  for (const uint64_t seed : {uint64_t{0}, uint64_t{12345}}) {
    sok::HashTable table(1 << 17, seed);
    const std::vector<uint64_t> keys = KeysBy(kKeys / 10, [&](uint64_t i) { return KeyOfHash(i << 32, seed); });
    InsertAll(&table, keys);
    CHECK(WorkOf(table, keys).average > 100);
  }
}

TEST(AKeyIsInTheSameSegmentInEveryProcess) {
  const std::vector<uint64_t> keys = RandomKeys(kKeys);
  sok::HashTable one(1 << 24, 1), other(1 << 24, 2);
  InsertAll(&one, keys);
  InsertAll(&other, keys);
  CHECK(one.num_segments() > 1);
  bool same_order = true;
  for (int64_t s = 0; s < one.num_segments(); ++s) {
    std::vector<std::pair<uint32_t, uint64_t>> a, b;
    one.ForEachIn(s, [&](uint64_t key, uint32_t row) { a.emplace_back(row, key); });
    other.ForEachIn(s, [&](uint64_t key, uint32_t row) { b.emplace_back(row, key); });
    same_order = same_order && a == b;
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    CHECK(a == b);
  }
  CHECK(!same_order);  // or the seed chooses nothing
}

TEST(ChosenKeysMakeNoNumberingSlow) {
  for (const ChosenKeys& chosen : AllChosenKeys(2 * kKeys)) {
    const std::vector<uint64_t> keys(chosen.keys.begin(), chosen.keys.begin() + kKeys);
    const std::vector<uint64_t> others(chosen.keys.begin() + kKeys, chosen.keys.end());
    std::vector<uint32_t> slots(static_cast<size_t>(sok::Numbering::SlotsFor(kKeys))), numbers(kKeys);
    std::vector<uint64_t> distinct(kKeys);
    sok::Numbering numbering(kKeys, slots.data(), distinct.data());
    numbering.Number(keys.data(), kKeys, numbers.data());
    CHECK(distinct == keys);
    for (const std::vector<uint64_t>* wanted : {&keys, &others}) {
      const Work work = WorkOf(numbering, *wanted);
      CHECK(work.average <= 4.0);
      CHECK(work.most <= 200);
      if (work.average > 4.0 || work.most > 200) {
        std::fprintf(stderr, "%s: %.1f, at most %lld\n", chosen.name, work.average, static_cast<long long>(work.most));
      }
    }
  }
}

TEST(ANumberingOfAKnownSeedIsSlow) {
  constexpr int64_t kFew = kKeys / 10;
  const std::vector<uint64_t> keys = KeysBy(kFew, [](uint64_t i) { return KeyOfNumberingHash(i, 7); });
  std::vector<uint32_t> slots(static_cast<size_t>(sok::Numbering::SlotsFor(kFew))), numbers(kFew);
  std::vector<uint64_t> distinct(kFew);
  sok::Numbering numbering(kFew, slots.data(), distinct.data(), 7);
  numbering.Number(keys.data(), kFew, numbers.data());
  CHECK(WorkOf(numbering, keys).average > 100);
}
