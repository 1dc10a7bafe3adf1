#include <cmath>
#include <vector>

#include "check.h"
#include "device_memory.h"
#include "sok/initializer.h"

namespace {

std::vector<float> OnDevice(const sok::Initializer& init, const std::vector<uint64_t>& keys, int64_t dim) {
  DeviceArray<uint64_t> device_keys(keys);
  DeviceArray<float> bank(init.bank);
  sok::InitializerView view = sok::ViewOf(init);
  view.bank = bank;
  const int64_t n = static_cast<int64_t>(keys.size());
  DeviceArray<float> rows(std::vector<float>(static_cast<size_t>(n * dim + 4), -99.0f));
  sok::FillRows(sok::Cuda{}, view, device_keys, n, dim, rows);
  return rows.Get();
}

}  // namespace

TEST(RowsOfTheDeviceAreThoseOfTheCpu) {
  const std::vector<uint64_t> keys = {0, 1, 7, ~0ull, 1ull << 63, 1ull << 32};
  for (const auto kind : {sok::InitKind::kConstant, sok::InitKind::kUniform, sok::InitKind::kNormal,
                          sok::InitKind::kTruncatedNormal, sok::InitKind::kBank}) {
    for (const int64_t dim : {1, 3, 4, 5, 64, 257}) {
      sok::Initializer init;
      init.kind = kind;
      init.a = -0.3f;
      init.b = 1.7f;
      init.seed = 0x123456789ABCDEFull;
      init.bank_rows = 3;
      for (int64_t i = 0; i < 3 * dim; ++i) init.bank.push_back(static_cast<float>(i));
      const std::vector<float> rows = OnDevice(init, keys, dim);
      for (size_t k = 0; k < keys.size(); ++k) {
        std::vector<float> expected(static_cast<size_t>(dim));
        sok::FillRow(init, keys[k], dim, expected.data());
        for (size_t j = 0; j < expected.size(); ++j) CHECK_EQ(rows[k * expected.size() + j], expected[j]);
      }
      for (size_t j = rows.size() - 4; j < rows.size(); ++j) CHECK_EQ(rows[j], -99.0f);  // nothing behind
    }
  }
}

TEST(NoKeysStartNothing) {
  const std::vector<float> rows = OnDevice(sok::Initializer(), {}, 3);
  CHECK_EQ(rows[0], -99.0f);
}
