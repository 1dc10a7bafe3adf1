#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "detail/vector4.h"
#include "device_memory.h"
#include "sok/combine.h"
#include "sok/error.h"

namespace {

std::vector<float> Random(std::mt19937* rng, int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(*rng);
  return x;
}

// Lengths 0, 1 and more, some long.
std::vector<int64_t> Splits(std::mt19937* rng, int64_t segments) {
  std::vector<int64_t> splits = {0};
  for (int64_t s = 0; s < segments; ++s)
    splits.push_back(splits.back() + (s % 7 == 3 ? 0 : s % 50 == 9 ? 70 : (*rng)() % 6));
  return splits;
}

}  // namespace

// One group: every dim, combiner and layout, next to each other in one output matrix.
TEST(AGroupGivesTheBitsOfTheCpu) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  std::mt19937 rng(3);
  const int64_t dims[] = {1, 3, 4, 6, 8, 16, 64, 129, 260}, num_rows = 50, segments = 150;
  int64_t width = 0;
  for (const int64_t dim : dims) width += dim;
  for (const auto combiner : {sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kSqrtn}) {
    for (const bool weighted : {false, true}) {
      sok::StreamScratch scratch(cuda);
      std::vector<std::unique_ptr<DeviceArray<float>>> floats;
      std::vector<std::unique_ptr<DeviceArray<int64_t>>> words;
      const auto put = [&](const std::vector<float>& x) {
        floats.push_back(std::make_unique<DeviceArray<float>>(x));
        return floats.back()->data();
      };
      const auto put_words = [&](const std::vector<int64_t>& x) {
        words.push_back(std::make_unique<DeviceArray<int64_t>>(x));
        return words.back()->data();
      };
      std::vector<float> expected(static_cast<size_t>(segments * width), 5.0f);
      DeviceArray<float> output(expected);
      std::vector<sok::DeviceFeature> features;
      int64_t column = 0;
      for (const int64_t dim : dims) {
        const bool pooled = dim % 2 == 0;
        const std::vector<int64_t> splits = Splits(&rng, segments);
        const int64_t hotness = dim % 3 == 0 ? 1 : 5, n = pooled ? splits.back() : hotness * segments;
        std::vector<int64_t> index, all_splits = splits;
        for (int64_t i = 0; i < n; ++i) index.push_back(static_cast<int64_t>(rng() % num_rows));
        for (int64_t s = 0; !pooled && s <= segments; ++s) all_splits[static_cast<size_t>(s)] = s * hotness;
        const std::vector<float> rows = Random(&rng, num_rows * dim), weights = Random(&rng, n);
        sok::DeviceFeature f;
        f.rows = sok::MatrixRows(put(rows), dim);
        f.num_rows = num_rows;
        f.dim = dim;
        f.index = put_words(index);
        f.segments.row_splits = pooled ? put_words(splits) : nullptr;
        f.segments.hotness = hotness;
        f.segments.segments = segments;
        f.segments.n = n;
        f.weights = weighted ? put(weights) : nullptr;
        f.combiner = combiner;
        f.output = output.data() + column;
        f.output_stride = width;
        features.push_back(f);
        std::vector<float> out(static_cast<size_t>(segments * dim));
        sok::Combine(sok::Cpu{executor}, rows.data(), index.data(), all_splits.data(),
                     weighted ? weights.data() : nullptr, segments, dim, combiner, out.data());
        for (int64_t s = 0; s < segments; ++s)
          for (int64_t j = 0; j < dim; ++j)
            expected[static_cast<size_t>(s * width + column + j)] = out[static_cast<size_t>(s * dim + j)];
        column += dim;
      }
      sok::CombineGroup(cuda, &scratch, features.data(), static_cast<int64_t>(features.size()),
                        sok::FloatType::kFloat32, nullptr);
      CHECK(output.Get() == expected);
      // The same rounded once.
      DeviceArray<uint16_t> halves(segments * width);
      for (const auto type : {sok::FloatType::kFloat16, sok::FloatType::kBFloat16}) {
        column = 0;
        for (sok::DeviceFeature& f : features) {
          f.output = halves.data() + column;
          column += f.dim;
        }
        sok::CombineGroup(cuda, &scratch, features.data(), static_cast<int64_t>(features.size()), type, nullptr);
        const std::vector<uint16_t> got = halves.Get();
        for (size_t i = 0; i < got.size(); ++i) {
          CHECK_EQ(got[i],
                   type == sok::FloatType::kFloat16 ? sok::HalfBits(expected[i]) : sok::BFloat16Bits(expected[i]));
        }
      }
    }
  }
}

