// Every instruction set that this processor has gives the bits that plain loops give.
#include <cstdint>
#include <random>
#include <vector>

#include "../../cpu/cpu_features.h"
#include "../../cpu/row_kernels.h"
#include "check.h"
#include "sok/initializer.h"

namespace {

std::vector<const sok::RowKernels*> All() {
  std::vector<const sok::RowKernels*> all = {sok::GenericRowKernels()};
#if defined(__x86_64__)
  // SOK_ISA bounds what runs: under valgrind, for example.
  if (sok::ChosenIsa() >= sok::Isa::kAvx2) all.push_back(sok::Avx2RowKernels());
  if (sok::ChosenIsa() >= sok::Isa::kAvx512) all.push_back(sok::Avx512RowKernels());
#endif
  return all;
}

constexpr int64_t kDims[] = {1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 48, 63, 64, 65, 100, 128, 200, 256, 513};

std::vector<float> Random(std::mt19937* rng, int64_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(*rng);
  return x;
}

}  // namespace

TEST(CopiesAreExactAtAnyAlignment) {
  std::mt19937 rng(1);
  for (const sok::RowKernels* kernels : All()) {
    for (const int64_t dim : kDims) {
      for (const bool stream : {false, true}) {
        for (const int64_t shift : {0, 1}) {
          const std::vector<float> rows = Random(&rng, 5 * dim);
          std::vector<const float*> from;
          for (int64_t i = 0; i < 5; ++i) from.push_back(rows.data() + (4 - i) * dim);
          std::vector<float> space(static_cast<size_t>(5 * dim + 40), 7.0f);
          float* to =
              reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(space.data()) + 63) & ~uintptr_t{63}) + shift;
          kernels->copy(from.data(), 5, dim, stream, to);
          kernels->fence();
          int64_t wrong = 0;
          for (int64_t i = 0; i < 5; ++i)
            for (int64_t j = 0; j < dim; ++j) wrong += to[i * dim + j] != from[static_cast<size_t>(i)][j];
          CHECK_EQ(wrong, 0);
          CHECK_EQ(to[5 * dim], 7.0f);
        }
      }
    }
  }
}

TEST(SumsAreInOrder) {
  std::mt19937 rng(2);
  for (const sok::RowKernels* kernels : All()) {
    for (const int64_t dim : kDims) {
      const std::vector<float> rows = Random(&rng, 9 * dim), weights = Random(&rng, 9), start = Random(&rng, dim);
      std::vector<const float*> from;
      for (int64_t i = 0; i < 9; ++i) from.push_back(rows.data() + i * dim);
      for (const bool fresh : {true, false}) {
        for (const bool weighted : {true, false}) {
          std::vector<float> out = start;
          kernels->accumulate(from.data(), weighted ? weights.data() : nullptr, 9, dim, fresh, out.data());
          int64_t wrong = 0;
          for (int64_t j = 0; j < dim; ++j) {
            float sum = fresh ? 0.0f : start[static_cast<size_t>(j)];
            for (int64_t i = 0; i < 9; ++i) {
              const float x = from[static_cast<size_t>(i)][j];
              const float product = weights[static_cast<size_t>(i)] * x;
              sum += weighted ? product : x;
            }
            wrong += sum != out[static_cast<size_t>(j)];
          }
          CHECK_EQ(wrong, 0);
        }
      }
    }
  }
}

TEST(UpdatesFollowTheRule) {
  std::mt19937 rng(3);
  const double hyper[4] = {0.1, 0.9, 0.999, 1e-7}, adagrad[3] = {0.1, 0.1, 1e-7}, sgd[1] = {0.1};
  const std::vector<sok::UpdateRule> rules = {
      sok::MakeUpdateRule("sgd", sgd, 1, 3), sok::MakeUpdateRule("adagrad", adagrad, 3, 3),
      sok::MakeUpdateRule("lazy_adam", hyper, 4, 3), sok::MakeUpdateRule("adam", hyper, 4, 3)};
  for (const sok::UpdateRule& rule : rules) {
    for (const int64_t dim : kDims) {
      const int64_t floats = (1 + rule.num_slots()) * dim;
      std::vector<float> start = Random(&rng, 3 * floats);
      for (float& x : start) x = std::fabs(x);
      const std::vector<float> grads = Random(&rng, 3 * dim);
      for (const sok::RowKernels* kernels : All()) {
        std::vector<float> records = start, expected = start;
        float* at[3] = {records.data() + 2 * floats, records.data(), records.data() + floats};
        kernels->update(rule, at, dim, grads.data(), 3, dim);
        for (int64_t i = 0; i < 3; ++i) {
          float* w = expected.data() + (at[i] - records.data());
          for (int64_t j = 0; j < dim; ++j) {
            const float g = grads[static_cast<size_t>(i * dim + j)];
            if (rule.rule == sok::Rule::kSgd) sok::SgdElement(g, rule.lr, &w[j]);
            if (rule.rule == sok::Rule::kAdagrad) sok::AdagradElement(g, rule.lr, rule.epsilon, &w[j], &w[dim + j]);
            if (rule.rule == sok::Rule::kAdam || rule.rule == sok::Rule::kLazyAdam) {
              sok::AdamElement(g, rule.lr, rule.one_minus_beta_1, rule.one_minus_beta_2, rule.epsilon, &w[j],
                               &w[dim + j], &w[2 * dim + j]);
            }
          }
        }
        CHECK(records == expected);
      }
    }
  }
}

