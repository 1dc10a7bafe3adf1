#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "detail/vector4.h"
#include "device_memory.h"
#include "rules.h"
#include "sok/device_memory.h"
#include "sok/device_update.h"
#include "sok/error.h"

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

sok::UpdateRule MakeRule(const std::string& name, int64_t step = 3, double beta_1 = 0.9, double beta_2 = 0.999) {
  const double sgd[] = {0.5}, adagrad[] = {0.5, 0.1, 1e-7}, adam[] = {0.01, beta_1, beta_2, 1e-7};
  if (name == "sgd") return sok::MakeUpdateRule(name, sgd, 1, step);
  if (name == "adagrad") return sok::MakeUpdateRule(name, adagrad, 3, step);
  return sok::MakeUpdateRule(name, adam, 4, step);
}

std::vector<float> Random(std::mt19937* rng, int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(*rng);
  return x;
}

// Records in slabs of four rows: [weights | 1 float of another's | slots], on the device and here.
struct Table {
  Table(std::mt19937* rng, int64_t dim, int64_t slot_floats, int64_t rows)
      : dim(dim), stride((dim + 1 + slot_floats + 3) / 4 * 4), values(Random(rng, rows * stride)), device(values) {
    for (size_t i = 0; i < values.size(); ++i)  // slots are never negative
      if (static_cast<int64_t>(i) % stride > dim) values[i] = std::fabs(values[i]);
    device.Set(values);
    for (int64_t r = 0; r < rows; r += 4) slabs.push_back(device.data() + r * stride);
    device_slabs = std::make_unique<DeviceArray<float*>>(slabs);
    update.rows.slabs = device_slabs->data();
    update.rows.shift = 2;
    update.rows.mask = 3;
    update.rows.stride = stride;
    update.num_rows = rows;
    update.slot_offset = dim + 1;
  }
  float* Record(int64_t row) { return values.data() + row * stride; }

  int64_t dim, stride;
  std::vector<float> values;
  DeviceArray<float> device;
  std::vector<float*> slabs;
  std::unique_ptr<DeviceArray<float*>> device_slabs;
  sok::DeviceUpdate update;
};

template <class R, size_t... k, size_t... s>
void OnRow(const R& rule, const float* g, float scale, float* w, float* slots, int64_t dim, std::index_sequence<k...>,
           std::index_sequence<s...>) {
  if constexpr (!sok::kByRow<R>) {
    for (int64_t j = 0; j < dim; ++j) rule.Element(g[j] * scale, &w[j], &slots[static_cast<int64_t>(k) * dim + j]...);
  } else {
    float* scalars = slots + static_cast<int64_t>(sizeof...(k)) * dim;
    float factor;
    if constexpr (R::kSums > 0) {
      sok::SumsOfRow<R::kSums> sums = {};
      for (int64_t j = 0; j < dim; ++j) {
        const auto terms = rule.First(g[j] * scale, w[j], &slots[static_cast<int64_t>(k) * dim + j]...);
        for (int i = 0; i < R::kSums; ++i) sums.of[i] += terms.of[i];
      }
      factor = rule.Factor(sums, dim, &scalars[s]...);
    } else {
      factor = rule.Factor(dim, &scalars[s]...);
    }
    for (int64_t j = 0; j < dim; ++j)
      rule.Element(g[j] * scale, factor, &w[j], &slots[static_cast<int64_t>(k) * dim + j]...);
  }
}

// Whether sums over a row go into it, which a device adds up in another order.
bool HasSums(const sok::UpdateRule& rule) {
  return sok::WithRule(rule.rule, [](auto* null) { return std::remove_pointer_t<decltype(null)>::kSums > 0; });
}

// The rule on one record, element by element.
void Apply(const sok::UpdateRule& rule, const float* g, float scale, int64_t dim, float* record) {
  sok::WithRule(rule.rule, [&](auto* null) {
    using R = std::remove_pointer_t<decltype(null)>;
    OnRow(R(rule), g, scale, record, record + dim + 1, dim, std::make_index_sequence<sok::kNumVectors<R>>(),
          std::make_index_sequence<sok::kNumScalars<R>>());
  });
}

}  // namespace