TEST(RecordsInSlabsAreFound) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  std::vector<float> first(4 * 12), second(4 * 12);
  for (int i = 0; i < 48; ++i) {
    first[static_cast<size_t>(i)] = static_cast<float>(i);
    second[static_cast<size_t>(i)] = static_cast<float>(1000 + i);
  }
  DeviceArray<float> a(first), b(second), output(6 * 5);
  DeviceArray<float*> slabs(std::vector<float*>{a.data(), b.data()});
  DeviceArray<int64_t> index(std::vector<int64_t>{0, 3, 4, 7, -1, 8});
  DeviceArray<uint64_t> bad(std::vector<uint64_t>{sok::kNothingBad});
  sok::DeviceFeature f;
  f.rows.slabs = slabs;
  f.rows.shift = 2;
  f.rows.mask = 3;
  f.rows.stride = 12;
  f.num_rows = 8;
  f.dim = 5;
  f.index = index;
  f.segments.segments = f.segments.n = 6;
  f.output = output.data();
  f.output_stride = 5;
  sok::CombineGroup(cuda, &scratch, &f, 1, sok::FloatType::kFloat32, bad);
  const std::vector<float> got = output.Get();
  const float begins[] = {0, 36, 1000, 1036, 0, 0};
  for (size_t s = 0; s < 6; ++s)
    for (size_t j = 0; j < 5; ++j) CHECK_EQ(got[s * 5 + j], s < 4 ? begins[s] + static_cast<float>(j) : 0.0f);
  CHECK_EQ(bad.Get()[0], 5u);  // row 8 of 8
}

TEST(SplitsThatMakeNoSenseGiveZerosAndAreReported) {
  const sok::Cuda cuda;
  for (const std::vector<int64_t>& splits :
       {std::vector<int64_t>{0, 2, 1, 3}, std::vector<int64_t>{0, 2, 9, 3}, std::vector<int64_t>{0, 2, -1, 3}}) {
    sok::StreamScratch scratch(cuda);
    DeviceArray<float> rows(std::vector<float>{1, 10}), output(3), factor(3);
    DeviceArray<int64_t> index(std::vector<int64_t>{0, 1, 0}), row_splits(splits);
    DeviceArray<uint64_t> bad(std::vector<uint64_t>{sok::kNothingBad});
    DeviceArray<uint32_t> segment_of(3);
    sok::DeviceFeature f;
    f.rows = sok::MatrixRows(rows, 1);
    f.num_rows = 2;
    f.dim = 1;
    f.index = index;
    f.segments.row_splits = row_splits;
    f.segments.segments = 3;
    f.segments.n = 3;
    f.output = output.data();
    f.output_stride = 1;
    sok::CombineGroup(cuda, &scratch, &f, 1, sok::FloatType::kFloat32, bad);
    CHECK_EQ(output.Get()[0], 11.0f);
    CHECK_EQ(output.Get()[1], 0.0f);
    CHECK_EQ(bad.Get()[0], 4u);  // n + 1
    sok::ExpandSegments(cuda, &scratch, f.segments, nullptr, sok::Combiner::kMean, segment_of, factor);
    CHECK_EQ(factor.Get()[1], 0.5f);
  }
}

