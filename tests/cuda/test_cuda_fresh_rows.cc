// What keys without a row read where they are pooled, beside a lookup that writes all rows, which other tests compare with the CPU.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/combine.h"
#include "sok/combine_grad.h"
#include "sok/device_table.h"

namespace {

using Keys = std::vector<uint64_t>;
using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;
using Kind = sok::InitKind;

constexpr int64_t kMaxDim = 64, kTables = 5, kSegments = 5;

std::vector<uint32_t> BitsOf(const Floats& values) {
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

Floats Random(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  Floats values(static_cast<size_t>(n));
  for (float& value : values) value = uniform(random);
  return values;
}

// Hashed and identity tables of several widths, some of whose keys are other ranks', with rows that begin inside longer ones.
std::unique_ptr<sok::DeviceTable> MakeTable(int64_t number, Kind kind, int rank) {
  constexpr int64_t kDims[] = {1, 4, 6, kMaxDim, 7};
  sok::TableConfig config;
  config.name = "t" + std::to_string(number);
  config.dim = kDims[number];
  config.capacity = 64;
  config.hashed = number % 3 != 1;
  config.is_unsigned = number % 2 == 0;
  config.rank = rank;
  config.world_size = rank + 1;
  config.initializer.kind = kind;
  config.initializer.seed = 7 + static_cast<uint64_t>(number);
  config.initializer.first_column = number % 2 == 0 ? 0 : 3;
  config.initializer.bank_rows = kind == Kind::kBank ? 5 : 0;
  config.initializer.bank = Random(config.initializer.bank_rows * config.dim, 3);
  return std::make_unique<sok::DeviceTable>(std::move(config), 0);
}

class Beside {
 public:
  Beside(Kind kind, int rank)
      : scratch_(cuda_),
        // Known keys and new ones, those of other ranks, in identity tables illegal ones, and one twice. As signed words the last
        // is -1.
        unsigned_keys_(Keys{0, 2, 3, 5, 8, 11, 62, 63, 500, 1001, 2, 6, 9, 0xFFFFFFFF}),
        signed_keys_(Keys{0, 2, 3, 5, 8, 11, 62, 63, 500, 1001, 2, 6, 9, ~0ull}),
        narrow_keys_(std::vector<uint32_t>{0, 2, 3, 5, 8, 11, 62, 63, 500, 1001, 2, 6, 9, 0xFFFFFFFF}),
        size_(narrow_keys_.size()),
        row_splits_(Ids{0, 3, 3, 4, 9, 14}),
        weights_(Random(size_, 5)),
        grads_(Random(kSegments * kMaxDim, 6)) {
    DeviceArray<uint64_t> known(Keys{2, 5, 8});
    for (int64_t t = 0; t < kTables; ++t) {
      tables_.push_back(MakeTable(t, kind, rank));
      tables_.back()->Lookup(cuda_, &scratch_, known, 3, true, nullptr, scratch_.Get<int64_t>(3));
    }
  }

  void Compare(bool pools, bool is_narrow) {
    std::vector<std::unique_ptr<DeviceArray<int64_t>>> ids;
    std::vector<std::unique_ptr<DeviceArray<float>>> outputs;
    std::vector<sok::DeviceTable::Asked> asked;
    for (auto& table : tables_) {
      ids.push_back(std::make_unique<DeviceArray<int64_t>>(size_));
      sok::DeviceKeys keys = Wide(*table);
      if (is_narrow) keys = sok::DeviceKeys(narrow_keys_.data(), table->config().is_unsigned);
      asked.push_back({table.get(), keys, size_, nullptr, *ids.back()});
    }
    DeviceArray<uint64_t> bad(Keys(kTables, sok::kNothingBad));
    std::vector<sok::DeviceFeature> features;
    {
      const auto readings = sok::DeviceTable::FindGroup(cuda_, &scratch_, asked.data(), kTables);
      for (size_t t = 0; t < kTables; ++t) {
        features.push_back(Feature(*tables_[t], pools));
        features[t].rows = readings[t].rows;
        features[t].num_rows = readings[t].num_rows;
        features[t].fresh = readings[t].fresh;
        features[t].index = *ids[t];
        outputs.push_back(std::make_unique<DeviceArray<float>>(features[t].segments.segments * features[t].dim));
        features[t].output = outputs.back()->data();
      }
      sok::CombineGroup(cuda_, &scratch_, features.data(), kTables, sok::FloatType::kFloat32, bad);
    }
    CHECK(bad.Get() == Keys(kTables, sok::kNothingBad));
    int64_t without = 0;
    for (size_t t = 0; t < kTables; ++t) {
      DeviceArray<int64_t> expected_ids(size_);
      sok::DeviceFeature matrix = Matrix(tables_[t].get(), pools, expected_ids);
      DeviceArray<float> expected(matrix.segments.segments * matrix.dim);
      matrix.output = expected.data();
      sok::CombineGroup(cuda_, &scratch_, &matrix, 1, sok::FloatType::kFloat32, nullptr);
      CHECK(BitsOf(outputs[t]->Get()) == BitsOf(expected.Get()));
      const Ids row_ids = ids[t]->Get();
      CHECK(row_ids == expected_ids.Get());
      without += std::count(row_ids.begin(), row_ids.end(), -1);
      if (!pools) continue;
      DeviceArray<float> of_weights(size_), expected_of_weights(size_);
      sok::CombineGradWeights(cuda_, features[t], grads_, of_weights, nullptr);
      sok::CombineGradWeights(cuda_, matrix, grads_, expected_of_weights, nullptr);
      CHECK(BitsOf(of_weights.Get()) == BitsOf(expected_of_weights.Get()));
    }
    CHECK(without > size_);
  }

  // Rows for all keys, as they came; then all have them.
  void Insert() {
    std::vector<std::unique_ptr<DeviceArray<int64_t>>> ids;
    std::vector<sok::DeviceTable::Asked> asked;
    for (auto& table : tables_) {
      ids.push_back(std::make_unique<DeviceArray<int64_t>>(size_));
      const sok::DeviceKeys keys(narrow_keys_.data(), table->config().is_unsigned);
      asked.push_back({table.get(), keys, size_, nullptr, *ids.back()});
    }
    sok::DeviceTable::LookupGroup(cuda_, &scratch_, asked.data(), 1, true);
    sok::DeviceTable::LookupGroup(cuda_, &scratch_, asked.data(), kTables, true);
    for (size_t t = 0; t < kTables; ++t) {
      DeviceArray<int64_t> expected(size_);
      tables_[t]->Lookup(cuda_, &scratch_, Wide(*tables_[t]), size_, false, nullptr, expected);
      CHECK(ids[t]->Get() == expected.Get());
    }
  }

 private:
  const uint64_t* Wide(const sok::DeviceTable& table) {
    return table.config().is_unsigned ? unsigned_keys_.data() : signed_keys_.data();
  }

  sok::DeviceFeature Feature(const sok::DeviceTable& table, bool pools) {
    sok::DeviceFeature f;
    f.dim = f.output_stride = table.config().dim;
    f.segments.segments = pools ? kSegments : size_;
    f.segments.n = size_;
    if (pools) {
      f.segments.row_splits = row_splits_;
      f.weights = weights_;
      f.combiner = sok::Combiner::kMean;
    }
    return f;
  }

  // The same of a matrix of all rows.
  sok::DeviceFeature Matrix(sok::DeviceTable* table, bool pools, int64_t* row_ids) {
    sok::DeviceFeature f = Feature(*table, pools);
    float* rows = scratch_.Get<float>(size_ * f.dim);
    table->Lookup(cuda_, &scratch_, Wide(*table), size_, false, rows, row_ids);
    f.rows = sok::MatrixRows(rows, f.dim);
    f.num_rows = size_;
    return f;
  }

  const sok::Cuda cuda_{};
  sok::StreamScratch scratch_;
  DeviceArray<uint64_t> unsigned_keys_, signed_keys_;
  DeviceArray<uint32_t> narrow_keys_;
  const int64_t size_;
  DeviceArray<int64_t> row_splits_;
  DeviceArray<float> weights_, grads_;
  std::vector<std::unique_ptr<sok::DeviceTable>> tables_;
};

}  // namespace

TEST(KeysWithoutARowReadFreshOnesWherePooled) {
  for (const Kind kind : {Kind::kConstant, Kind::kUniform, Kind::kNormal, Kind::kTruncatedNormal, Kind::kBank}) {
    for (const int rank : {0, 2}) {
      Beside beside(kind, rank);
      for (const bool pools : {false, true})
        for (const bool is_narrow : {false, true}) beside.Compare(pools, is_narrow);
      beside.Insert();
    }
  }
}
