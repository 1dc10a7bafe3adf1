#include "../../cpu/numbering.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"

namespace {

// Against a map: numbers in order of first appearance, one by one and many at once.
void CheckAgainstMap(const std::vector<uint64_t>& keys, uint64_t seed) {
  const int64_t n = static_cast<int64_t>(keys.size());
  const int64_t num_slots = sok::Numbering::SlotsFor(n);
  CHECK(num_slots >= 2 * n && (num_slots & (num_slots - 1)) == 0);
  std::vector<uint32_t> slots(static_cast<size_t>(num_slots), 7), again(slots), numbers(keys.size());
  std::vector<uint64_t> distinct(keys.size() + 1), distinct_again(distinct), order;
  std::unordered_map<uint64_t, uint32_t> expected;
  sok::Numbering one_by_one(n, slots.data(), distinct.data(), seed),
      at_once(n, again.data(), distinct_again.data(), seed);
  at_once.Number(keys.data(), n, numbers.data());
  int64_t wrong = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto [found, is_new] = expected.emplace(keys[i], static_cast<uint32_t>(expected.size()));
    if (is_new) order.push_back(keys[i]);
    wrong += one_by_one.NumberOf(keys[i]) != found->second || numbers[i] != found->second;
  }
  CHECK_EQ(wrong, 0);
  CHECK_EQ(one_by_one.count(), static_cast<uint32_t>(order.size()));
  CHECK_EQ(at_once.count(), one_by_one.count());
  CHECK(std::equal(order.begin(), order.end(), distinct.begin()));
  CHECK(std::equal(order.begin(), order.end(), distinct_again.begin()));
}

}  // namespace

TEST(NumbersFollowFirstAppearance) {
  std::mt19937_64 random(5);
  for (const size_t n : {0, 1, 2, 7, 8, 9, 16, 17, 1000, 70000}) {
    for (const uint64_t below : {uint64_t{1}, uint64_t{3}, uint64_t{500}, uint64_t{1} << 40, UINT64_MAX}) {
      std::vector<uint64_t> keys(n);
      for (uint64_t& key : keys) key = random() % below;
      CheckAgainstMap(keys, random());
    }
  }
}

TEST(KeysThatLookAlikeAreToldApart) {
  std::vector<uint64_t> low, high, ends = {0, UINT64_MAX, uint64_t{1} << 63, INT64_MAX, UINT32_MAX, 0, UINT64_MAX};
  for (uint64_t i = 0; i < 5000; ++i) {
    low.push_back(i % 2500);
    high.push_back(i << 51 | i >> 3);
  }
  for (const uint64_t seed : {uint64_t{0}, UINT64_MAX, uint64_t{12345}}) {
    CheckAgainstMap(low, seed);
    CheckAgainstMap(high, seed);
    CheckAgainstMap(ends, seed);
  }
}
