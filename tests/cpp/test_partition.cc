#include "sok/partition.h"

#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "threads.h"

TEST(OwnersAreNeverNegative) {
  CHECK_EQ(sok::Owner(static_cast<uint64_t>(-1), 3, false), 2);
  CHECK_EQ(sok::Owner(static_cast<uint64_t>(-3), 3, false), 0);
  CHECK_EQ(sok::Owner(static_cast<uint64_t>(INT64_MIN), 3, false), 1);  // -2^63 = -(2 mod 3)
  CHECK_EQ(sok::Owner(~uint64_t{0}, 3, true), 0);                       // 2^64 - 1 is divisible by 3
  CHECK_EQ(sok::Owner(uint64_t{1} << 63, 3, true), 2);
  for (const int world : {1, 2, 7, 1000}) {
    for (const uint64_t key : {uint64_t{0}, uint64_t{5}, ~uint64_t{0}, uint64_t{1} << 63}) {
      for (const bool is_unsigned : {false, true}) {
        const int owner = sok::Owner(key, world, is_unsigned);
        CHECK(owner >= 0 && owner < world);
      }
    }
  }
}

TEST(KeysAreBucketedByOwnerInOrderOfFirstAppearance) {
  const uint64_t keys[] = {5, 2, 5, 3, 4, static_cast<uint64_t>(-1)};
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  int64_t index[6];
  const sok::Route route = sok::RouteKeys({executor}, &scratch, keys, 6, 2, false, index);
  const uint64_t expected[] = {2, 4, 5, 3, static_cast<uint64_t>(-1)};
  CHECK_EQ(route.num_unique, 5);
  CHECK_EQ(route.counts[0], 2);
  CHECK_EQ(route.counts[1], 3);
  for (int i = 0; i < 5; ++i) CHECK_EQ(route.keys[i], expected[i]);
  // Answers: header, 2, 4, header, 5, 3, -1.
  const int64_t places[] = {4, 1, 4, 5, 2, 6};
  for (int i = 0; i < 6; ++i) CHECK_EQ(index[i], places[i]);
}

TEST(ManyKeysGoWhereTheirAnswersWillBe) {
  std::mt19937_64 random(4);
  for (const int world : {1, 2, 3, 8}) {
    for (const int64_t n : {0, 1, 40000}) {
      const ThreadExecutor executor(4);
      sok::Scratch scratch;
      std::vector<uint64_t> keys(static_cast<size_t>(n));
      for (uint64_t& key : keys) key = random() % 9000 - 4000;
      std::vector<int64_t> index(keys.size());
      const sok::Route route = sok::RouteKeys({executor}, &scratch, keys.data(), n, world, false, index.data());
      std::vector<uint64_t> answer;  // which key each answer row is for; headers hold a key that is nobody's
      const uint64_t* next = route.keys;
      int64_t wrong = 0;
      for (int r = 0; r < world; ++r) {
        answer.push_back(~uint64_t{0} >> 1);
        for (int64_t i = 0; i < route.counts[r]; ++i) {
          wrong += sok::Owner(*next, world, false) != r;
          answer.push_back(*next++);
        }
      }
      CHECK_EQ(next - route.keys, route.num_unique);
      for (size_t i = 0; i < keys.size(); ++i) wrong += answer[static_cast<size_t>(index[i])] != keys[i];
      CHECK_EQ(wrong, 0);
    }
  }
}