TEST(EveryRuleGivesTheBitsOfTheCpu) {
  const sok::Cuda cuda;
  std::mt19937 rng(1);
  for (const std::string& name : RuleNames()) {
    for (const int64_t dim : {1, 3, 4, 16, 64, 150}) {
      for (const float scale : {1.0f, 0.125f}) {
        sok::StreamScratch scratch(cuda);
        const sok::UpdateRule rule = RuleNamed(name, 3);
        Table tables[2] = {{&rng, dim, rule.slot_floats(dim), 40}, {&rng, dim, rule.slot_floats(dim), 8}};
        DeviceArray<uint32_t> stamps(std::vector<uint32_t>(48));
        sok::DeviceDecay decay[2];
        sok::DeviceUpdate updates[2] = {tables[0].update, tables[1].update};
        for (int t = 0; t < 2 && rule.decays(); ++t) updates[t].decay = decay[t].Begin(cuda, rule, stamps + 40 * t);
        std::vector<int64_t> row_ids;
        std::vector<int32_t> of_table;
        for (int64_t row = 39; row >= 0; row -= 2) {
          row_ids.push_back(row % 5 == 0 ? -1 : row % 8 == 7 ? row / 8 : row);
          of_table.push_back(row % 8 == 7);
        }
        const int64_t n = static_cast<int64_t>(row_ids.size());
        const std::vector<float> grads = Random(&rng, n * dim);
        DeviceArray<int64_t> ids(row_ids), num(std::vector<int64_t>{n - 1});
        DeviceArray<int32_t> which(of_table);
        DeviceArray<float> g(grads);
        sok::UpdateRows(cuda, &scratch, rule, updates, 2, which, ids, g.data(), sok::FloatType::kFloat32, n, num, dim,
                        scale, sok::Nonfinite::kSkip, nullptr);
        for (int64_t i = 0; i < n - 1; ++i) {  // the last one is not among the num
          const size_t k = static_cast<size_t>(i);
          if (row_ids[k] >= 0) Apply(rule, grads.data() + i * dim, scale, dim, tables[of_table[k]].Record(row_ids[k]));
        }
        for (Table& table : tables) {
          const std::vector<float> got = table.device.Get();
          const float tolerance = HasSums(rule) ? 1e-5f : 0.0f;
          for (size_t k = 0; k < got.size(); ++k) {  // a variance of random slots may be negative: NaN on both
            CHECK(got[k] == table.values[k] || (std::isnan(got[k]) && std::isnan(table.values[k])) ||
                  std::fabs(got[k] - table.values[k]) <= tolerance * (1.0f + std::fabs(table.values[k])));
          }
        }
      }
    }
  }
}

TEST(SixteenBitGradientsAreScaledInFloat32) {
  const sok::Cuda cuda;
  std::mt19937 rng(2);
  for (const auto type : {sok::FloatType::kFloat16, sok::FloatType::kBFloat16}) {
    sok::StreamScratch scratch(cuda);
    const sok::UpdateRule rule = MakeRule("adagrad");
    Table table(&rng, 8, 8, 4);
    std::vector<uint16_t> words;
    std::vector<float> values;
    for (const float x : Random(&rng, 8)) {
      words.push_back(type == sok::FloatType::kFloat16 ? sok::HalfBits(x) : sok::BFloat16Bits(x));
      values.push_back(type == sok::FloatType::kFloat16 ? sok::FloatOfHalf(words.back())
                                                        : sok::FloatOfBFloat16(words.back()));
    }
    DeviceArray<uint16_t> g(words);
    DeviceArray<int64_t> ids(std::vector<int64_t>{2});
    sok::UpdateRows(cuda, &scratch, rule, &table.update, 1, nullptr, ids, g.data(), type, 1, nullptr, 8, 1.0f / 1024,
                    sok::Nonfinite::kAllow, nullptr);
    Apply(rule, values.data(), 1.0f / 1024, 8, table.Record(2));
    CHECK(table.device.Get() == table.values);
  }
}

