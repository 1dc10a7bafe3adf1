#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "detail/vector4.h"
#include "device_memory.h"
#include "sok/error.h"
#include "sok/sum_rows.h"

namespace {

using Sums = std::map<std::pair<int64_t, int64_t>, std::vector<float>>;  // by table and row id

Sums Run(const std::vector<sok::DeviceAddends>& addends, const std::vector<int64_t>& table_rows, int64_t dim,
         sok::FloatType type, int64_t n, std::vector<uint64_t>* bad = nullptr) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  DeviceArray<int64_t> row_ids(n), num_sums(1);
  DeviceArray<int32_t> tables(n);
  DeviceArray<float> sums(n * dim);
  DeviceArray<uint64_t> first_bad(std::vector<uint64_t>(addends.size(), sok::kNothingBad));
  sok::SumRows(cuda, &scratch, addends.data(), static_cast<int64_t>(addends.size()), table_rows.data(),
               static_cast<int64_t>(table_rows.size()), dim, type, row_ids, tables, sums, num_sums, first_bad);
  if (bad != nullptr) *bad = first_bad.Get();
  Sums got;
  const auto ids = row_ids.Get();
  const auto of_table = tables.Get();
  const auto values = sums.Get();
  std::pair<int64_t, int64_t> before = {-1, -1};
  for (int64_t k = 0; k < num_sums.Get()[0]; ++k) {
    const std::pair<int64_t, int64_t> row = {of_table[static_cast<size_t>(k)], ids[static_cast<size_t>(k)]};
    CHECK(before < row);  // distinct, by table and row id
    before = row;
    got[row] = {values.begin() + k * dim, values.begin() + (k + 1) * dim};
  }
  return got;
}

}  // namespace

TEST(GroupsOfTablesAreSummedLikePlainLoops) {
  for (const int64_t segments : {1, 60, 700}) {
    for (const int64_t dim : {1, 4, 7, 16}) {
      std::mt19937_64 rng(static_cast<uint64_t>(segments));
      const std::vector<int64_t> table_rows = {5, 0, 1000, int64_t{1} << 31};
      std::vector<sok::DeviceAddends> addends;
      std::vector<std::unique_ptr<DeviceArray<int64_t>>> words;
      std::vector<std::unique_ptr<DeviceArray<float>>> floats;
      Sums expected;
      int64_t n = 0;
      for (int64_t k = 0; k < 5; ++k) {
        const int64_t table = k == 0 ? 0 : k == 4 ? 3 : 2, hotness = k == 1 ? 1 : 4;
        const auto combiner = k == 2 ? sok::Combiner::kMean : k == 4 ? sok::Combiner::kSqrtn : sok::Combiner::kSum;
        const bool ragged = k >= 3, weighted = k == 3;
        std::vector<int64_t> splits = {0}, ids;
        for (int64_t s = 0; s < segments; ++s) {
          splits.push_back(splits.back() + (ragged ? static_cast<int64_t>(rng() % 2) * 4 : hotness));
        }
        std::vector<float> values, weights;
        for (int64_t i = 0; i < segments * (dim + 1); ++i) values.push_back(static_cast<float>(rng() % 9) * 4.0f);
        for (int64_t i = 0; i < splits.back(); ++i) {
          const int64_t rows = table_rows[static_cast<size_t>(table)];
          ids.push_back(rng() % 10 == 0  ? -1
                        : rng() % 3 == 0 ? rows - 1
                                         : static_cast<int64_t>(rng() % static_cast<uint64_t>(rows)));
          weights.push_back(static_cast<float>(rng() % 3));
        }
        sok::DeviceAddends a;
        a.table = table;
        words.push_back(std::make_unique<DeviceArray<int64_t>>(ids));
        a.row_ids = words.back()->data();
        floats.push_back(std::make_unique<DeviceArray<float>>(values));
        a.values = floats.back()->data();
        a.values_stride = dim + 1;
        words.push_back(std::make_unique<DeviceArray<int64_t>>(splits));
        a.segments.row_splits = ragged ? words.back()->data() : nullptr;
        a.segments.hotness = hotness;
        a.segments.segments = segments;
        a.segments.n = splits.back();
        floats.push_back(std::make_unique<DeviceArray<float>>(weights));
        a.weights = weighted ? floats.back()->data() : nullptr;
        a.combiner = combiner;
        addends.push_back(a);
        n += a.segments.n;
        for (int64_t s = 0; s < segments; ++s) {
          for (int64_t i = splits[static_cast<size_t>(s)]; i < splits[static_cast<size_t>(s + 1)]; ++i) {
            if (ids[static_cast<size_t>(i)] < 0) continue;
            // Means of 4, roots of 4: the factors are powers of two, and all sums exact.
            const float scale = combiner == sok::Combiner::kMean ? 0.25f : combiner == sok::Combiner::kSqrtn ? 0.5f : 1;
            auto& sum = expected[{table, ids[static_cast<size_t>(i)]}];
            sum.resize(static_cast<size_t>(dim));
            for (int64_t j = 0; j < dim; ++j)
              sum[static_cast<size_t>(j)] += scale * (weighted ? weights[static_cast<size_t>(i)] : 1.0f) *
                                             values[static_cast<size_t>(s * (dim + 1) + j)];
          }
        }
      }
      CHECK(Run(addends, table_rows, dim, sok::FloatType::kFloat32, n) == expected);
    }
  }
}

