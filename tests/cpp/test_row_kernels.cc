// Every instruction set that this processor has gives the bits that plain loops give.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "../../cpu/cpu_features.h"
#include "../../cpu/row_kernels.h"
#include "check.h"
#include "rules.h"
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

// Records of `dim` floats with slots behind, in slabs of four.
struct Records {
  Records(std::mt19937* rng, int64_t dim, int64_t rows, int64_t stride)
      : values(Random(rng, (rows + 3) / 4 * 4 * stride)), stride(stride) {
    for (int64_t row = 0; row < rows; row += 4) slabs.push_back(values.data() + row * stride);
    view = {slabs.data(), 2, 3, stride};
    CHECK(stride >= dim);
  }
  const float* At(uint64_t row) const { return values.data() + static_cast<int64_t>(row) * stride; }

  std::vector<float> values;
  std::vector<float*> slabs;
  int64_t stride;
  sok::RowView view;
};

bool HasOwnLoop(int64_t dim) { return dim == 4 || dim == 8 || dim == 16 || dim == 32 || dim == 64 || dim == 128; }

constexpr uint32_t kNoRow = 0xFFFFFFFFu;

}  // namespace

TEST(GathersAreExactAtAnyAlignmentPastTheCacheOrNot) {
  std::mt19937 rng(1);
  for (const sok::RowKernels* kernels : All()) {
    for (const int64_t dim : kDims) {
      for (const int64_t extra : {0, 4, 20}) {
        const Records records(&rng, dim, 30, dim + extra);
        std::vector<uint32_t> rows;
        for (int i = 0; i < 53; ++i) rows.push_back(i == 7 ? kNoRow : static_cast<uint32_t>(rng() % 30));
        for (const bool stream : {false, true}) {
          for (const int64_t shift : {0, 1}) {
            std::vector<float> space(static_cast<size_t>(53 * dim + 40), 7.0f);
            float* to =
                reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(space.data()) + 63) & ~uintptr_t{63}) + shift;
            const bool done = kernels->gather(records.view, rows.data(), 53, dim, stream, to);
            kernels->fence();
            CHECK_EQ(done, HasOwnLoop(dim));
            int64_t wrong = 0;
            for (int64_t i = 0; i < 53 * dim; ++i) {
              const uint32_t row = rows[static_cast<size_t>(i / dim)];
              wrong += to[i] != (!done ? 7.0f : row == kNoRow ? 0.0f : records.At(row)[i % dim]);
            }
            CHECK_EQ(wrong, 0);
            CHECK_EQ(to[53 * dim], 7.0f);
          }
        }
      }
    }
  }
}

TEST(PoolingIsInOrderForEveryCombiner) {
  std::mt19937 rng(6);
  for (const sok::RowKernels* kernels : All()) {
    for (const int64_t dim : kDims) {
      const Records records(&rng, dim, 30, dim + 4);
      // A task in the middle: empty segments at both ends and one longer than the look-ahead.
      const std::vector<int64_t> splits = {0, 2, 2, 5, 5, 6, 46, 48, 48};
      std::vector<uint32_t> rows;
      for (int64_t i = 2; i < 48; ++i) rows.push_back(static_cast<uint32_t>(rng() % 30));
      const std::vector<uint64_t> keys(rows.begin(), rows.end());
      for (const sok::Combiner combiner : {sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kSqrtn}) {
        std::vector<float> out(static_cast<size_t>(8 * dim), 7.0f), by_key = out, expected = out;
        const bool done = kernels->pool(records.view, rows.data(), splits.data(), 1, 8, combiner, dim, out.data());
        CHECK_EQ(kernels->pool_keys(records.view, keys.data(), splits.data(), 1, 8, combiner, dim, by_key.data()),
                 done);
        CHECK_EQ(done, HasOwnLoop(dim));
        for (size_t s = 1; done && s < 8; ++s) {
          const float scale = sok::SegmentScale(combiner, nullptr, splits[s + 1] - splits[s]);
          for (int64_t j = 0; j < dim; ++j) {
            float sum = 0.0f;
            for (int64_t i = splits[s]; i < splits[s + 1]; ++i) sum += records.At(rows[static_cast<size_t>(i - 2)])[j];
            expected[s * static_cast<size_t>(dim) + static_cast<size_t>(j)] = sum * scale;
          }
        }
        CHECK(out == expected);
        CHECK(by_key == expected);
      }
    }
  }
}

