#include "sok/combine.h"

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "sok/check_ids.h"
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

// Features of several widths, pooled and not, with loops of their own (16) and without, give what each gives alone.
TEST(AGroupGivesWhatEachFeatureGivesAlone) {
  const Case a(16), b(7), c(3);
  std::vector<float> out_a(static_cast<size_t>(a.segments * 16), -9.0f),
      out_b(static_cast<size_t>(b.segments * 7), -9.0f);
  std::vector<float> rows_c(static_cast<size_t>(c.n * 3), -9.0f), alone_a = out_a, alone_b = out_b;
  const sok::HostFeature features[] = {
      {a.rows.data(), 16, a.index.data(), a.n, a.splits.data(), a.segments, Combiner::kMean, out_a.data()},
      {},
      {b.rows.data(), 7, b.index.data(), b.n, b.splits.data(), b.segments, Combiner::kSqrtn, out_b.data()},
      {c.rows.data(), 3, c.index.data(), c.n, nullptr, c.n, Combiner::kSum, rows_c.data()}};
  const ThreadExecutor executor(3);
  sok::CombineGroup({executor}, features, 4);
  sok::Combine({executor}, a.rows.data(), a.index.data(), a.splits.data(), nullptr, a.segments, 16, Combiner::kMean,
               alone_a.data());
  sok::Combine({executor}, b.rows.data(), b.index.data(), b.splits.data(), nullptr, b.segments, 7, Combiner::kSqrtn,
               alone_b.data());
  CHECK(out_a == alone_a);
  CHECK(out_b == alone_b);
  for (int64_t i = 0; i < c.n; ++i)
    for (int64_t j = 0; j < 3; ++j) CHECK_EQ(rows_c[i * 3 + j], c.rows[c.index[i] * 3 + j]);
}

TEST(TheFirstIdOutsideAndTheFirstFallAreFound) {
  std::vector<int64_t> ids(100, 6), splits(100);
  for (int64_t i = 0; i < 100; ++i) splits[i] = i / 3;
  CHECK_EQ(sok::FirstOutside(ids.data(), 100, 7), 100);
  CHECK_EQ(sok::FirstOutside(ids.data(), 100, 6), 0);
  CHECK_EQ(sok::FirstOutside(ids.data(), 0, 0), 0);
  CHECK_EQ(sok::FirstFall(splits.data(), 100), 100);
  for (const int64_t at : {1, 50, 99}) {
    std::vector<int64_t> bad_ids = ids, bad_splits = splits;
    bad_ids[at] = at % 2 == 0 ? -1 : 7;
    bad_splits[at] = -1;
    CHECK_EQ(sok::FirstOutside(bad_ids.data(), 100, 7), at);
    CHECK_EQ(sok::FirstFall(bad_splits.data(), 100), at);
  }
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
