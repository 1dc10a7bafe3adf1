// Calls on an EmbeddingTable with vectors, for tests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sok/embedding_table.h"
#include "threads.h"

struct Rows {
  std::vector<float> values;  // [n, dim]
  std::vector<int64_t> ids;   // [n]
};

namespace sok {

// What no caller reaches in a test's time.
struct TableForTests {
  // As if so many calls of Erase had been; before the first lookup.
  static void SetErasures(EmbeddingTable* table, int64_t erasures) { table->epoch_ = erasures; }
};

}  // namespace sok
using sok::TableForTests;

// LookupGroup of one feature whose rows are summed.
inline void LookUpSums(const sok::Cpu& cpu, sok::Scratch* scratch, sok::EmbeddingTable* table, const uint64_t* keys,
                       int64_t n, const int64_t* row_splits, int64_t segments, bool insert, float* output,
                       int64_t* row_ids) {
  sok::EmbeddingTable::Feature feature;
  feature.table = table;
  feature.keys = keys;
  feature.n = n;
  feature.row_splits = row_splits;
  feature.segments = segments;
  feature.combiner = sok::Combiner::kSum;
  feature.output = output;
  feature.row_ids = row_ids;
  sok::EmbeddingTable::LookupGroup(cpu, scratch, &feature, 1, insert);
}

// ApplyGroup of one table.
inline void ApplyTo(const sok::Cpu& cpu, sok::Scratch* scratch, sok::EmbeddingTable* table, const sok::UpdateRule& rule,
                    const std::string& slot_set, sok::Nonfinite nonfinite, const int64_t* row_ids, const float* grads,
                    int64_t n) {
  const sok::EmbeddingTable::Gradients gradients{table, row_ids, grads, n};
  sok::EmbeddingTable::ApplyGroup(cpu, scratch, rule, slot_set, nonfinite, &gradients, 1);
}

// Safe from several threads: every call has its own scratch.
class Table {
 public:
  explicit Table(sok::TableConfig config, int num_threads = 3) : executor_(num_threads), table_(std::move(config)) {}

  sok::EmbeddingTable& native() { return table_; }

  Rows Lookup(const std::vector<uint64_t>& keys, bool insert = true) {
    sok::Scratch scratch;
    Rows rows{std::vector<float>(keys.size() * Dim(), -99.0f), std::vector<int64_t>(keys.size(), -99)};
    table_.Lookup({executor_}, &scratch, keys.data(), Size(keys), insert, nullptr, rows.values.data(), rows.ids.data());
    return rows;
  }

  Rows LookupCombine(const std::vector<uint64_t>& keys, const std::vector<int64_t>& splits, bool insert = true) {
    sok::Scratch scratch;
    const int64_t segments = Size(splits) - 1;
    Rows rows{std::vector<float>(static_cast<size_t>(segments) * Dim(), -99.0f),
              std::vector<int64_t>(keys.size(), -99)};
    LookUpSums({executor_}, &scratch, &table_, keys.data(), Size(keys), splits.data(), segments, insert,
               rows.values.data(), rows.ids.data());
    return rows;
  }

  void Apply(const std::string& rule, const std::vector<double>& hyper, const std::vector<int64_t>& ids,
             const std::vector<float>& grads, int64_t step = 1, sok::Nonfinite nonfinite = sok::Nonfinite::kAllow) {
    sok::Scratch scratch;
    ApplyTo({executor_}, &scratch, &table_, sok::MakeUpdateRule(rule, hyper.data(), Size(hyper), step), rule, nonfinite,
            ids.data(), grads.data(), Size(ids));
  }

  void Assign(const std::vector<uint64_t>& keys, float value) {
    const std::vector<float> values(keys.size() * Dim(), value);
    sok::Scratch scratch;
    table_.Assign({executor_}, &scratch, keys.data(), values.data(), Size(keys));
  }

  int64_t Erase(const std::vector<uint64_t>& keys) { return table_.Erase(keys.data(), Size(keys)); }

 private:
  template <class T>
  static int64_t Size(const std::vector<T>& v) {
    return static_cast<int64_t>(v.size());
  }
  size_t Dim() const { return static_cast<size_t>(table_.dim()); }

  const ThreadExecutor executor_;
  sok::EmbeddingTable table_;
};

inline sok::TableConfig Config(int64_t dim, int64_t capacity, bool hashed = true) {
  sok::TableConfig config;
  config.name = "item";
  config.dim = dim;
  config.capacity = capacity;
  config.hashed = hashed;
  config.initializer.seed = 3;
  return config;
}