TEST(NumbersAreCheckedAndConverted) {
  for (const sok::RowKernels* kernels : All()) {
    for (const int64_t n : {0, 1, 7, 8, 33}) {
      const size_t size = static_cast<size_t>(n);
      std::vector<uint64_t> keys(size);
      for (size_t i = 0; i < size; ++i) keys[i] = i * 3;
      CHECK(kernels->all_below(keys.data(), n, 100));
      std::vector<uint32_t> rows(size);
      CHECK(!kernels->narrow(keys.data(), n, 100, rows.data()));
      for (size_t i = 0; i < size; ++i) CHECK_EQ(rows[i], static_cast<uint32_t>(i * 3));
      std::vector<int64_t> ids(size);
      CHECK_EQ(kernels->widen(rows.data(), n, int64_t{5} << 32, ids.data()), 0);
      for (size_t i = 0; i < size; ++i) CHECK_EQ(ids[i], (int64_t{5} << 32) + static_cast<int64_t>(i * 3));
      for (size_t bad = 0; bad < size; ++bad) {
        for (const uint64_t key : {uint64_t{100}, uint64_t{1} << 32, ~uint64_t{0}}) {
          std::vector<uint64_t> with = keys;
          with[bad] = key;
          CHECK(!kernels->all_below(with.data(), n, 100));
          CHECK(kernels->narrow(with.data(), n, 100, rows.data()));
          CHECK_EQ(rows[bad], kNoRow);
          CHECK_EQ(kernels->widen(rows.data(), n, 0, ids.data()), 1);
          CHECK_EQ(ids[bad], -1);
        }
        std::vector<int64_t> splits(keys.begin(), keys.end());
        CHECK(kernels->never_falls(splits.data(), n));
        if (bad == 0) continue;
        splits[bad] = splits[bad - 1] - 1;
        CHECK(!kernels->never_falls(splits.data(), n));
        splits[bad] = INT64_MIN;  // the difference alone would overflow
        CHECK(!kernels->never_falls(splits.data(), n));
      }
    }
  }
}

TEST(SegmentsGoToTheirSlots) {
  std::mt19937 rng(7);
  const std::vector<int64_t> splits = {0, 3, 3, 4, 24};
  const std::vector<uint32_t> first = {0, 1, 0, kNoRow, 2, 1, 3, 3, 0, 4, 5, 6, 7, 8, 9, 0, 1, 2, 10, 11, 4, 4, 4, 12};
  for (const sok::RowKernels* kernels : All()) {
    for (const int64_t dim : kDims) {
      const std::vector<float> values = Random(&rng, 24 * dim);
      for (const sok::Combiner combiner : {sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kSqrtn}) {
        for (const bool pooled : {true, false}) {
          if (!pooled && combiner != sok::Combiner::kSum) continue;
          std::vector<float> sums(static_cast<size_t>(14 * dim), 7.0f), expected(sums.size(), 7.0f);
          std::fill_n(expected.begin(), 13 * dim, 0.0f);
          uint32_t next = 0;
          const bool done = kernels->sum_segments(first.data(), pooled ? splits.data() : nullptr, pooled ? 4 : 24,
                                                  combiner, values.data(), dim, &next, sums.data());
          CHECK_EQ(done, HasOwnLoop(dim));
          if (!done) continue;
          CHECK_EQ(next, 13u);
          for (int64_t i = 0; i < 24; ++i) {
            int64_t s = pooled ? 0 : i;
            while (pooled && splits[static_cast<size_t>(s + 1)] <= i) ++s;
            const int64_t count = pooled ? splits[static_cast<size_t>(s + 1)] - splits[static_cast<size_t>(s)] : 1;
            const float scale = sok::SegmentScale(combiner, nullptr, count);
            for (int64_t j = 0; j < dim && first[static_cast<size_t>(i)] != kNoRow; ++j) {
              const float add = scale * values[static_cast<size_t>(s * dim + j)];
              expected[static_cast<size_t>(int64_t{first[static_cast<size_t>(i)]} * dim + j)] += add;
            }
          }
          CHECK(sums == expected);
        }
      }
    }
  }
}

