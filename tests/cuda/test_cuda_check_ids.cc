#include <cstdint>
#include <vector>

#include "check.h"
#include "device_memory.h"
#include "sok/check_ids.h"

namespace {

uint64_t FirstBad(const std::vector<int64_t>& ids, int64_t num_rows, const std::vector<int64_t>& splits) {
  DeviceArray<int64_t> device_ids(ids), device_splits(splits);
  DeviceArray<uint64_t> bad(std::vector<uint64_t>{sok::kNothingBad});
  sok::CheckIds(sok::Cuda{}, device_ids, static_cast<int64_t>(ids.size()), num_rows, device_splits,
                static_cast<int64_t>(splits.size()), bad);
  return bad.Get()[0];
}

}  // namespace

TEST(WhatFitsIsNotReported) {
  CHECK_EQ(FirstBad({0, 4, 2}, 5, {0, 0, 3, 3}), sok::kNothingBad);
  CHECK_EQ(FirstBad({}, 0, {0}), sok::kNothingBad);
  CHECK_EQ(FirstBad({0, 4, 2}, 5, {}), sok::kNothingBad);
}

TEST(TheFirstIdThatIsNoRowIsReported) {
  CHECK_EQ(FirstBad({0, 5, -1}, 5, {0, 3}), 1u);
  CHECK_EQ(FirstBad({0, 4, INT64_MIN}, 5, {0, 3}), 2u);
  CHECK_EQ(FirstBad({(int64_t{1} << 32) + 1}, 5, {0, 1}), 0u);
  CHECK_EQ(FirstBad({0}, 0, {0, 1}), 0u);
  std::vector<int64_t> many(5000, 3);
  many[4321] = many[4400] = 7;
  CHECK_EQ(FirstBad(many, 7, {0, 5000}), 4321u);
}

TEST(SplitsThatDoNotFitAreReportedBehindTheIds) {
  CHECK_EQ(FirstBad({0, 1}, 5, {1, 2}), 2u);
  CHECK_EQ(FirstBad({0, 1}, 5, {0, 2, 1, 2}), 4u);
  CHECK_EQ(FirstBad({0, 1}, 5, {0, 1}), 3u);
  CHECK_EQ(FirstBad({0, 1}, 5, {0}), 2u);
  CHECK_EQ(FirstBad({0, 9}, 5, {1, 2}), 1u);
}
