#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/exchange.h"

namespace {

constexpr uint32_t kFirst = 0x80000000u;

std::vector<float> Random(std::mt19937* rng, int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(*rng);
  return x;
}

// One feature here and on the device. Weights are positive: a divisor near zero makes gradients without bound.
struct Feature {
  Feature(std::mt19937* rng, int64_t segments, int64_t dim, sok::Combiner combiner, bool pooled, bool weighted,
          int64_t first_place, int64_t num_rows)
      : splits{0} {
    for (int64_t s = 0; s < segments; ++s) splits.push_back(splits.back() + (pooled ? (*rng)() % 5 : 1));
    const int64_t n = splits.back();
    for (int64_t i = 0; i < n; ++i) {
      index.push_back(static_cast<int32_t>(first_place + dim * static_cast<int64_t>((*rng)() % num_rows)));
    }
    weights = Random(rng, weighted ? n : 0);
    for (float& w : weights) w = 0.1f + std::fabs(w);
    grad = Random(rng, segments * dim);
    here.n = n;
    here.segments = segments;
    here.dim = dim;
    here.combiner = combiner;
    here.row_splits = pooled ? splits.data() : nullptr;
    here.weights = weighted ? weights.data() : nullptr;
  }

  void Upload() {
    on_device = std::make_unique<Memory>(*this);
    here.index = index.data();
    there = here;
    there.index = on_device->index;
    there.row_splits = here.row_splits == nullptr ? nullptr : on_device->splits.data();
    there.weights = here.weights == nullptr ? nullptr : on_device->weights.data();
  }

  struct Memory {
    explicit Memory(const Feature& f)
        : index(f.index), splits(f.splits), weights(f.weights), grad(f.grad), output(f.here.segments * f.here.dim) {}
    DeviceArray<int32_t> index;
    DeviceArray<int64_t> splits;
    DeviceArray<float> weights, grad, output;
  };

  std::vector<int32_t> index;
  std::vector<int64_t> splits;
  std::vector<float> weights, grad;
  sok::PooledFeature here, there;
  std::unique_ptr<Memory> on_device;
};

// Two tables' rows in one answer, and features of every kind that share them.
struct Case {
  explicit Case(int seed, int64_t segments) : rng(static_cast<unsigned>(seed)) {
    constexpr int64_t kRows = 12, kDims[] = {3, 8};
    size = sok::kAnswerHeader + kRows * (kDims[0] + kDims[1]);
    answers = Random(&rng, size);
    constexpr sok::Combiner kAll[] = {sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kSqrtn};
    for (int k = 0; k < 9; ++k) {
      const int64_t dim = kDims[k % 2], first = sok::kAnswerHeader + (k % 2 == 0 ? 0 : kRows * kDims[0]);
      features.push_back(
          std::make_unique<Feature>(&rng, segments, dim, kAll[k % 3], k % 4 != 1, k % 4 == 2, first, kRows));
    }
    // The order in which the CPU adds: what is first at its place has the top bit.
    std::set<int32_t> seen;
    for (const bool free : {false, true}) {
      for (auto& f : features) {
        if ((f->here.row_splits != nullptr && f->here.weights == nullptr) != free) continue;
        for (int32_t& place : f->index) {
          named.insert(place);
          if (seen.insert(place).second) place = static_cast<int32_t>(static_cast<uint32_t>(place) | kFirst);
        }
      }
    }
    for (auto& f : features) {
      f->Upload();
      here.push_back(f->here);
      there.push_back(f->there);
      outputs.push_back(f->on_device->output);
      grads_here.push_back(f->grad.data());
      grads_there.push_back(f->on_device->grad);
    }
  }
  int count() const { return static_cast<int>(features.size()); }

  std::mt19937 rng;
  int64_t size;
  std::vector<float> answers;
  std::vector<std::unique_ptr<Feature>> features;
  std::set<int32_t> named;
  std::vector<sok::PooledFeature> here, there;
  std::vector<float*> outputs;
  std::vector<const float*> grads_here, grads_there;
};

}  // namespace