// In slices, as threads do it; what was there before a place's first row does not count.
TEST(GradientsGoToTheirPlaces) {
  std::mt19937 rng(8);
  const std::vector<int64_t> splits = {0, 3, 3, 4, 24};
  const std::vector<int32_t> place = {0, 1, 0, 2, 2, 1, 3, 3, 0, 4, 5, 6, 7, 8, 9, 0, 1, 2, 10, 11, 4, 4, 4, 12};
  for (const sok::RowKernels* kernels : All()) {
    for (const int64_t dim : kDims) {
      const std::vector<float> values = Random(&rng, 24 * dim);
      std::vector<int32_t> index;
      int32_t next = 0;
      for (const int32_t at : place) {
        const bool first = at == next;
        next += first;
        index.push_back((5 + at * static_cast<int32_t>(dim)) | (first ? INT32_MIN : 0));
      }
      for (const sok::Combiner combiner : {sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kSqrtn}) {
        for (const bool pooled : {true, false}) {
          if (!pooled && combiner != sok::Combiner::kSum) continue;
          const int64_t size = 5 + 13 * dim;
          std::vector<float> sums(static_cast<size_t>(size), NAN), expected(sums.size(), 0.0f);
          bool done = true;
          const int64_t bounds[] = {0, size / 3, size};
          for (int slice = 0; slice < 2; ++slice) {
            done = kernels->scatter(index.data(), pooled ? splits.data() : nullptr, pooled ? 4 : 24, combiner,
                                    values.data(), dim, bounds[slice], bounds[slice + 1], sums.data());
          }
          CHECK_EQ(done, HasOwnLoop(dim));
          if (!done) continue;
          for (int64_t i = 0; i < 24; ++i) {
            int64_t s = pooled ? 0 : i;
            while (pooled && splits[static_cast<size_t>(s + 1)] <= i) ++s;
            const int64_t count = pooled ? splits[static_cast<size_t>(s + 1)] - splits[static_cast<size_t>(s)] : 1;
            const float scale = sok::SegmentScale(combiner, nullptr, count);
            for (int64_t j = 0; j < dim; ++j) {
              const float add = scale * values[static_cast<size_t>(s * dim + j)];
              expected[static_cast<size_t>(5 + place[static_cast<size_t>(i)] * dim + j)] += add;
            }
          }
          for (size_t i = 0; i < 5; ++i) CHECK(std::isnan(sums[i]));
          CHECK(std::equal(sums.begin() + 5, sums.end(), expected.begin() + 5));
        }
      }
    }
  }
}

