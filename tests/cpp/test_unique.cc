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

TEST(GroupsHoldAscendingPositionsOfOneKeyAndDoNotDependOnThreads) {
  for (const Keys& keys : Cases()) {
    const int64_t n = static_cast<int64_t>(keys.size());
    std::vector<uint32_t> first_offsets, first_positions;
    for (const int threads : {1, 5}) {
      const ThreadExecutor executor(threads);
      sok::Scratch scratch;
      const sok::Groups groups = sok::GroupKeys({executor}, &scratch, keys.data(), n);
      const std::vector<uint32_t> offsets(groups.offsets, groups.offsets + groups.num_groups + 1);
      const std::vector<uint32_t> positions(groups.positions, groups.positions + n);
      CHECK_EQ(groups.num_groups, static_cast<int64_t>(Judge(keys).distinct.size()));
      CHECK_EQ(offsets.front(), 0u);
      CHECK_EQ(offsets.back(), static_cast<uint32_t>(n));
      int64_t wrong = 0;
      for (size_t g = 0; g + 1 < offsets.size(); ++g) {
        wrong += offsets[g] >= offsets[g + 1];
        for (uint32_t i = offsets[g] + 1; i < offsets[g + 1]; ++i) {
          wrong += positions[i - 1] >= positions[i] || keys[positions[i - 1]] != keys[positions[i]];
        }
      }
      CHECK_EQ(wrong, 0);
      if (threads == 1) {
        first_offsets = offsets;
        first_positions = positions;
      }
      CHECK(offsets == first_offsets && positions == first_positions);
    }
  }
}

TEST(GroupsAreSummed) {
  const Keys keys = {7, 3, 7, 7, 3, 5};
  const std::vector<float> values = {1, 10, 2, 20, 3, 30, 4, 40, 5, 50, 6, 60};
  const ThreadExecutor executor(3);
  sok::Scratch scratch;
  const sok::Groups groups = sok::GroupKeys({executor}, &scratch, keys.data(), 6);
  const uint32_t* order = sok::FirstAppearance({executor}, &scratch, groups, 6);
  float sums[6];
  sok::SumGroups({executor}, groups, values.data(), nullptr, nullptr, order, 2, sums);
  const float plain[] = {8, 80, 7, 70, 6, 60};
  for (int i = 0; i < 6; ++i) CHECK_EQ(sums[i], plain[i]);

  const uint32_t source[] = {5, 4, 3, 2, 1, 0};
  const float factor[] = {1, 2, 3, 4, 5, 6};
  sok::SumGroups({executor}, groups, values.data(), source, factor, order, 2, sums);
  // 7: 1*6 + 3*4 + 4*3; 3: 2*5 + 5*2; 5: 6*1
  const float scaled[] = {30, 300, 20, 200, 6, 60};
  for (int i = 0; i < 6; ++i) CHECK_EQ(sums[i], scaled[i]);
}