TEST(SixteenBitGradientsAreSummedInFloat32) {
  const std::vector<int64_t> ids = {3, 1, 3, 3};
  std::vector<uint16_t> halves, brains;
  for (const float x : {1.0f, 2.0f, 2048.0f, 0.5f}) {
    halves.push_back(sok::HalfBits(x));
    brains.push_back(sok::BFloat16Bits(x));
  }
  for (const bool half : {true, false}) {
    DeviceArray<int64_t> row_ids(ids);
    DeviceArray<uint16_t> values(half ? halves : brains);
    sok::DeviceAddends a;
    a.row_ids = row_ids;
    a.values = values.data();
    a.values_stride = 1;
    a.segments.segments = a.segments.n = 4;
    const Sums got = Run({a}, {4}, 1, half ? sok::FloatType::kFloat16 : sok::FloatType::kBFloat16, 4);
    CHECK_EQ(got.at({0, 3})[0], 2049.5f);  // no 16-bit number
    CHECK_EQ(got.at({0, 1})[0], 2.0f);
  }
}

TEST(TheUpperHalfOfARowIdComesBack) {
  const int64_t erased_once = (int64_t{1} << 32) | 5;
  DeviceArray<int64_t> row_ids(std::vector<int64_t>{erased_once, 3, erased_once});
  DeviceArray<float> values(std::vector<float>{1, 2, 4});
  sok::DeviceAddends a;
  a.row_ids = row_ids;
  a.values = values.data();
  a.values_stride = 1;
  a.segments.segments = a.segments.n = 3;
  const Sums got = Run({a}, {6}, 1, sok::FloatType::kFloat32, 3);
  CHECK_EQ(got.size(), 2u);
  CHECK(got.at({0, 3}) == std::vector<float>{2});
  CHECK(got.at({0, erased_once}) == std::vector<float>{5});
}

TEST(RowsThatATableDoesNotHaveAreDroppedAndReported) {
  DeviceArray<int64_t> row_ids(std::vector<int64_t>{0, 2, (int64_t{1} << 40) | 0xFFFFFFF0});
  DeviceArray<float> values(std::vector<float>{1, 2, 3});
  sok::DeviceAddends a;
  a.row_ids = row_ids;
  a.values = values.data();
  a.values_stride = 1;
  a.segments.segments = a.segments.n = 3;
  std::vector<uint64_t> bad;
  const Sums got = Run({a}, {2}, 1, sok::FloatType::kFloat32, 3, &bad);
  CHECK_EQ(got.size(), 1u);
  CHECK_EQ(bad[0], 1u);
  DeviceArray<int64_t> splits(std::vector<int64_t>{0, 2, 1, 3});
  a.segments.row_splits = splits;
  Run({a}, {2}, 1, sok::FloatType::kFloat32, 3, &bad);
  CHECK_EQ(bad[0], 1u);
  Run({a}, {int64_t{1} << 31}, 1, sok::FloatType::kFloat32, 3, &bad);
  CHECK_EQ(bad[0], 2u);  // the row id of position 2 before segment 1, 3 + 1
}