TEST(RowsAreAddedWhereTheyBelong) {
  std::mt19937 rng(8);
  const std::vector<size_t> where = {0, 1, 0, 2, 1, 0, 3, 3, 0, 1, 2, 3};
  for (const sok::RowKernels* kernels : All()) {
    for (const int64_t dim : kDims) {
      const std::vector<float> values = Random(&rng, 12 * dim);
      std::vector<float> sums(static_cast<size_t>(4 * dim), 7.0f), expected(sums.size(), 0.0f);
      std::vector<const float*> from;
      std::vector<float*> to;
      std::vector<uint8_t> fresh;
      for (size_t i = 0; i < where.size(); ++i) {
        from.push_back(values.data() + static_cast<int64_t>(i) * dim);
        to.push_back(sums.data() + static_cast<int64_t>(where[i]) * dim);
        fresh.push_back(std::find(where.begin(), where.end(), where[i]) == where.begin() + static_cast<int64_t>(i));
        for (int64_t j = 0; j < dim; ++j)
          expected[where[i] * static_cast<size_t>(dim) + static_cast<size_t>(j)] += from.back()[j];
      }
      kernels->add_rows(from.data(), to.data(), fresh.data(), 12, dim);
      CHECK(sums == expected);
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
        std::vector<float> by_row = start;  // the same by row number, all in one slab
        float* slab = by_row.data();
        const int64_t ids[3] = {2, 0 | (int64_t{9} << 32), 1};
        kernels->update_rows({&slab, 2, 3, floats}, rule, ids, dim, grads.data(), 3, dim);
        for (int64_t i = 0; i < 3; ++i) {
          float* w = expected.data() + (at[i] - records.data());
          for (int64_t j = 0; j < dim; ++j) {
            const float g = grads[static_cast<size_t>(i * dim + j)];
            if (rule.rule == sok::Rule::kSgd) sok::Sgd(rule).Element(g, &w[j]);
            if (rule.rule == sok::Rule::kAdagrad) sok::Adagrad(rule).Element(g, &w[j], &w[dim + j]);
            if (rule.num_slots() == 2) sok::Adam(rule).Element(g, &w[j], &w[dim + j], &w[2 * dim + j]);
          }
        }
        CHECK(records == expected);
        CHECK(by_row == expected);
      }
    }
  }
}

TEST(RulesThatLookAtWholeRowsGiveTheSameBitsEverywhere) {
  std::mt19937 rng(4);
  for (const char* name : {"rowwise_adagrad", "rowwise_adam", "lamb", "group_ftrl", "lazy_adam_by_row"}) {
    const sok::UpdateRule rule = RuleNamed(name, 3);
    for (const int64_t dim : kDims) {
      const int64_t floats = dim + rule.slot_floats(dim) + 1;  // one behind, of another's
      std::vector<float> start = Random(&rng, 3 * floats);
      for (float& x : start) x = std::fabs(x);
      const std::vector<float> grads = Random(&rng, 3 * dim);
      std::vector<float> first;
      for (const sok::RowKernels* kernels : All()) {
        std::vector<float> records = start, by_row = start;
        float* at[3] = {records.data() + 2 * floats, records.data(), records.data() + floats};
        kernels->update(rule, at, dim, grads.data(), 3, dim);
        float* slab = by_row.data();
        const int64_t ids[3] = {2, 0, 1};
        kernels->update_rows({&slab, 2, 3, floats}, rule, ids, dim, grads.data(), 3, dim);
        CHECK(by_row == records);
        if (first.empty()) first = records;
        CHECK(records == first);
        for (int64_t row = 0; row < 3; ++row)
          CHECK(records[row * floats + floats - 1] == start[row * floats + floats - 1]);
        CHECK(records[0] != start[0]);
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
      for (const int64_t first_block : {0, 3}) {
        kernels->fill_uniform(init.seed, init.a, init.b - init.a, keys, 7, dim, first_block, at);
        init.first_column = 4 * first_block;
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
        sok::AlphaCursor cursor(history.view(), from + 1);
        for (int64_t call = from + 1; call <= kCalls; ++call) {
          const double alpha = cursor.Next().alpha;
          for (size_t j = 0; j < exact_w.size(); ++j) {
            exact_m[j] *= static_cast<double>(rule.beta_1);
            exact_v[j] *= static_cast<double>(rule.beta_2);
            exact_w[j] -= alpha * exact_m[j] / (std::sqrt(exact_v[j]) + static_cast<double>(rule.epsilon));
          }
        }
        const std::vector<float> before = w;
        const sok::Decay decay = sums.Of(history, from, kCalls);
        for (const sok::RowKernels* kernels : All()) {
          std::vector<float> read(before.size()), settled = before, slots = m;
          slots.insert(slots.end(), v.begin(), v.end());
          kernels->read_decayed(rule, decay, before.data(), slots.data(), dim, read.data());
          kernels->settle(rule, decay, dim, settled.data(), slots.data());
          CHECK(read == settled);
          const std::vector<float> m2(slots.begin(), slots.begin() + dim), v2(slots.begin() + dim, slots.end());
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