TEST(ExpandedSegmentsAreThoseOfTheCpu) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  std::mt19937 rng(8);
  const std::vector<int64_t> splits = Splits(&rng, 300);
  const int64_t n = splits.back();
  const std::vector<float> weights = Random(&rng, n);
  for (const bool weighted : {false, true}) {
    for (const auto combiner : {sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kSqrtn}) {
      sok::StreamScratch scratch(cuda);
      std::vector<uint32_t> segment(static_cast<size_t>(n));
      std::vector<float> factor(static_cast<size_t>(n));
      sok::ExpandSegments(sok::Cpu{executor}, splits.data(), weighted ? weights.data() : nullptr, 300, combiner,
                          segment.data(), factor.data());
      DeviceArray<int64_t> row_splits(splits);
      DeviceArray<float> device_weights(weights), got_factor(n);
      DeviceArray<uint32_t> got(n);
      sok::DeviceSegments segments;
      segments.row_splits = row_splits;
      segments.segments = 300;
      segments.n = n;
      sok::ExpandSegments(cuda, &scratch, segments, weighted ? device_weights.data() : nullptr, combiner, got,
                          got_factor);
      CHECK(got.Get() == segment);
      CHECK(got_factor.Get() == factor);
    }
  }
}

#if defined(SOK_CUDA_EMULATED)  // a device would lend all of it; tests/contracts/test_large.py asks there
// Rows behind 2^32 bytes and 2^31 elements, without the memory: pages that nobody touches are not there.
TEST(RowsBeyondTwoToTheThirtyOneElementsAreFound) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  const int64_t num_rows = (int64_t{1} << 31) + 5, dim = 4;
  const size_t bytes = static_cast<size_t>(num_rows * dim) * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;  // a machine that does not lend addresses
  SOK_CUDA(cudaHostRegister(memory, bytes, cudaHostRegisterDefault));
  float* rows = static_cast<float*>(memory);
  const std::vector<int64_t> wanted = {0, (int64_t{1} << 30) + 1, (int64_t{1} << 31) + 4};
  for (const int64_t row : wanted)
    for (int64_t j = 0; j < dim; ++j) rows[row * dim + j] = static_cast<float>(row % 1000 + j);
  DeviceArray<int64_t> index(wanted);
  DeviceArray<float> output(12);
  sok::DeviceFeature f;
  f.rows = sok::MatrixRows(rows, dim);
  f.num_rows = num_rows;
  f.dim = dim;
  f.index = index;
  f.segments.segments = f.segments.n = 3;
  f.output = output.data();
  f.output_stride = dim;
  sok::CombineGroup(cuda, &scratch, &f, 1, sok::FloatType::kFloat32, nullptr);
  const std::vector<float> got = output.Get();
  for (size_t s = 0; s < 3; ++s)
    for (size_t j = 0; j < 4; ++j)
      CHECK_EQ(got[4 * s + j], static_cast<float>(wanted[s] % 1000) + static_cast<float>(j));
  SOK_CUDA(cudaHostUnregister(memory));
  munmap(memory, bytes);
}
#endif

TEST(FeaturesThatMakeNoSenseAreRefused) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  sok::DeviceFeature f;
  const auto run = [&] { sok::CombineGroup(cuda, &scratch, &f, 1, sok::FloatType::kFloat32, nullptr); };
  CHECK_THROWS(run(), sok::InvalidArgument, "feature 0: dim must be at least 1");
  f.dim = 4;
  CHECK_THROWS(run(), sok::InvalidArgument, "output_stride must be at least dim = 4. Received: 0");
  f.output_stride = 4;
  f.segments.segments = 3;
  f.segments.hotness = 2;
  f.segments.n = 5;
  CHECK_THROWS(run(), sok::InvalidArgument, "2 positions for each of 3 segments. Received: 5");
  f.segments.n = -1;
  CHECK_THROWS(run(), sok::InvalidArgument, "must not be negative");
}
