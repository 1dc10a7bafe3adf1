#include "sok/unique.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "threads.h"

namespace {

using Keys = std::vector<uint64_t>;

std::vector<Keys> Cases() {
  std::mt19937_64 random(2);
  std::vector<Keys> cases = {{}, {~uint64_t{0}}, Keys(5000, 9), {0, ~uint64_t{0}, uint64_t{1} << 63, 0}};
  Keys distinct(30000), skewed(100000), strided(70000);
  for (size_t i = 0; i < distinct.size(); ++i) distinct[i] = i;
  std::shuffle(distinct.begin(), distinct.end(), random);
  for (uint64_t& key : skewed) key = random() % (uint64_t{1} << (random() % 16));
  for (size_t i = 0; i < strided.size(); ++i) strided[i] = i << 44;
  cases.insert(cases.end(), {distinct, skewed, strided});
  return cases;
}

struct Expected {
  Keys distinct;
  std::vector<uint32_t> inverse, counts;
};

Expected Judge(const Keys& keys) {
  Expected expected;
  std::unordered_map<uint64_t, uint32_t> place;
  for (const uint64_t key : keys) {
    const auto [at, is_new] = place.emplace(key, static_cast<uint32_t>(place.size()));
    if (is_new) {
      expected.distinct.push_back(key);
      expected.counts.push_back(0);
    }
    ++expected.counts[at->second];
    expected.inverse.push_back(at->second);
  }
  return expected;
}

}  // namespace

TEST(KeysComeInOrderOfFirstAppearanceForAnyNumberOfThreads) {
  for (const int threads : {1, 2, 3, 8}) {
    const ThreadExecutor executor(threads);
    sok::Scratch scratch;
    for (const Keys& keys : Cases()) {
      const int64_t n = static_cast<int64_t>(keys.size());
      Keys distinct(keys.size());
      std::vector<uint32_t> inverse(keys.size()), counts(keys.size());
      scratch.Reset();
      const int64_t found =
          sok::Unique({executor}, &scratch, keys.data(), n, distinct.data(), inverse.data(), counts.data());
      distinct.resize(static_cast<size_t>(found));
      counts.resize(static_cast<size_t>(found));
      const Expected expected = Judge(keys);
      CHECK(distinct == expected.distinct);
      CHECK(inverse == expected.inverse);
      CHECK(counts == expected.counts);
      scratch.Reset();
      CHECK_EQ(sok::Unique({executor}, &scratch, keys.data(), n, distinct.data(), inverse.data(), nullptr), found);
    }
  }
}
