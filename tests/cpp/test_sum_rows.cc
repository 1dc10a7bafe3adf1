#include "sok/sum_rows.h"

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "threads.h"

namespace {

struct Lookup {
  std::vector<int64_t> ids;
  std::vector<int64_t> splits;  // empty: not pooled
  std::vector<float> values, weights;
  sok::Combiner combiner = sok::Combiner::kSum;
};

struct Sums {
  std::vector<int64_t> ids;
  std::vector<float> values;
};

std::vector<Sums> Run(const std::vector<std::vector<Lookup>>& tables, const std::vector<int64_t>& dims, int threads) {
  std::vector<std::vector<sok::RowAddends>> addends(tables.size());
  std::vector<sok::RowSums> jobs;
  for (size_t t = 0; t < tables.size(); ++t) {
    for (const Lookup& lookup : tables[t]) {
      sok::RowAddends a;
      a.row_ids = lookup.ids.data();
      a.n = static_cast<int64_t>(lookup.ids.size());
      a.values = lookup.values.data();
      if (!lookup.splits.empty()) {
        a.row_splits = lookup.splits.data();
        a.segments = static_cast<int64_t>(lookup.splits.size()) - 1;
        if (!lookup.weights.empty()) a.weights = lookup.weights.data();
        a.combiner = lookup.combiner;
      }
      addends[t].push_back(a);
    }
    jobs.push_back({dims[t], addends[t].data(), static_cast<int64_t>(addends[t].size())});
  }
  std::vector<Sums> sums(tables.size());
  const ThreadExecutor executor(threads);
  sok::Scratch scratch;
  sok::SumRows({executor}, &scratch, jobs.data(), static_cast<int64_t>(jobs.size()), [&](int64_t t, int64_t n) {
    Sums& s = sums[static_cast<size_t>(t)];
    s.ids.resize(static_cast<size_t>(n));
    s.values.assign(static_cast<size_t>(n * dims[static_cast<size_t>(t)]), -99.0f);
    return sok::RowSumsTarget{s.ids.data(), s.values.data()};
  });
  return sums;
}

Lookup Random(std::mt19937* rng, int64_t n, int64_t rows, int64_t dim, bool pooled, sok::Combiner combiner,
              bool weighted) {
  Lookup lookup;
  lookup.combiner = combiner;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = static_cast<int64_t>((*rng)() % static_cast<uint64_t>(rows));
    lookup.ids.push_back(id % 17 == 3 ? -1 : id);
    if (weighted) lookup.weights.push_back(static_cast<float>((*rng)() % 8) / 4.0f);
  }
  int64_t count = n;
  if (pooled) {
    lookup.splits.push_back(0);
    while (lookup.splits.back() < n) {
      lookup.splits.push_back(std::min<int64_t>(n, lookup.splits.back() + static_cast<int64_t>((*rng)() % 6)));
    }
    count = static_cast<int64_t>(lookup.splits.size()) - 1;
  }
  for (int64_t i = 0; i < count * dim; ++i) lookup.values.push_back(static_cast<float>((*rng)() % 64) / 8.0f);
  return lookup;
}

// One addend after the other, in the order in which they come.
void CheckAgainstPlainSums(const std::vector<Lookup>& lookups, int64_t dim, const Sums& got) {
  std::map<int64_t, std::vector<float>> expected;
  for (const Lookup& lookup : lookups) {
    int64_t segment = 0;
    for (size_t i = 0; i < lookup.ids.size(); ++i) {
      size_t source = i;
      float factor = 1.0f;
      if (!lookup.splits.empty()) {
        while (lookup.splits[static_cast<size_t>(segment + 1)] <= static_cast<int64_t>(i)) ++segment;
        source = static_cast<size_t>(segment);
        const int64_t first = lookup.splits[source], count = lookup.splits[source + 1] - first;
        const float* weights = lookup.weights.empty() ? nullptr : lookup.weights.data() + first;
        factor = sok::SegmentScale(lookup.combiner, weights, count);
        if (weights != nullptr) factor *= lookup.weights[i];
      }
      if (lookup.ids[i] < 0) continue;
      std::vector<float>& sum = expected[lookup.ids[i]];
      sum.resize(static_cast<size_t>(dim));
      for (int64_t j = 0; j < dim; ++j)
        sum[static_cast<size_t>(j)] +=
            factor * lookup.values[source * static_cast<size_t>(dim) + static_cast<size_t>(j)];
    }
  }
  CHECK_EQ(got.ids.size(), expected.size());
  int64_t wrong = 0;
  for (size_t r = 0; r < got.ids.size(); ++r) {
    const std::vector<float>& sum = expected[got.ids[r]];
    for (size_t j = 0; j < sum.size(); ++j) wrong += sum[j] != got.values[r * static_cast<size_t>(dim) + j];
  }
  CHECK_EQ(wrong, 0);
}

}  // namespace

TEST(SumsOfManyTablesAndLookups) {
  std::mt19937 rng(5);
  for (const int64_t dim : {1, 3, 4, 8, 16, 31, 64, 130}) {
    std::vector<std::vector<Lookup>> tables;
    tables.push_back({Random(&rng, 500, 60, dim, true, sok::Combiner::kMean, false)});
    tables.push_back({});
    tables.push_back({Random(&rng, 0, 60, dim, true, sok::Combiner::kSum, false)});
    tables.push_back({Random(&rng, 300, 10, dim, false, sok::Combiner::kSum, false),
                      Random(&rng, 700, 50, dim, true, sok::Combiner::kSqrtn, true)});
    const std::vector<int64_t> dims(tables.size(), dim);
    const std::vector<Sums> got = Run(tables, dims, 3);
    for (size_t t = 0; t < tables.size(); ++t) CheckAgainstPlainSums(tables[t], dim, got[t]);
  }
}

TEST(LargeTablesGoInParts) {
  std::mt19937 rng(7);
  for (const int64_t n : {32768, 32769, 200000}) {
    std::vector<std::vector<Lookup>> tables;
    tables.push_back({Random(&rng, n, n / 2, 5, true, sok::Combiner::kSum, false),
                      Random(&rng, n / 3, n / 2, 5, false, sok::Combiner::kSum, false)});
    tables.push_back({Random(&rng, 100, 10, 2, false, sok::Combiner::kSum, false)});
    const std::vector<Sums> got = Run(tables, {5, 2}, 3);
    CheckAgainstPlainSums(tables[0], 5, got[0]);
    CheckAgainstPlainSums(tables[1], 2, got[1]);
    const std::vector<Sums> serial = Run(tables, {5, 2}, 1);
    CHECK(serial[0].ids == got[0].ids);
    CHECK(serial[0].values == got[0].values);
  }
}

TEST(FirstAppearanceOrdersSmallTables) {
  const std::vector<Sums> got = Run({{{{7, 2, -1, 7, 0}, {}, {1, 2, 3, 4, 5}, {}, sok::Combiner::kSum}}}, {1}, 2);
  CHECK(got[0].ids == (std::vector<int64_t>{7, 2, 0}));
  CHECK(got[0].values == (std::vector<float>{5, 2, 5}));
}
