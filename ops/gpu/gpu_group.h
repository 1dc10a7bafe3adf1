// Groups of tables on a GPU: holding all of them as they are, and giving the sums of their gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../table_resource.h"
#include "gpu_op.h"
#include "sok/device_table.h"
#include "sok/sum_rows.h"

namespace sok {

// How many rows a table may have.
inline constexpr int64_t kMostRows = INT64_C(0xFFFFFFFE);

// Every table is held as it is while the gather is put on the stream; in one order for all threads.
inline std::vector<DeviceTable::Reading> ReadAll(const Cuda& cuda,
                                                 const std::vector<RefCountPtr<TableResource>>& tables) {
  std::vector<size_t> order(tables.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tables[a].get() < tables[b].get(); });
  std::vector<DeviceTable::Reading> readings(tables.size());
  for (const size_t t : order) readings[t] = tables[t]->device_table().Read(cuda);
  return readings;
}

// Outputs for each table its distinct row ids, and behind those of all tables the sums of its addends. Waits for the
// stream, to learn how many there are.
inline void OutputRowSumsToHost(OpKernelContext* ctx, const std::vector<std::vector<DeviceAddends>>& addends,
                                const std::vector<int64_t>& dims) {
  const Cuda cuda = CudaOf(ctx);
  TfDeviceScratch scratch(ctx);
  const size_t m = addends.size();
  auto* num_sums = scratch.Get<int64_t>(static_cast<int64_t>(m));
  std::vector<Tensor> row_ids(m), sums(m);
  for (size_t t = 0; t < m; ++t) {
    int64_t most = 0;
    for (const DeviceAddends& a : addends[t]) most += a.segments.n;
    Check(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({most}), &row_ids[t]));
    Check(ctx->allocate_temp(tensorflow::DT_FLOAT, CheckedShape({most, dims[t]}), &sums[t]));
    SumRows(cuda, &scratch, addends[t].data(), static_cast<int64_t>(addends[t].size()), &kMostRows, 1, dims[t],
            FloatType::kFloat32, static_cast<int64_t*>(row_ids[t].data()), nullptr, static_cast<float*>(sums[t].data()),
            num_sums + t, nullptr);
  }
  std::vector<int64_t> counts(m);
  CopyToHost(cuda, counts.data(), num_sums, static_cast<int64_t>(m * sizeof(int64_t)));
  for (size_t t = 0; t < m; ++t) {
    ctx->set_output(static_cast<int>(t), row_ids[t].Slice(0, counts[t]));
    ctx->set_output(static_cast<int>(m + t), sums[t].Slice(0, counts[t]));
  }
}

}  // namespace sok
