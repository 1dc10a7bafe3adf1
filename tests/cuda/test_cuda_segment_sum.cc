#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "detail/vector4.h"
#include "device_memory.h"
#include "sok/error.h"
#include "sok/segment_sum.h"

namespace {

// Small whole numbers: their sums are exact in any order.
std::vector<float> Whole(int64_t n, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<float> x;
  for (int64_t i = 0; i < n; ++i) x.push_back(static_cast<float>(static_cast<int>(rng() % 17) - 8));
  return x;
}

std::vector<float> Sums(const std::vector<float>& data, const std::vector<int64_t>& ids, int64_t dim,
                        int64_t num_segments) {
  std::vector<float> sums(static_cast<size_t>(dim * num_segments));
  for (size_t i = 0; i < ids.size(); ++i)
    for (int64_t j = 0; ids[i] >= 0 && ids[i] < num_segments && j < dim; ++j)
      sums[static_cast<size_t>(ids[i] * dim + j)] += data[i * static_cast<size_t>(dim) + static_cast<size_t>(j)];
  return sums;
}

template <class Id, class T>
std::vector<float> OnDevice(const std::vector<T>& data, sok::FloatType type, const std::vector<Id>& ids, int64_t dim,
                            int64_t num_segments, sok::SumOrder order, uint64_t* bad = nullptr) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  DeviceArray<T> device_data(data);
  DeviceArray<Id> device_ids(ids);
  DeviceArray<float> sums(std::vector<float>(static_cast<size_t>(num_segments * dim + 4), -99.0f));
  DeviceArray<uint64_t> first_bad(std::vector<uint64_t>{sok::kNothingBad});
  sok::UnsortedSegmentSum(cuda, &scratch, device_data.data(), type, device_ids.data(), static_cast<int64_t>(ids.size()),
                          dim, num_segments, order, sums, first_bad);
  std::vector<float> got = sums.Get();
  for (int j = 0; j < 4; ++j) {  // nothing behind
    CHECK_EQ(got.back(), -99.0f);
    got.pop_back();
  }
  if (bad != nullptr) *bad = first_bad.Get()[0];
  return got;
}

}  // namespace

TEST(SumsAreThoseOfPlainLoops) {
  for (const int64_t dim : {1, 3, 4, 8, 64, 130}) {
    for (const int64_t n : {0, 1, 31, 32, 33, 1000, 2500}) {
      for (const int64_t num_segments : {1, 2, 40, 3000}) {
        if (dim > 8 && n > 1000) continue;  // the emulator is slow
        std::mt19937_64 rng(static_cast<uint64_t>(dim * n));
        std::vector<int64_t> ids;
        std::vector<int32_t> narrow;
        for (int64_t i = 0; i < n; ++i) {
          // Half of them in one segment, so that it reaches over many pieces and levels.
          ids.push_back(rng() % 2 == 0 ? num_segments / 2 : static_cast<int64_t>(rng() % (num_segments + 1)) - 1);
          narrow.push_back(static_cast<int32_t>(ids.back()));
        }
        const std::vector<float> data = Whole(n * dim, 5), expected = Sums(data, ids, dim, num_segments);
        for (const auto order : {sok::SumOrder::kFixed, sok::SumOrder::kAny}) {
          CHECK(OnDevice(data, sok::FloatType::kFloat32, ids, dim, num_segments, order) == expected);
        }
        CHECK(OnDevice(data, sok::FloatType::kFloat32, narrow, dim, num_segments, sok::SumOrder::kFixed) == expected);
      }
    }
  }
}

TEST(OneSegmentOfManyPiecesIsOneSum) {
  for (const int64_t n : {32, 33, 64, 1024, 1025, 20000}) {
    const std::vector<float> data = Whole(n * 2, 9);
    const std::vector<int64_t> ids(static_cast<size_t>(n), 1);
    CHECK(OnDevice(data, sok::FloatType::kFloat32, ids, 2, 3, sok::SumOrder::kFixed) == Sums(data, ids, 2, 3));
  }
}

TEST(FixedOrderRepeatsBitForBit) {
  std::mt19937_64 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> data(5000);
  for (float& x : data) x = normal(rng);
  std::vector<int64_t> ids(5000);
  for (int64_t& id : ids) id = static_cast<int64_t>(rng() % 3);
  const std::vector<float> first = OnDevice(data, sok::FloatType::kFloat32, ids, 1, 3, sok::SumOrder::kFixed);
  for (int round = 0; round < 3; ++round)
    CHECK(OnDevice(data, sok::FloatType::kFloat32, ids, 1, 3, sok::SumOrder::kFixed) == first);
}

