#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/error.h"
#include "sok/scratch.h"
#include "sok/unique.h"

namespace {

struct Distinct {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> inverse, counts;
};

Distinct OnDevice(const std::vector<uint64_t>& keys, sok::UniqueOrder order, bool counts = true) {
  const int64_t n = static_cast<int64_t>(keys.size());
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  DeviceArray<uint64_t> given(keys), distinct(n);
  DeviceArray<uint32_t> inverse(n), count(n);
  const int64_t found =
      sok::UniqueToHost(cuda, &scratch, given, n, order, distinct, inverse, counts ? count.data() : nullptr);
  Distinct got = {distinct.Get(), inverse.Get(), count.Get()};
  got.keys.resize(static_cast<size_t>(found));
  got.counts.resize(static_cast<size_t>(found));
  return got;
}

Distinct OnCpu(const std::vector<uint64_t>& keys) {
  const int64_t n = static_cast<int64_t>(keys.size());
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  Distinct got = {std::vector<uint64_t>(keys.size()), std::vector<uint32_t>(keys.size()),
                  std::vector<uint32_t>(keys.size())};
  const int64_t found =
      sok::Unique(sok::Cpu{executor}, &scratch, keys.data(), n, got.keys.data(), got.inverse.data(), got.counts.data());
  got.keys.resize(static_cast<size_t>(found));
  got.counts.resize(static_cast<size_t>(found));
  return got;
}

// Skewed: a few keys come up often, many seldom; among them every word that could be taken for a mark.
std::vector<uint64_t> Skewed(int64_t n, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<uint64_t> keys;
  const uint64_t extreme[] = {0, ~0ull, 1ull << 63, 0xFFFFFFFFull, ~0ull - 1};
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t draw = rng();
    keys.push_back(draw % 8 == 0  ? extreme[(draw >> 8) % 5]
                   : draw % 8 < 4 ? (draw >> 8) % 20
                                  : (draw >> 8) % static_cast<uint64_t>(n));
  }
  return keys;
}

}  // namespace

TEST(OrderOfFirstAppearanceIsThatOfTheCpu) {
  for (const int64_t n : {0, 1, 2, 255, 256, 257, 4096, 4097, 9000}) {
    const std::vector<uint64_t> keys = Skewed(n, 7 + static_cast<uint64_t>(n));
    const Distinct expected = OnCpu(keys), got = OnDevice(keys, sok::UniqueOrder::kFirstAppearance);
    CHECK(got.keys == expected.keys);
    CHECK(got.inverse == expected.inverse);
    CHECK(got.counts == expected.counts);
  }
}

TEST(AnyOrderHoldsTheSameKeys) {
  for (const int64_t n : {1, 300, 5000}) {
    const std::vector<uint64_t> keys = Skewed(n, 3);
    const Distinct expected = OnCpu(keys), got = OnDevice(keys, sok::UniqueOrder::kAny);
    CHECK_EQ(got.keys.size(), expected.keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK(got.inverse[i] < got.keys.size());
      CHECK_EQ(got.keys[got.inverse[i]], keys[i]);
      CHECK_EQ(got.counts[got.inverse[i]], expected.counts[expected.inverse[i]]);
    }
  }
}

TEST(AllEqualAllDistinctAndWithoutCounts) {
  for (const bool equal : {true, false}) {
    std::vector<uint64_t> keys;
    for (uint64_t i = 0; i < 3000; ++i) keys.push_back(equal ? ~0ull : i << 32);
    const Distinct got = OnDevice(keys, sok::UniqueOrder::kFirstAppearance, false);
    CHECK_EQ(got.keys.size(), equal ? 1u : 3000u);
    for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(got.keys[got.inverse[i]], keys[i]);
  }
}

TEST(TooManyKeysAreRefused) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  DeviceArray<uint64_t> keys(1);
  DeviceArray<uint32_t> inverse(1);
  CHECK_THROWS(
      sok::UniqueToHost(cuda, &scratch, keys, int64_t{1} << 31, sok::UniqueOrder::kAny, keys, inverse, nullptr),
      sok::InvalidArgument, "2147483648");
}
