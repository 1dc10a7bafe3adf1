// Groups of tables on a GPU: holding all of them as they are, and giving the sums of their gradients.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "../table_resource.h"
#include "gpu_op.h"
#include "sok/device_table.h"
#include "sok/device_tier.h"
#include "sok/sum_rows.h"

namespace sok {

// How many rows a table may have.
inline constexpr int64_t kMostRows = INT64_C(0xFFFFFFFE);

inline std::vector<DeviceTable*> DeviceTablesOf(const std::vector<RefCountPtr<TableResource>>& tables) {
  std::vector<DeviceTable*> all;
  for (const auto& table : tables) all.push_back(&table->device_table());
  return all;
}

// The host's table behind one whose rows in use lie on the GPU; null: there is none.
inline DeviceTier* TierOf(TableResource* resource) { return dynamic_cast<DeviceTier*>(&resource->store()); }

// What is asked of tables on a GPU.
struct GpuAsked {
  std::vector<DeviceTable::Asked> all;
  std::vector<DeviceTier*> tiers;        // of each; or null
  std::vector<const uint64_t*> on_host;  // the same keys in the host's memory; null where nobody has them there

  void Add(TableResource* resource, DeviceKeys keys, int64_t n, int64_t* row_ids, const uint64_t* words = nullptr) {
    all.push_back({&resource->device_table(), keys, n, nullptr, row_ids});
    tiers.push_back(TierOf(resource));
    on_host.push_back(words);
  }
  std::vector<DeviceTier::Asked> OfTiers() {
    std::vector<DeviceTier::Asked> some;
    for (size_t i = 0; i < all.size(); ++i)
      if (tiers[i] != nullptr) some.push_back({tiers[i], &all[i], on_host[i]});
    return some;
  }
};

// Rows of keys, and of each of what is asked where they lie; with `insert` keys without a row get one.
inline std::vector<DeviceTable::Reading> RowsOf(const Cuda& cuda, const Cpu& cpu, DeviceScratch* scratch,
                                                GpuAsked* asked, bool insert) {
  const DeviceTier::Held held(cuda, cpu, scratch, asked->OfTiers(), insert);
  const auto find = [&](const std::vector<DeviceTable::Asked>& some) {
    return DeviceTable::FindGroup(cuda, scratch, some.data(), static_cast<int64_t>(some.size()));
  };
  if (!insert) return find(asked->all);
  std::vector<DeviceTable::Asked> plain, tiered;
  std::vector<DeviceTable*> tables;
  for (size_t i = 0; i < asked->all.size(); ++i) {
    (asked->tiers[i] == nullptr ? plain : tiered).push_back(asked->all[i]);
    tables.push_back(asked->all[i].table);
  }
  if (plain.empty()) return find(tiered);
  DeviceTable::LookupGroup(cuda, scratch, plain.data(), static_cast<int64_t>(plain.size()), true);
  if (!tiered.empty()) find(tiered);
  std::vector<DeviceTable::Reading> readings = DeviceTable::ReadGroup(cuda, tables);  // all at once, in one order
  for (size_t i = 0; i < readings.size(); ++i)
    if (asked->tiers[i] != nullptr) readings[i].fresh.keys = asked->all[i].keys;
  return readings;
}

// Has a feature read the keys from number `first` on of what was asked.
inline void SetRows(const DeviceTable::Asked& asked, const DeviceTable::Reading& reading, int64_t first,
                    DeviceFeature* feature) {
  feature->rows = reading.rows;
  feature->num_rows = reading.num_rows;
  feature->index = asked.row_ids + first;
  feature->fresh = reading.fresh;
  if (feature->fresh.is_on()) feature->fresh.keys = feature->fresh.keys.From(first);
}

// Rows of gradients that are summed by row id, on the device, with room for as many rows as there are addends. Tables of one
// dim share a tensor, in which each begins at whole 64 bytes.
class RowSumsOutput {
 public:
  // num_rows: of each table, what its row numbers are below; kMostRows: it is not known. fills: behind the sums the room is row
  // ids -1 and zeros, else nobody knows what.
  RowSumsOutput(OpKernelContext* ctx, const Cuda& cuda, DeviceScratch* scratch,
                const std::vector<std::vector<DeviceAddends>>& addends, const std::vector<int64_t>& dims,
                const std::vector<int64_t>& num_rows, bool fills)
      : num_sums_(scratch->Get<int64_t>(static_cast<int64_t>(addends.size()))), dims_(dims) {
    std::vector<DeviceAddends> all;
    for (size_t t = 0; t < addends.size(); ++t) {
      int64_t most = 0;
      for (DeviceAddends a : addends[t]) {
        a.table = static_cast<int64_t>(t);
        all.push_back(a);
        most += a.segments.n;
      }
      const int64_t dim = dims[t];
      size_.push_back(most);
      first_.push_back(room_[dim]);
      room_[dim] += (most + kWholeRows - 1) / kWholeRows * kWholeRows;
    }
    for (const auto& [dim, rows] : room_) {
      Check(ctx->allocate_temp(tensorflow::DT_INT64, CheckedShape({rows}), &row_ids_[dim]));
      Check(ctx->allocate_temp(tensorflow::DT_FLOAT, CheckedShape({rows, dim}), &sums_[dim]));
    }
    for (size_t t = 0; t < addends.size(); ++t)
      tables_.push_back({num_rows[t], dims[t], ids(t), sums(t), num_sums(t), fills ? size_[t] : 0});
    SumRowsOfTables(cuda, scratch, all.data(), static_cast<int64_t>(all.size()), tables_.data(),
                    static_cast<int64_t>(tables_.size()), FloatType::kFloat32, nullptr);
  }