TEST(RoomBehindTheSumsIsRowIdsOfNobodyAndZeros) {
  constexpr int64_t kMost = 300;  // of more than two blocks
  const std::vector<int64_t> dims = {4, 3, 4}, counts = {kMost, 40, 0}, rows = {7, 40, 5};
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  DeviceArray<int64_t> num_sums(3);
  std::vector<std::unique_ptr<DeviceArray<int64_t>>> given, row_ids;
  std::vector<std::unique_ptr<DeviceArray<float>>> ones;
  DeviceArray<float> of_dim_4(std::vector<float>(4 * (kMost + 64), 9.0f)), of_dim_3(std::vector<float>(3 * 64, 9.0f));
  std::vector<sok::DeviceAddends> addends;
  std::vector<sok::DeviceRowSums> tables;
  for (size_t t = 0; t < 3; ++t) {
    std::vector<int64_t> ids(static_cast<size_t>(counts[t]));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 5) % rows[t];
    given.push_back(std::make_unique<DeviceArray<int64_t>>(ids));
    ones.push_back(std::make_unique<DeviceArray<float>>(std::vector<float>(ids.size() * 4, 1.0f)));
    row_ids.push_back(std::make_unique<DeviceArray<int64_t>>(std::vector<int64_t>(ids.size() + 2, 9)));
    sok::DeviceAddends a;
    a.table = static_cast<int64_t>(t);
    a.row_ids = *given[t];
    a.values = ones[t]->data();
    a.values_stride = dims[t];
    a.segments.segments = a.segments.n = counts[t];
    addends.push_back(a);
    float* sums = t == 1 ? of_dim_3.data() : of_dim_4.data() + (t == 2 ? 4 * (kMost + 20) : 0);
    tables.push_back({rows[t], dims[t], *row_ids[t], sums, num_sums + t, counts[t]});
  }
  sok::SumRowsOfTables(cuda, &scratch, addends.data(), 3, tables.data(), 3, sok::FloatType::kFloat32, nullptr);
  CHECK(num_sums.Get() == (std::vector<int64_t>{7, 8, 0}));
  const std::vector<float> sums = of_dim_4.Get(), others = of_dim_3.Get();
  for (size_t i = 0; i < kMost + 2; ++i) {
    const int64_t id = row_ids[0]->Get()[i];
    CHECK_EQ(id, i < 7 ? static_cast<int64_t>(i) : i < kMost ? -1 : 9);
    CHECK(i >= 7 ? sums[4 * i + 3] == (i < kMost ? 0.0f : 9.0f) : sums[4 * i] >= 42.0f && sums[4 * i] <= 43.0f);
  }
  for (size_t i = 0; i < 64 * 3; ++i) CHECK_EQ(others[i], i < 8 * 3 ? 5.0f : i < 40 * 3 ? 0.0f : 9.0f);
  CHECK(row_ids[2]->Get() == (std::vector<int64_t>{9, 9}));
  CHECK_EQ(sums[4 * (kMost + 20)], 9.0f);
}

TEST(NoAddendsGiveNoSums) {
  CHECK_EQ(Run({}, {}, 1, sok::FloatType::kFloat32, 0).size(), 0u);
  CHECK_EQ(Run({sok::DeviceAddends()}, {3}, 1, sok::FloatType::kFloat32, 0).size(), 0u);
}

TEST(GroupsThatDoNotFitAreRefused) {
  sok::DeviceAddends a;
  CHECK_THROWS(Run({a}, {3}, 0, sok::FloatType::kFloat32, 0), sok::InvalidArgument, "dim must be at least 1");
  CHECK_THROWS(Run({a}, {1, 0xFFFFFFFE}, 1, sok::FloatType::kFloat32, 0), sok::InvalidArgument,
               "table 1 with 4294967294");
  a.segments.n = int64_t{1} << 31;
  CHECK_THROWS(Run({a}, {1}, 1, sok::FloatType::kFloat32, 0), sok::InvalidArgument, "2147483648 do not fit");
  a.table = 1;
  CHECK_THROWS(Run({a}, {1}, 1, sok::FloatType::kFloat32, 0), sok::InvalidArgument, "table 1 is not one of the 1");
}
