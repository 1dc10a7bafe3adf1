#include "sok/segment_sum.h"

#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "threads.h"

TEST(SumsOfWholeNumbersAreExactForAnyNumberOfThreads) {
  std::mt19937_64 random(3);
  for (const int64_t n : {0, 1, 5000}) {
    for (const int64_t dim : {1, 3, 5, 7, 16, 17, 64}) {
      for (const int64_t segments : {1, 40, 900}) {
        std::vector<double> data(static_cast<size_t>(n * dim)), expected(static_cast<size_t>(segments * dim));
        std::vector<int64_t> ids(static_cast<size_t>(n));
        for (double& x : data) x = static_cast<double>(random() % 100);
        for (size_t i = 0; i < ids.size(); ++i) {
          ids[i] = static_cast<int64_t>(random() % static_cast<uint64_t>(segments + 1)) - 1;
          for (int64_t j = 0; j < dim && ids[i] >= 0; ++j) {
            expected[static_cast<size_t>(ids[i] * dim + j)] +=
                data[i * static_cast<size_t>(dim) + static_cast<size_t>(j)];
          }
        }
        for (const int threads : {1, 4}) {
          const ThreadExecutor executor(threads);
          sok::Scratch scratch;
          std::vector<double> sums(expected.size(), -1.0);
          sok::UnsortedSegmentSum({executor}, &scratch, data.data(), ids.data(), n, dim, segments, sums.data());
          CHECK(sums == expected);
        }
      }
    }
  }
}

TEST(SortingByIdIsStableAndDropsNegativeIds) {
  const int64_t ids[] = {2, -1, 0, 2, 0, 3, -5};
  sok::Scratch scratch;
  const uint32_t *offsets, *positions;
  sok::SortById(&scratch, ids, 7, 5, &offsets, &positions);
  const uint32_t expected_offsets[] = {0, 2, 2, 4, 5, 5}, expected_positions[] = {2, 4, 0, 3, 5};
  for (int i = 0; i < 6; ++i) CHECK_EQ(offsets[i], expected_offsets[i]);
  for (int i = 0; i < 5; ++i) CHECK_EQ(positions[i], expected_positions[i]);
}

TEST(BadIdsAndSizesAreRefused) {
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  const float data[] = {1, 2};
  const int64_t ids[] = {0, 3};
  float sums[3];
  CHECK_THROWS(sok::UnsortedSegmentSum({executor}, &scratch, data, ids, 2, 1, 3, sums), sok::InvalidArgument,
               "segment_ids[1] = 3 must be below num_segments = 3");
  const uint32_t *offsets, *positions;
  CHECK_THROWS(sok::SortById(&scratch, ids, 2, INT64_MAX, &offsets, &positions), sok::OutOfMemory, "segments");
}
