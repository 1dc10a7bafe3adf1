#include "sok/combine.h"

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "threads.h"

namespace {

using sok::Combiner;

constexpr Combiner kAll[] = {Combiner::kSum, Combiner::kMean, Combiner::kSqrtn};

struct Case {
  int64_t n = 300, segments = 90, num_rows = 40, dim = 7;
  std::vector<float> rows, weights, grad;
  std::vector<int64_t> index, splits;

  explicit Case(int64_t dim) : dim(dim) {
    std::mt19937_64 random(5);
    std::uniform_real_distribution<float> real(0.25f, 1.5f);
    for (int64_t i = 0; i < num_rows * dim; ++i) rows.push_back(real(random));
    for (int64_t i = 0; i < segments * dim; ++i) grad.push_back(real(random));
    for (int64_t i = 0; i < n; ++i) weights.push_back(real(random));
    for (int64_t i = 0; i < n; ++i) index.push_back(static_cast<int64_t>(random() % 40));
    splits.assign(1, 0);
    for (int64_t s = 1; s < segments; ++s) splits.push_back(std::min<int64_t>(n, splits.back() + random() % 6));
    splits.push_back(n);
  }

  double Divisor(Combiner combiner, const std::vector<float>& w, int64_t s) const {
    double sum = 0.0, squares = 0.0;
    for (int64_t i = splits[s]; i < splits[s + 1]; ++i) {
      sum += w[i];
      squares += static_cast<double>(w[i]) * w[i];
    }
    return combiner == Combiner::kSum ? 1.0 : combiner == Combiner::kMean ? sum : std::sqrt(squares);
  }
};

bool Near(double a, double b) { return std::fabs(a - b) <= 1e-5 * std::max(1.0, std::fabs(b)); }

}  // namespace

TEST(RowsAndGradientsFollowTheFormulas) {
  for (const int64_t dim : {1, 3, 5, 7, 16, 17, 64}) {
    const Case c(dim);
    for (const Combiner combiner : kAll) {
      for (const bool weighted : {false, true}) {
        const std::vector<float> w = weighted ? c.weights : std::vector<float>(c.weights.size(), 1.0f);
        const ThreadExecutor executor(4);
        sok::Scratch scratch;
        std::vector<float> out(static_cast<size_t>(c.segments * dim), -9.0f);
        std::vector<float> grad_rows(c.rows.size(), -9.0f);
        const float* weights = weighted ? c.weights.data() : nullptr;
        sok::Combine({executor}, c.rows.data(), c.index.data(), c.splits.data(), weights, c.segments, dim, combiner,
                     out.data());
        sok::CombineGradRows({executor}, &scratch, c.grad.data(), c.index.data(), c.splits.data(), weights, c.n,
                             c.segments, c.num_rows, dim, combiner, grad_rows.data());
        std::vector<double> expected_grad(c.rows.size(), 0.0);
        int64_t wrong = 0;
        for (int64_t s = 0; s < c.segments; ++s) {
          const double divisor = c.Divisor(combiner, w, s);
          for (int64_t j = 0; j < dim; ++j) {
            double sum = 0.0;
            for (int64_t i = c.splits[s]; i < c.splits[s + 1]; ++i) {
              sum += static_cast<double>(w[i]) * c.rows[c.index[i] * dim + j];
              expected_grad[c.index[i] * dim + j] += w[i] / divisor * c.grad[s * dim + j];
            }
            const bool is_empty = c.splits[s] == c.splits[s + 1];
            wrong += !Near(out[s * dim + j], is_empty ? 0.0 : sum / divisor);
          }
        }
        for (size_t i = 0; i < grad_rows.size(); ++i) wrong += !Near(grad_rows[i], expected_grad[i]);
        CHECK_EQ(wrong, 0);
      }
    }
  }
}

TEST(GradientsInWeightsAgreeWithDifferences) {
  const Case c(5);
  const sok::SerialExecutor executor;
  for (const Combiner combiner : kAll) {
    std::vector<float> grad_weights(c.weights.size());
    sok::CombineGradWeights({executor}, c.grad.data(), c.rows.data(), c.index.data(), c.splits.data(), c.weights.data(),
                            c.segments, c.dim, combiner, grad_weights.data());
    int64_t wrong = 0;
    for (int64_t s = 0; s < c.segments; ++s) {
      for (int64_t i = c.splits[s]; i < c.splits[s + 1]; ++i) {
        auto loss = [&](double step) {  // in float64, of this segment alone
          double sum = 0.0, squares = 0.0, dot = 0.0;
          for (int64_t k = c.splits[s]; k < c.splits[s + 1]; ++k) {
            const double w = c.weights[k] + (k == i ? step : 0.0);
            sum += w;
            squares += w * w;
            for (int64_t j = 0; j < c.dim; ++j) dot += w * c.rows[c.index[k] * c.dim + j] * c.grad[s * c.dim + j];
          }
          return dot / (combiner == Combiner::kSum ? 1.0 : combiner == Combiner::kMean ? sum : std::sqrt(squares));
        };
        wrong += std::fabs(grad_weights[i] - (loss(1e-4) - loss(-1e-4)) / 2e-4) > 1e-4;
      }
    }
    CHECK_EQ(wrong, 0);
  }
}

TEST(ADivisorOfZeroGivesZeros) {
  const float rows[] = {1.0f, 2.0f}, cancelling[] = {1.0f, -1.0f}, zeros[] = {0.0f, 0.0f};
  const int64_t index[] = {0, 1}, splits[] = {0, 2};
  const sok::SerialExecutor executor;
  float out = -9.0f;
  sok::Combine({executor}, rows, index, splits, cancelling, 1, 1, Combiner::kMean, &out);
  CHECK_EQ(out, 0.0f);
  out = -9.0f;
  sok::Combine({executor}, rows, index, splits, zeros, 1, 1, Combiner::kSqrtn, &out);
  CHECK_EQ(out, 0.0f);
}

TEST(ResultsDoNotDependOnThreads) {
  const Case c(16);
  std::vector<float> first;
  for (const int threads : {1, 2, 7}) {
    const ThreadExecutor executor(threads);
    std::vector<float> out(static_cast<size_t>(c.segments * c.dim));
    sok::Combine({executor}, c.rows.data(), c.index.data(), c.splits.data(), c.weights.data(), c.segments, c.dim,
                 Combiner::kMean, out.data());
    if (first.empty()) first = out;
    CHECK(out == first);
  }
}

TEST(OtherCombinersAreRefused) {
  CHECK(sok::ParseCombiner("sqrtn") == Combiner::kSqrtn);
  CHECK_THROWS(sok::ParseCombiner("max"), sok::InvalidArgument, "Received: 'max'");
}
