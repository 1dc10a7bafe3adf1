#include "sok/initializer.h"

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "sok/error.h"

namespace {

sok::Initializer Make(sok::InitKind kind, float a, float b) {
  sok::Initializer init;
  init.kind = kind;
  init.a = a;
  init.b = b;
  init.seed = 7;
  return init;
}

std::vector<float> Row(const sok::Initializer& init, uint64_t key, int64_t dim) {
  std::vector<float> row(static_cast<size_t>(dim), -99.0f);
  sok::FillRow(init, key, dim, row.data());
  return row;
}

}  // namespace

TEST(ExtremeWordsStayInsideTheRange) {
  CHECK_EQ(sok::UnitUniform(0), 0.0f);
  CHECK(sok::UnitUniform(0xffffffff) < 1.0f);
  for (const uint32_t word : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    for (const uint32_t other : {0u, 0x7fffffffu, 0xffffffffu}) {
      float z0, z1;
      sok::NormalPair(word, other, &z0, &z1);
      CHECK(std::isfinite(z0) && std::isfinite(z1));
    }
    CHECK(std::fabs(sok::TruncatedNormal(word)) <= 2.0f);
  }
  // The tails are reached: the inverse is not cut off early.
  CHECK(sok::TruncatedNormal(0) < -1.9999f);
  CHECK(sok::TruncatedNormal(0xffffffff) > 1.9999f);
}

TEST(ErfInvUndoesErf) {
  for (float x = -3.0f; x <= 3.0f; x += 0.01f) {
    const double y = std::erf(static_cast<double>(x));
    const double step = std::erf(static_cast<double>(x) + 1e-5) - y;  // 1e-5 in x, seen in y
    const float back = sok::ErfInv(static_cast<float>(y));
    // A float y near one holds x to one rounding of y only.
    const double rounding = std::numeric_limits<float>::epsilon() / (step / 1e-5);
    CHECK(std::fabs(back - x) <= 1e-5 + rounding);
  }
}

TEST(ShorterRowsAreTheStartOfLongerOnes) {
  for (const auto kind :
       {sok::InitKind::kConstant, sok::InitKind::kUniform, sok::InitKind::kNormal, sok::InitKind::kTruncatedNormal}) {
    const sok::Initializer init = Make(kind, 0.5f, 2.0f);
    const std::vector<float> whole = Row(init, 123, 64);
    for (const int64_t dim : {1, 3, 5, 7, 16, 17}) {
      const std::vector<float> part = Row(init, 123, dim);
      for (size_t j = 0; j < part.size(); ++j) CHECK_EQ(part[j], whole[j]);
    }
  }
}

// What a row is made of where it is cut into columns.
TEST(LaterColumnsAreThoseOfLongerRows) {
  std::vector<float> bank(3 * 64);
  for (size_t i = 0; i < bank.size(); ++i) bank[i] = static_cast<float>(i);
  for (const auto kind : {sok::InitKind::kConstant, sok::InitKind::kUniform, sok::InitKind::kNormal,
                          sok::InitKind::kTruncatedNormal, sok::InitKind::kBank}) {
    sok::Initializer init = Make(kind, 0.5f, 2.0f);
    if (kind == sok::InitKind::kBank) init.bank = bank;
    init.bank_rows = 3;
    const std::vector<float> whole = Row(init, 123, 64);
    for (const int64_t first : {1, 2, 3, 4, 7, 32, 60}) {
      for (const int64_t dim : {1, 2, 4}) {
        init.first_column = first;
        if (kind == sok::InitKind::kBank) {  // its columns are those of the rows
          init.bank.clear();
          for (int64_t row = 0; row < 3; ++row)
            for (int64_t j = 0; j < dim; ++j) init.bank.push_back(bank[static_cast<size_t>(row * 64 + first + j)]);
        }
        const std::vector<float> part = Row(init, 123, dim);
        for (int64_t j = 0; j < dim; ++j) CHECK_EQ(part[static_cast<size_t>(j)], whole[static_cast<size_t>(first + j)]);
        const uint64_t key = 123;
        std::vector<float> of_many(static_cast<size_t>(dim));
        float* at = of_many.data();
        sok::FillRows(init, &key, 1, dim, &at);
        CHECK(of_many == part);
      }
    }
  }
}

TEST(RowsWriteNothingBehindThemselves) {
  std::vector<float> memory(8, -99.0f);
  sok::FillRow(Make(sok::InitKind::kNormal, 0.0f, 1.0f), 1, 5, memory.data());
  for (size_t j = 5; j < 8; ++j) CHECK_EQ(memory[j], -99.0f);
}

TEST(MomentsAreThoseOfTheDistribution) {
  struct Case {
    sok::InitKind kind;
    double mean, stddev;
  };
  for (const Case& c : {Case{sok::InitKind::kUniform, 0.5, 0.288675}, Case{sok::InitKind::kNormal, 0.0, 1.0},
                        Case{sok::InitKind::kTruncatedNormal, 0.0, 0.879626}}) {
    const sok::Initializer init = Make(c.kind, 0.0f, 1.0f);
    double sum = 0.0, squares = 0.0;
    const int keys = 20000;
    for (int key = 0; key < keys; ++key) {
      for (const float x : Row(init, static_cast<uint64_t>(key), 4)) {
        sum += x;
        squares += static_cast<double>(x) * x;
      }
    }
    const double n = 4.0 * keys, mean = sum / n, stddev = std::sqrt(squares / n - mean * mean);
    CHECK(std::fabs(mean - c.mean) < 5 * c.stddev / std::sqrt(n));  // five standard errors
    CHECK(std::fabs(stddev / c.stddev - 1.0) < 5 / std::sqrt(n));
  }
}

TEST(ABankIsReadColumnByColumn) {
  sok::Initializer init = Make(sok::InitKind::kBank, 0.0f, 0.0f);
  init.bank_rows = 3;
  init.bank.resize(15);
  for (size_t i = 0; i < 15; ++i) init.bank[i] = static_cast<float>(i);
  int seen[3] = {};
  for (uint64_t key = 0; key < 300; ++key) {
    const std::vector<float> row = Row(init, key, 5);
    for (size_t j = 0; j < 5; ++j) {
      const int value = static_cast<int>(row[j]);
      CHECK_EQ(value % 5, static_cast<int>(j));
      ++seen[value / 5];
    }
  }
  for (const int count : seen) CHECK(count > 400 && count < 600);  // 1500 draws from three rows
}

TEST(UnknownNamesAreRefused) {
  CHECK(sok::ParseInitKind("bank") == sok::InitKind::kBank);
  CHECK_THROWS(sok::ParseInitKind("zeros"), sok::InvalidArgument, "Received: 'zeros'");
}
