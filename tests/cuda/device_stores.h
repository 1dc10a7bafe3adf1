// Tables on a device and on the CPU for tests of TableStore: what trains them, and what compares them.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "collector.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/device_store.h"
#include "sok/embedding_table.h"
#include "table_cases.h"

using Keys = std::vector<uint64_t>;
using Floats = std::vector<float>;
using sok::TableStore;

inline sok::UpdateRule Rule(const std::string& name, int64_t step, double lr = 0.1) {
  const std::vector<double> hyper =
      name == "adagrad" ? std::vector<double>{lr, 0.5, 1e-7} : std::vector<double>{lr, 0.9, 0.999, 1e-7};
  return sok::MakeUpdateRule(name, hyper.data(), static_cast<int64_t>(hyper.size()), step);
}

inline const sok::SerialExecutor executor;
inline const sok::Cpu cpu{executor};

template <class T>
int64_t Size(const std::vector<T>& all) {
  return static_cast<int64_t>(all.size());
}

inline Keys Range(uint64_t n, uint64_t step = 3) {
  Keys keys;
  for (uint64_t k = 0; k < n; ++k) keys.push_back(k * step);
  return keys;
}

// A store on the device, five rows listed at a time, and what trains it.
struct OnDevice {
  explicit OnDevice(const sok::TableConfig& config, int64_t budget = 0) : store(config, budget, 5), scratch(cuda) {}
  ~OnDevice() { sok::Ignore(cudaDeviceSynchronize()); }  // also of a device that is gone

  std::vector<int64_t> Lookup(const Keys& keys) {
    DeviceArray<uint64_t> words(keys);
    DeviceArray<int64_t> ids(Size(keys));
    scratch.Reset();
    store.table().Lookup(cuda, &scratch, words, Size(keys), true, nullptr, ids);
    return ids.Get();
  }
  void Apply(const sok::UpdateRule& rule, const std::string& set, const std::vector<int64_t>& row_ids,
             const Floats& values) {
    DeviceArray<int64_t> ids(row_ids);
    DeviceArray<float> grads(values);
    scratch.Reset();
    store.table().Apply(cuda, &scratch, rule, set, sok::Nonfinite::kAllow, 1.0f, ids, grads, ids.size());
    SOK_CUDA(cudaDeviceSynchronize());
  }

  sok::Cuda cuda;
  sok::DeviceStore store;
  sok::StreamScratch scratch;
};

struct OnCpu {
  explicit OnCpu(const sok::TableConfig& config) : store(config) {}

  std::vector<int64_t> Lookup(const Keys& keys) {
    sok::Scratch scratch;
    Floats rows(keys.size() * static_cast<size_t>(store.dim()));
    std::vector<int64_t> ids(keys.size());
    store.Lookup(cpu, &scratch, keys.data(), Size(keys), true, nullptr, rows.data(), ids.data());
    return ids;
  }
  void Apply(const sok::UpdateRule& rule, const std::string& set, const std::vector<int64_t>& ids,
             const Floats& grads) {
    sok::Scratch scratch;
    const sok::EmbeddingTable::Gradients gradients{&store, ids.data(), grads.data(), static_cast<int64_t>(ids.size())};
    sok::EmbeddingTable::ApplyGroup(cpu, &scratch, rule, set, sok::Nonfinite::kAllow, &gradients, 1);
  }

  sok::EmbeddingTable store;
};

// Two optimizers, one of them exact Adam, which owes something to most rows at the end.
template <class T>
void Train(T* table, uint64_t n, int64_t first, int64_t last) {
  const size_t dim = static_cast<size_t>(table->store.dim());
  for (int64_t step = first; step <= last; ++step) {
    Keys keys = Range(n);
    keys.resize(keys.size() / static_cast<size_t>(step));
    const std::vector<int64_t> ids = table->Lookup(keys);
    Floats grads(ids.size() * dim);
    for (size_t i = 0; i < grads.size(); ++i) grads[i] = static_cast<float>(i % 13) - 6.0f + static_cast<float>(step);
    table->Apply(Rule("adam", step), "exact", ids, grads);
    table->Apply(Rule("adagrad", step), "ada", ids, grads);
  }
}

inline Collector ReadAll(const TableStore& store) {
  Collector all(store.dim(), 4);
  store.ReadAll(cpu, &all);
  return all;
}

inline void CheckClose(const Floats& a, const Floats& b) {
  CHECK_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) CHECK(std::fabs(a[i] - b[i]) <= 1e-6f * (1.0f + std::fabs(b[i])));
}

inline void CheckSame(const AllRows& a, const AllRows& b) {
  CHECK_EQ(a.size(), b.size());
  for (const auto& [key, kept] : a) {
    const Kept& other = b.at(key);
    CheckClose(kept.row, other.row);
    CHECK_EQ(kept.slots.size(), other.slots.size());
    for (size_t s = 0; s < kept.slots.size(); ++s) CheckClose(kept.slots[s], other.slots[s]);
  }
}

inline int64_t Restore(TableStore* store, const Collector& saved, TableStore::Columns columns = {}) {
  sok::Scratch scratch;
  Keys keys;
  Floats rows;
  std::vector<Floats> slots(saved.sets.size());
  for (const auto& [key, kept] : saved.found) {
    keys.push_back(key);
    rows.insert(rows.end(), kept.row.begin(), kept.row.end());
    for (size_t s = 0; s < slots.size(); ++s)
      slots[s].insert(slots[s].end(), kept.slots[s].begin(), kept.slots[s].end());
  }
  TableStore::RowValues values{keys.data(), rows.data(), {}, Size(keys), columns};
  for (const auto& s : slots) values.slots.push_back(s.data());
  return store->Restore(cpu, &scratch, saved.sets, values);
}

inline void Assign(TableStore* store, const Keys& keys, float value) {
  sok::Scratch scratch;
  const Floats rows(keys.size() * static_cast<size_t>(store->dim()), value);
  store->Assign(cpu, &scratch, keys.data(), rows.data(), Size(keys));
}
