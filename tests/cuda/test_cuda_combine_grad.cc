#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/combine_grad.h"
#include "sok/error.h"

namespace {

std::vector<float> Random(std::mt19937* rng, int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(*rng);
  return x;
}

// Pooling of some rows, here and on the device.
struct Case {
  int64_t num_rows, dim;
  std::vector<int64_t> splits, index;
  std::vector<float> rows, weights, grad;

  Case(std::mt19937* rng, int64_t num_segments, int64_t rows_of_table, int64_t width)
      : num_rows(rows_of_table), dim(width), splits{0} {
    for (int64_t s = 0; s < num_segments; ++s)
      splits.push_back(splits.back() + (s % 7 == 3 ? 0 : s % 50 == 9 ? 90 : (*rng)() % 6));
    for (int64_t i = 0; i < splits.back(); ++i)  // skewed: a few rows have most of the addends
      index.push_back(static_cast<int64_t>(rng->operator()() % (i % 3 == 0 ? num_rows : 1 + num_rows / 8)));
    rows = Random(rng, num_rows * dim);
    weights = Random(rng, splits.back());
    // A segment whose weights cancel has no divisor.
    if (num_segments > 0 && splits[1] == 2) weights[0] = -weights[1];
    grad = Random(rng, num_segments * dim);
  }

  int64_t segments() const { return static_cast<int64_t>(splits.size()) - 1; }
  int64_t n() const { return splits.back(); }
};

sok::DeviceSegments SegmentsOf(const Case& c, DeviceArray<int64_t>* splits) {
  sok::DeviceSegments segments;
  segments.row_splits = *splits;
  segments.segments = c.segments();
  segments.n = c.n();
  return segments;
}

void CheckClose(const std::vector<float>& got, const std::vector<float>& expected, float tolerance) {
  CHECK_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i)
    CHECK(std::fabs(got[i] - expected[i]) <= tolerance * (1.0f + std::fabs(expected[i])));
}

constexpr sok::Combiner kCombiners[] = {sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kSqrtn};

}  // namespace

// Dot products are taken in another order than on the CPU; all else is the same arithmetic.
TEST(GradientsInWeightsAreThoseOfTheCpu) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  std::mt19937 rng(5);
  for (const int64_t dim : {1, 3, 4, 32, 33, 129}) {
    for (const int64_t num_segments : {0, 1, 120}) {
      Case c(&rng, num_segments, 40, dim);
      DeviceArray<float> rows(c.rows), weights(c.weights), grad(c.grad), got(c.n());
      DeviceArray<int64_t> index(c.index), splits(c.splits);
      for (const auto combiner : kCombiners) {
        // A divisor near zero makes gradients without bound, which no tolerance fits.
        if (combiner == sok::Combiner::kMean) {
          for (float& w : c.weights) w = 0.1f + std::fabs(w);
          weights.Set(c.weights);
        }
        std::vector<float> expected(static_cast<size_t>(c.n()));
        sok::CombineGradWeights(sok::Cpu{executor}, c.grad.data(), c.rows.data(), c.index.data(), c.splits.data(),
                                c.weights.data(), c.segments(), dim, combiner, expected.data());
        sok::DeviceFeature feature;
        feature.rows = sok::MatrixRows(rows, dim);
        feature.num_rows = c.num_rows;
        feature.dim = dim;
        feature.index = index;
        feature.segments = SegmentsOf(c, &splits);
        feature.weights = weights;
        feature.combiner = combiner;
        sok::CombineGradWeights(cuda, feature, grad, got, nullptr);
        CheckClose(got.Get(), expected, 3e-5f);
        const std::vector<float> first = got.Get();
        sok::CombineGradWeights(cuda, feature, grad, got, nullptr);
        CHECK(got.Get() == first);
      }
    }
  }
}

TEST(WeightsThatCancelHaveNoGradientUnlessTheyAreSummed) {
  const sok::Cuda cuda;
  DeviceArray<float> rows(std::vector<float>{1, 2}), grad(std::vector<float>{1}), got(2);
  DeviceArray<int64_t> index(std::vector<int64_t>{0, 1}), splits(std::vector<int64_t>{0, 2});
  for (const auto combiner : kCombiners) {
    const bool is_mean = combiner == sok::Combiner::kMean;
    DeviceArray<float> weights(is_mean ? std::vector<float>{1, -1} : std::vector<float>{0, 0});
    sok::DeviceFeature feature;
    feature.rows = sok::MatrixRows(rows, 1);
    feature.num_rows = 2;
    feature.dim = 1;
    feature.index = index;
    feature.segments.row_splits = splits;
    feature.segments.segments = 1;
    feature.segments.n = 2;
    feature.weights = weights;
    feature.combiner = combiner;
    sok::CombineGradWeights(cuda, feature, grad, got, nullptr);
    const bool is_sum = combiner == sok::Combiner::kSum;
    CHECK(got.Get() == (is_sum ? std::vector<float>{1, 2} : std::vector<float>{0, 0}));
  }
}