TEST(GradientsThatAreNotFiniteAreLetThroughSkippedOrRaised) {
  const sok::Cuda cuda;
  const sok::UpdateRule rule = MakeRule("sgd");
  for (const float bad_value : {kNan, kInf, -kInf}) {
    for (const int64_t at : {0, 69, 70}) {  // the last column of row 0; the first of row 1
      for (const auto mode : {sok::Nonfinite::kAllow, sok::Nonfinite::kSkip, sok::Nonfinite::kRaise}) {
        std::mt19937 rng(3);
        sok::StreamScratch scratch(cuda);
        Table table(&rng, 70, 0, 4);
        std::vector<float> grads = Random(&rng, 140);
        grads[static_cast<size_t>(at)] = bad_value;
        DeviceArray<float> g(grads);
        DeviceArray<int64_t> ids(std::vector<int64_t>{3, 1});
        DeviceArray<uint64_t> first_bad(std::vector<uint64_t>{sok::kNothingBad});
        sok::UpdateRows(cuda, &scratch, rule, &table.update, 1, nullptr, ids, g.data(), sok::FloatType::kFloat32, 2,
                        nullptr, 70, 1.0f, mode, first_bad);
        const int64_t bad_row = at / 70;
        const std::vector<float> got = table.device.Get();
        for (int64_t i = 0; i < 2; ++i) {
          const int64_t row = i == 0 ? 3 : 1;
          const bool changes = mode == sok::Nonfinite::kAllow || (mode == sok::Nonfinite::kSkip && i != bad_row);
          const float* g_row = grads.data() + i * 70;
          for (int64_t j = 0; j < 70; ++j) {
            const float old = table.Record(row)[j], now = got[static_cast<size_t>(row * table.stride + j)];
            const float expected = changes ? old - rule.lr * g_row[j] : old;
            CHECK(now == expected || (now != now && expected != expected));
          }
        }
        if (mode == sok::Nonfinite::kRaise) {
          CHECK_THROWS(sok::ThrowIfBadToHost(cuda, first_bad, ids, 2), sok::InvalidArgument,
                       bad_row == 0 ? "position 0, of row id 3, holds NaN" : "position 1, of row id 1, holds NaN");
        } else {
          sok::ThrowIfBadToHost(cuda, first_bad, ids, 2);
        }
      }
    }
  }
}

TEST(RowsThatATableDoesNotHaveAreReportedAndTouchNothing) {
  const sok::Cuda cuda;
  std::mt19937 rng(4);
  sok::StreamScratch scratch(cuda);
  Table table(&rng, 4, 0, 4);
  DeviceArray<float> g(Random(&rng, 12));
  DeviceArray<int64_t> ids(std::vector<int64_t>{-7, 4, int64_t{1} << 40});
  DeviceArray<uint64_t> first_bad(std::vector<uint64_t>{sok::kNothingBad});
  sok::UpdateRows(cuda, &scratch, MakeRule("sgd"), &table.update, 1, nullptr, ids, g.data(), sok::FloatType::kFloat32,
                  3, nullptr, 4, 1.0f, sok::Nonfinite::kAllow, first_bad);
  CHECK(table.device.Get() == table.values);
  CHECK_THROWS(sok::ThrowIfBadToHost(cuda, first_bad, ids, 3), sok::InvalidArgument, "position 1, of row id 4");
}