  // Of table t.
  int64_t* ids(size_t t) { return static_cast<int64_t*>(row_ids_[dims_[t]].data()) + first_[t]; }
  float* sums(size_t t) { return static_cast<float*>(sums_[dims_[t]].data()) + first_[t] * dims_[t]; }
  int64_t* num_sums(size_t t) { return num_sums_ + t; }  // [1] on the device

  // As many as there are addends.
  Tensor IdsTensor(size_t t) const { return row_ids_.at(dims_[t]).Slice(first_[t], first_[t] + size_[t]); }
  Tensor SumsTensor(size_t t) const { return sums_.at(dims_[t]).Slice(first_[t], first_[t] + size_[t]); }

 private:
  static constexpr int64_t kWholeRows = 32;

  int64_t* const num_sums_;
  const std::vector<int64_t> dims_;
  std::vector<int64_t> first_, size_;
  std::map<int64_t, int64_t> room_;  // by dim
  std::map<int64_t, Tensor> row_ids_, sums_;
  std::vector<DeviceRowSums> tables_;
};

// Outputs for each table its distinct row ids, and behind those of all tables the sums of its addends: as many as there are
// addends, the last ones of row id -1 and zeros, so that nothing waits to learn how many rows there are. num_rows: what row
// numbers are below, or nothing: they may be anything.
inline void OutputRowSums(OpKernelContext* ctx, const std::vector<std::vector<DeviceAddends>>& addends,
                          const std::vector<int64_t>& dims, std::vector<int64_t> num_rows = {}) {
  TfDeviceScratch scratch(ctx);
  const size_t m = addends.size();
  if (num_rows.empty()) num_rows.assign(m, kMostRows);
  const RowSumsOutput output(ctx, CudaOf(ctx), &scratch, addends, dims, num_rows, /*fills=*/true);
  for (size_t t = 0; t < m; ++t) {
    ctx->set_output(static_cast<int>(t), output.IdsTensor(t));
    ctx->set_output(static_cast<int>(m + t), output.SumsTensor(t));
  }
}

}  // namespace sok
