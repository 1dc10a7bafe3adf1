// What a read of a whole table gives, kept for comparison.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "check.h"
#include "sok/embedding_table.h"

struct Kept {
  std::vector<float> row;
  std::vector<std::vector<float>> slots;
};

inline bool operator==(const Kept& a, const Kept& b) { return a.row == b.row && a.slots == b.slots; }

using AllRows = std::map<uint64_t, Kept>;

class Collector : public sok::EmbeddingTable::RowSink {
 public:
  // between() is called before each batch, and after the last.
  explicit Collector(int64_t dim, int64_t rows_per_batch = 7, std::function<void()> between = {})
      : dim_(static_cast<size_t>(dim)), rows_per_batch_(rows_per_batch), between_(std::move(between)) {}

  int64_t Begin(int64_t num_rows, const std::vector<sok::EmbeddingTable::SlotSetInfo>& given) override {
    ++begins;
    expected = num_rows;
    sets = given;
    if (between_) between_();
    return rows_per_batch_;
  }
  void Erased(const std::vector<uint64_t>& keys) override { erased = keys; }
  sok::EmbeddingTable::RowTarget Allocate(int64_t n) override {
    batches.push_back(n);
    keys_.assign(static_cast<size_t>(n), 0);
    rows_.assign(static_cast<size_t>(n) * dim_, 0.0f);
    slots_.clear();
    sok::EmbeddingTable::RowTarget target{keys_.data(), rows_.data(), {}};
    for (const auto& set : sets)
      slots_.emplace_back(static_cast<size_t>(n * set.rule.slot_floats(static_cast<int64_t>(dim_))));
    for (auto& slots : slots_) target.slots.push_back(slots.data());
    return target;
  }
  void Commit() override {
    for (size_t i = 0; i < keys_.size(); ++i) {
      Kept kept{{rows_.begin() + static_cast<long>(i * dim_), rows_.begin() + static_cast<long>((i + 1) * dim_)}, {}};
      for (const auto& slots : slots_) {
        const size_t width = slots.size() / keys_.size();
        kept.slots.emplace_back(slots.begin() + static_cast<long>(i * width),
                                slots.begin() + static_cast<long>((i + 1) * width));
      }
      CHECK(found.emplace(keys_[i], kept).second);  // no key comes twice
    }
    if (between_) between_();
  }

  int begins = 0;
  int64_t expected = -1;
  std::vector<sok::EmbeddingTable::SlotSetInfo> sets;
  std::vector<uint64_t> erased;
  std::vector<int64_t> batches;
  AllRows found;

 private:
  const size_t dim_;
  const int64_t rows_per_batch_;
  const std::function<void()> between_;
  std::vector<uint64_t> keys_;
  std::vector<float> rows_;
  std::vector<std::vector<float>> slots_;
};