TEST(AnswersArePooledToTheFloatsOfTheCpu) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  for (const int64_t segments : {0, 1, 70}) {
    Case c(3, segments);
    std::vector<std::vector<float>> expected;
    std::vector<float*> to;
    for (const auto& f : c.features) expected.emplace_back(f->grad.size());
    for (auto& e : expected) to.push_back(e.data());
    sok::CombineAnswers(sok::Cpu{executor}, c.answers.data(), c.here.data(), c.count(), to.data());
    DeviceArray<float> answers(c.answers);
    sok::StreamScratch scratch(cuda);
    sok::CombineAnswers(cuda, &scratch, answers, c.size, c.there.data(), c.count(), c.outputs.data());
    for (int f = 0; f < c.count(); ++f) CHECK(c.features[f]->on_device->output.Get() == expected[f]);
  }
}

TEST(GradientsOfAnswersAreThoseOfTheCpuInEveryRun) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  for (const int64_t segments : {0, 1, 70}) {
    Case c(4, segments);
    std::vector<float> expected(static_cast<size_t>(c.size), 0.0f);
    sok::CombineAnswersGrad(sok::Cpu{executor}, c.here.data(), c.count(), c.grads_here.data(), c.size, expected.data());
    DeviceArray<float> packed(std::vector<float>(static_cast<size_t>(c.size), 7.0f));
    sok::StreamScratch scratch(cuda);
    std::vector<float> first;
    for (int run = 0; run < 2; ++run) {
      sok::CombineAnswersGrad(cuda, &scratch, c.there.data(), c.count(), c.grads_there.data(), c.size, packed);
      const std::vector<float> got = packed.Get();
      for (size_t i = 0; i < got.size(); ++i) {
        CHECK(std::fabs(got[i] - expected[i]) <= 2e-5f * (1.0f + std::fabs(expected[i])));
      }
      for (int64_t i = 0; i < sok::kAnswerHeader; ++i) CHECK_EQ(got[static_cast<size_t>(i)], 0.0f);
      if (run == 0) first = got;
      CHECK(got == first);
    }
  }
}

TEST(GradientsInWeightsAreThoseOfTheCpu) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  Case c(5, 40);
  DeviceArray<float> answers(c.answers);
  int weighted = 0;
  for (const auto& f : c.features) {
    if (f->weights.empty()) continue;
    ++weighted;
    std::vector<float> expected(f->weights.size());
    sok::CombineAnswersGradWeights(sok::Cpu{executor}, c.answers.data(), f->here, f->grad.data(), expected.data());
    DeviceArray<float> got(f->here.n);
    sok::StreamScratch scratch(cuda);
    sok::CombineAnswersGradWeights(cuda, &scratch, answers, c.size, f->there, f->on_device->grad, got);
    const std::vector<float> found = got.Get();
    for (size_t i = 0; i < found.size(); ++i) {
      CHECK(std::fabs(found[i] - expected[i]) <= 3e-5f * (1.0f + std::fabs(expected[i])));
    }
  }
  CHECK(weighted > 1);
}

TEST(PlacesOutsideOfTheAnswersReadAsZerosAndGetNoGradient) {
  const sok::Cuda cuda;
  DeviceArray<float> answers(std::vector<float>(20, 3.0f)), output(6), grad(std::vector<float>(6, 1.0f)),
      packed(std::vector<float>(20, 7.0f));
  DeviceArray<int32_t> index(std::vector<int32_t>{18, 19, 0x7FFFFFFF});
  sok::PooledFeature feature;
  feature.index = index;
  feature.n = feature.segments = 3;
  feature.dim = 2;
  float* to = output;
  const float* from = grad;
  sok::StreamScratch scratch(cuda);
  sok::CombineAnswers(cuda, &scratch, answers, 20, &feature, 1, &to);
  CHECK((output.Get() == std::vector<float>{3, 3, 0, 0, 0, 0}));
  sok::CombineAnswersGrad(cuda, &scratch, &feature, 1, &from, 20, packed);
  std::vector<float> expected(20, 0.0f);
  expected[18] = expected[19] = 1.0f;
  CHECK(packed.Get() == expected);
}

TEST(HeadersOfAnswersComeToTheHost) {
  const sok::Cuda cuda;
  std::vector<float> floats(40);
  for (size_t i = 0; i < floats.size(); ++i) floats[i] = static_cast<float>(i);
  DeviceArray<float> answers(floats);
  const std::vector<int64_t> begin = {0, 16, 38};
  std::vector<float> headers(6);
  sok::StreamScratch scratch(cuda);
  sok::AnswerHeadersToHost(cuda, &scratch, answers, begin.data(), 3, headers.data());
  CHECK((headers == std::vector<float>{0, 1, 16, 17, 38, 39}));
}