// Rows that miss calls, by the closed form and by replay, against every call done for every row.
TEST(AdamMovesRowsThatNoGradientReaches) {
  const sok::Cuda cuda;
  struct Betas {
    double beta_1, beta_2;
    bool is_closed_form;
  };
  for (const Betas betas : {Betas{0.9, 0.999, true}, Betas{0.99, 0.9, false}}) {
    std::mt19937 rng(5);
    const int64_t dim = 6, rows = 8;
    Table table(&rng, dim, 2 * dim, rows);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t j = dim + 1; j < 3 * dim + 1; ++j) table.Record(row)[j] = 0.0f;
    table.device.Set(table.values);
    std::vector<double> w, m(static_cast<size_t>(rows * dim)), v(m);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t j = 0; j < dim; ++j) w.push_back(table.Record(row)[j]);
    DeviceArray<uint32_t> stamps(std::vector<uint32_t>(8));
    sok::DeviceDecay decay;
    for (int64_t call = 1; call <= 330; ++call) {
      sok::StreamScratch scratch(cuda);
      // A learning rate that changes; row 7 never comes, rows 0 to 2 come once and then again after all others.
      sok::UpdateRule rule = MakeRule("adam", call, betas.beta_1, betas.beta_2);
      if (call > 100) rule.missed.alpha = rule.lr *= 0.5f;
      const int64_t row = call < 4 || call > 327 ? call % 3 : 3 + call % 4;
      CHECK_EQ(sok::DecaySums::Fits(rule), betas.is_closed_form);
      table.update.decay = decay.Begin(cuda, rule, stamps);
      const std::vector<float> grads = Random(&rng, dim);
      DeviceArray<float> g(grads);
      DeviceArray<int64_t> ids(std::vector<int64_t>{row});
      sok::UpdateRows(cuda, &scratch, rule, &table.update, 1, nullptr, ids, g.data(), sok::FloatType::kFloat32, 1,
                      nullptr, dim, 1.0f, sok::Nonfinite::kAllow, nullptr);
      decay.Append(cuda);
      for (size_t k = 0; k < w.size(); ++k) {
        const bool is_mine = static_cast<int64_t>(k) / dim == row;
        const double x = is_mine ? grads[k % static_cast<size_t>(dim)] : 0.0;
        m[k] += (x - m[k]) * rule.one_minus_beta_1;
        v[k] += (x * x - v[k]) * rule.one_minus_beta_2;
        if (m[k] != 0.0) w[k] -= rule.lr * m[k] / (std::sqrt(v[k]) + rule.epsilon);
      }
      scratch.Reset();
    }
    // Every row twice, so that two tiles want the same one.
    std::vector<int64_t> all;
    for (int64_t row = 0; row < rows; ++row) all.insert(all.end(), {row, row, -1, rows});
    DeviceArray<int64_t> ids(all);
    table.update.decay = decay.args(stamps);
    sok::SettleRows(cuda, MakeRule("adam", 330, betas.beta_1, betas.beta_2), table.update, ids,
                    static_cast<int64_t>(all.size()), dim);
    const std::vector<float> got = table.device.Get();
    for (const uint32_t stamp : stamps.Get()) CHECK_EQ(stamp, 330u);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t j = 0; j < dim; ++j) {
        const double expected = w[static_cast<size_t>(row * dim + j)];
        CHECK(std::fabs(got[static_cast<size_t>(row * table.stride + j)] - expected) <=
              2e-5 * (1 + std::fabs(expected)));
      }
    }
  }
}

TEST(UpdatesThatMakeNoSenseAreRefused) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  sok::DeviceUpdate update;
  update.num_rows = 1;
  const auto run = [&](const std::string& name, int64_t dim, sok::Nonfinite nonfinite) {
    sok::UpdateRows(cuda, &scratch, MakeRule(name), &update, 1, nullptr, nullptr, nullptr, sok::FloatType::kFloat32, 1,
                    nullptr, dim, 1.0f, nonfinite, nullptr);
  };
  CHECK_THROWS(run("sgd", 0, sok::Nonfinite::kAllow), sok::InvalidArgument, "dim must be at least 1");
  CHECK_THROWS(run("sgd", 1, sok::Nonfinite::kRaise), sok::InvalidArgument, "needs first_bad");
  CHECK_THROWS(run("adam", 1, sok::Nonfinite::kAllow), sok::InvalidArgument, "table 0 has no stamps");
  CHECK_THROWS(sok::SettleRows(cuda, MakeRule("adam"), update, nullptr, 1, 1), sok::InvalidArgument, "decaying rule");
  sok::DeviceDecay decay;
  CHECK_THROWS(decay.Begin(cuda, MakeRule("sgd"), nullptr), sok::InvalidArgument, "'sgd' does not decay");
}

TEST(TheHistoryOfCallsIsPartOfItsTablesBudget) {
  const sok::Cuda cuda{};
  sok::DeviceMemory memory("table 't'"), small("table 'small'", 16);
  {
    sok::DeviceDecay decay(&memory);
    for (int call = 0; call < 5; ++call) {
      decay.Begin(cuda, MakeRule("adam"), nullptr);
      const int64_t taken = memory.in_use();
      CHECK(taken > 0);
      decay.Append(cuda);
      CHECK_EQ(memory.in_use(), taken);  // a call that has changed rows needs no more
    }
  }
  CHECK_EQ(memory.in_use(), 0);
  sok::DeviceDecay decay(&small);
  CHECK_THROWS(decay.Begin(cuda, MakeRule("adam"), nullptr), sok::OutOfMemory,
               "table 'small': no device memory for an optimizer's history of its calls");
}