TEST(UniformRowsAreThoseOfTheScalarFormula) {
  const uint64_t keys[7] = {0, 1, ~uint64_t{0}, 1u << 31, uint64_t{1} << 63, 12345678901234567ull, 42};
  sok::Initializer init;
  init.seed = 0xFEDCBA9876543210ull;
  for (const sok::RowKernels* kernels : All()) {
    for (const int64_t dim : kDims) {
      std::vector<float> rows(static_cast<size_t>(7 * dim + 1), 3.0f), row(static_cast<size_t>(dim));
      float* at[7];
      for (int64_t i = 0; i < 7; ++i) at[i] = rows.data() + i * dim;
      kernels->fill_uniform(init.seed, init.a, init.b - init.a, keys, 7, dim, at);
      int64_t wrong = 0;
      for (int64_t i = 0; i < 7; ++i) {
        sok::FillRow(init, keys[i], dim, row.data());
        for (int64_t j = 0; j < dim; ++j) wrong += row[static_cast<size_t>(j)] != at[i][j];
      }
      CHECK_EQ(wrong, 0);
      CHECK_EQ(rows.back(), 3.0f);
    }
  }
}

TEST(MissedDecayAtOnceIsMissedDecayStepByStep) {
  std::mt19937 rng(4);
  for (const double beta_1 : {0.9, 0.5, 0.0}) {
    const double hyper[4] = {0.01, beta_1, 0.999, 1e-7};
    sok::UpdateRule rule = sok::MakeUpdateRule("adam", hyper, 4, 1);
    CHECK(sok::DecaySums::Fits(rule));
    sok::AlphaHistory history;
    sok::DecaySums sums(rule);
    constexpr int64_t kCalls = 1500;
    for (int64_t call = 1; call <= kCalls; ++call) {
      // Bias correction, a jump, a stretch of zero, and a moving schedule.
      const double lr = call < 400 ? 0.01 : call < 800 ? 0.001 : call < 810 ? 0.0 : 0.01 / static_cast<double>(call);
      const double changing[4] = {lr, beta_1, 0.999, 1e-7};
      const float alpha = sok::MakeUpdateRule("adam", changing, 4, call).lr;
      history.Append(alpha);
      sums.Append(alpha);
    }
    for (const int64_t from : {0, 1, 5, 300, 398, 799, 805, 1000, 1400, 1490, 1499}) {
      for (const float scale : {1.0f, 1e-4f, 1e-7f, 1e-9f}) {  // s far above, near and below epsilon
        const int64_t dim = 33;
        std::vector<float> w = Random(&rng, dim), m = Random(&rng, dim, scale), v = Random(&rng, dim, scale);
        for (float& x : v) x = x * x;
        std::vector<double> exact_w(w.begin(), w.end()), exact_m(m.begin(), m.end()), exact_v(v.begin(), v.end());
        sok::AlphaHistory::Cursor cursor(history, from + 1);
        for (int64_t call = from + 1; call <= kCalls; ++call) {
          const double alpha = cursor.Next();
          for (size_t j = 0; j < exact_w.size(); ++j) {
            exact_m[j] *= static_cast<double>(rule.beta_1);
            exact_v[j] *= static_cast<double>(rule.beta_2);
            exact_w[j] -= alpha * exact_m[j] / (std::sqrt(exact_v[j]) + static_cast<double>(rule.epsilon));
          }
        }
        const std::vector<float> before = w;
        const sok::Decay decay = sums.Of(history, from, kCalls);
        for (const sok::RowKernels* kernels : All()) {
          std::vector<float> read(before.size()), settled = before, m2 = m, v2 = v;
          kernels->read_decayed(decay, rule.epsilon, before.data(), m.data(), v.data(), dim, read.data());
          kernels->settle(decay, rule.epsilon, dim, settled.data(), m2.data(), v2.data());
          CHECK(read == settled);
          for (size_t j = 0; j < read.size(); ++j) {
            const double moved = std::fabs(exact_w[j] - static_cast<double>(before[j]));
            CHECK(std::fabs(static_cast<double>(read[j]) - exact_w[j]) <=
                  1e-6 * moved + 1.5e-7 * std::fabs(exact_w[j]) + 1e-12);
            CHECK(std::fabs(static_cast<double>(m2[j]) - exact_m[j]) <= 1e-6 * std::fabs(exact_m[j]) + 1e-37);
            CHECK(std::fabs(static_cast<double>(v2[j]) - exact_v[j]) <= 1e-6 * std::fabs(exact_v[j]) + 1e-37);
          }
        }
      }
    }
  }
}

TEST(BetasBeyondTheExpansionAreKnown) {
  const auto fits = [](double beta_1, double beta_2) {
    const double hyper[4] = {0.01, beta_1, beta_2, 1e-7};
    return sok::DecaySums::Fits(sok::MakeUpdateRule("adam", hyper, 4, 1));
  };
  CHECK(fits(0.9, 0.999));
  CHECK(fits(0.9, 0.99999));
  CHECK(!fits(0.99, 0.9));   // r above one
  CHECK(!fits(0.99, 0.99));  // d is not small where r^i counts
  CHECK(!fits(0.9, 0.0));
}