TEST(SixteenBitsAreSummedInFloat32) {
  const std::vector<float> data = Whole(900 * 5, 2);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 900; ++i) ids.push_back(i % 7 - 1);
  std::vector<sok::Half> halves;
  std::vector<sok::BFloat16> brains;
  for (const float x : data) {
    halves.push_back({sok::HalfBits(x)});
    brains.push_back({sok::BFloat16Bits(x)});
  }
  const std::vector<float> expected = Sums(data, ids, 5, 6);
  for (const auto order : {sok::SumOrder::kFixed, sok::SumOrder::kAny}) {
    CHECK(OnDevice(halves, sok::FloatType::kFloat16, ids, 5, 6, order) == expected);
    CHECK(OnDevice(brains, sok::FloatType::kBFloat16, ids, 5, 6, order) == expected);
  }
}

TEST(SixteenBitNumbersRoundToNearestEven) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const uint16_t word = static_cast<uint16_t>(bits);
    const float half = sok::FloatOfHalf(word), brain = sok::FloatOfBFloat16(word);
    if (half == half) CHECK_EQ(sok::HalfBits(half), word);
    if (brain == brain) CHECK_EQ(sok::BFloat16Bits(brain), word);
    // Half way to the next number goes to the even one; a little more goes up.
    const float next = sok::FloatOfHalf(static_cast<uint16_t>(word + 1));
    if ((word & 0x7FFFu) < 0x7BFFu) {
      const double middle = (static_cast<double>(half) + static_cast<double>(next)) / 2;
      CHECK_EQ(sok::HalfBits(static_cast<float>(middle)), static_cast<uint16_t>(word + (word & 1u)));
      CHECK_EQ(sok::HalfBits(static_cast<float>(middle * (1 + 1e-6))), static_cast<uint16_t>(word + 1));
    }
  }
  CHECK_EQ(sok::HalfBits(65519.0f), 0x7BFF);
  CHECK_EQ(sok::HalfBits(65520.0f), 0x7C00);
  CHECK_EQ(sok::BFloat16Bits(1.0f + 1.0f / 256), 0x3F80);
  CHECK_EQ(sok::BFloat16Bits(1.0f + 3.0f / 256), 0x3F82);
  const float nan = sok::FloatOfHalf(sok::HalfBits(sok::FloatOfWord(0x7F800001u)));
  CHECK(nan != nan);
}

TEST(DoublesHaveTheBitsOfTheCpu) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  std::mt19937_64 rng(4);
  std::normal_distribution<double> normal;
  for (const int64_t n : {0, 1, 700}) {
    for (const int64_t dim : {0, 1, 5}) {
      std::vector<double> data(static_cast<size_t>(n * dim));
      for (double& x : data) x = normal(rng);
      std::vector<int32_t> ids;
      for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>(rng() % 11) - 1);
      sok::Scratch host;
      std::vector<double> expected(static_cast<size_t>(12 * dim));
      sok::UnsortedSegmentSum(sok::Cpu{executor}, &host, data.data(), ids.data(), n, dim, 12, expected.data());
      sok::StreamScratch scratch(cuda);
      data.resize(static_cast<size_t>((n + 1) * dim));
      DeviceArray<double> device_data(data), sums(12 * dim);
      DeviceArray<uint64_t> bad(std::vector<uint64_t>{sok::kNothingBad});
      if (n > 0) ids.push_back(12);  // no segment
      DeviceArray<int32_t> device_ids(ids);
      sok::UnsortedSegmentSum(cuda, &scratch, device_data.data(), device_ids.data(), device_ids.size(), dim, 12, sums,
                              bad);
      CHECK(sums.Get() == expected);
      CHECK_EQ(bad.Get()[0], n > 0 ? static_cast<uint64_t>(n) : sok::kNothingBad);
    }
  }
}

TEST(IdsBeyondTheSegmentsAreLeftOutAndReported) {
  const std::vector<float> data = {1, 2, 3, 4};
  const std::vector<int64_t> ids = {0, -5, 2, int64_t{1} << 40};
  for (const auto order : {sok::SumOrder::kFixed, sok::SumOrder::kAny}) {
    uint64_t bad = 0;
    const std::vector<float> got = OnDevice(data, sok::FloatType::kFloat32, ids, 1, 2, order, &bad);
    CHECK_EQ(got[0], 1.0f);
    CHECK_EQ(got[1], 0.0f);
    CHECK_EQ(bad, 2u);
  }
}

TEST(TooManyRowsAreRefused) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  float* none = nullptr;
  const int64_t* ids = nullptr;
  CHECK_THROWS(sok::UnsortedSegmentSum(cuda, &scratch, none, sok::FloatType::kFloat32, ids, int64_t{1} << 31, 1, 1,
                                       sok::SumOrder::kFixed, none, nullptr),
               sok::InvalidArgument, "2147483648 rows");
}