TEST(GradientsInRowsAreThoseOfTheCpu) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  sok::Scratch host;
  std::mt19937 rng(6);
  for (const int64_t dim : {1, 3, 4, 33}) {
    for (const int64_t num_segments : {0, 1, 150}) {
      const Case c(&rng, num_segments, 40, dim);
      DeviceArray<float> weights(c.weights), grad(c.grad), got(c.num_rows * dim);
      DeviceArray<int64_t> index(c.index), splits(c.splits);
      for (const auto combiner : kCombiners) {
        for (const bool weighted : {false, true}) {
          // Weights of either sign: the scales of a mean may be large, on both devices alike.
          sok::StreamScratch scratch(cuda);
          host.Reset();
          std::vector<float> expected(static_cast<size_t>(c.num_rows * dim));
          sok::CombineGradRows(sok::Cpu{executor}, &host, c.grad.data(), c.index.data(), c.splits.data(),
                               weighted ? c.weights.data() : nullptr, c.n(), c.segments(), c.num_rows, dim, combiner,
                               expected.data());
          sok::CombineGradRows(cuda, &scratch, grad, index, SegmentsOf(c, &splits), weighted ? weights.data() : nullptr,
                               c.num_rows, dim, combiner, got, nullptr);
          // Up to 200 addends of any sign and scale in one row, grouped differently.
          float largest = 1.0f;
          for (const float x : expected) largest = std::max(largest, std::fabs(x));
          CheckClose(got.Get(), expected, 2e-5f * largest);
        }
      }
    }
  }
}

TEST(RowsWithFewAddendsHaveTheBitsOfTheCpu) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  sok::StreamScratch scratch(cuda);
  sok::Scratch host;
  std::mt19937 rng(9);
  Case c(&rng, 9, 40, 5);
  c.index.resize(30);
  c.splits = {0, 3, 3, 7, 12, 13, 20, 22, 29, 30};
  for (size_t i = 0; i < c.index.size(); ++i) c.index[i] = static_cast<int64_t>(i * 7 % 10);
  c.weights = Random(&rng, 30);
  DeviceArray<float> weights(c.weights), grad(c.grad), got(c.num_rows * 5);
  DeviceArray<int64_t> index(c.index), splits(c.splits);
  std::vector<float> expected(static_cast<size_t>(c.num_rows * 5));
  sok::CombineGradRows(sok::Cpu{executor}, &host, c.grad.data(), c.index.data(), c.splits.data(), c.weights.data(),
                       c.n(), c.segments(), c.num_rows, 5, sok::Combiner::kSqrtn, expected.data());
  sok::CombineGradRows(cuda, &scratch, grad, index, SegmentsOf(c, &splits), weights, c.num_rows, 5,
                       sok::Combiner::kSqrtn, got, nullptr);
  CHECK(got.Get() == expected);
}

TEST(WhatMakesNoSenseIsDroppedAndReported) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  DeviceArray<float> rows(std::vector<float>{1, 10}), grad(std::vector<float>{1, 2, 4}), got_weights(3), got_rows(2);
  DeviceArray<float> weights(std::vector<float>{1, 1, 1});
  DeviceArray<uint64_t> bad(1);
  const auto run = [&](const std::vector<int64_t>& index, const std::vector<int64_t>& splits) {
    DeviceArray<int64_t> device_index(index), device_splits(splits);
    sok::DeviceFeature feature;
    feature.rows = sok::MatrixRows(rows, 1);
    feature.num_rows = 2;
    feature.dim = 1;
    feature.index = device_index;
    feature.segments.row_splits = device_splits;
    feature.segments.segments = static_cast<int64_t>(splits.size()) - 1;
    feature.segments.n = 3;
    feature.weights = weights;
    bad.Set({sok::kNothingBad});
    sok::CombineGradWeights(cuda, feature, grad, got_weights, bad);
    const uint64_t of_weights = bad.Get()[0];
    bad.Set({sok::kNothingBad});
    sok::CombineGradRows(cuda, &scratch, grad, device_index, feature.segments, nullptr, 2, 1, sok::Combiner::kSum,
                         got_rows, bad);
    bad.Get();  // until then the arrays live
    return of_weights;
  };
  CHECK_EQ(run({0, 2, 1}, {0, 1, 2, 3}), 1u);
  CHECK_EQ(bad.Get()[0], 1u);
  CHECK(got_weights.Get() == (std::vector<float>{1, 0, 40}));
  CHECK(got_rows.Get() == (std::vector<float>{1, 4}));
  CHECK_EQ(run({0, -5, 1}, {0, 1, 2, 3}), sok::kNothingBad);  // a row of zeros
  CHECK_EQ(bad.Get()[0], 1u);                                 // which has no gradient
  CHECK_EQ(run({0, 0, 1}, {0, 1, 9, 3}), 4u);                 // n + 1
  CHECK(got_weights.Get() == (std::vector<float>{1, 0, 0}));
  CHECK(got_rows.Get() == (std::vector<float>{1, 0}));
}

TEST(AFeatureWithoutWeightsIsRefused) {
  CHECK_THROWS(sok::CombineGradWeights(sok::Cuda{}, {}, nullptr, nullptr, nullptr), sok::InvalidArgument,
               "a feature without weights has no gradient in them");
}

TEST(MoreRowsThanCanBeSortedAreRefused) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  CHECK_THROWS(sok::CombineGradRows(cuda, &scratch, nullptr, nullptr, {}, nullptr, INT64_C(0x7FFFFFFF), 1,
                                    sok::Combiner::kSum, nullptr, nullptr),
               sok::InvalidArgument, "fewer than 2^31 - 1 positions and rows. Received: 0 positions, 2147483647 rows");
}
