// The asker's side of the way home, by what pools and sums anyway: a place is the number of a row in a matrix of rows one
// float apart.
#include "sok/exchange.h"

#include <algorithm>
#include <map>
#include <vector>

#include "detail/copy_row.h"
#include "detail/launch.h"
#include "detail/upload.h"
#include "detail/work_of_block.h"
#include "sok/combine_grad.h"
#include "sok/device_words.h"
#include "sok/sum_rows.h"

namespace sok {
namespace {

constexpr int64_t kRowsPerBlock = kThreads / kRowLanes;

// The index of one feature, and where its places begin among those of all.
struct PlacesWork {
  const int32_t* index;
  int64_t first;
};

__global__ void PlacesKernel(const PlacesWork* all, int64_t num_work, int64_t n, int64_t* places) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    int64_t low = 0, high = num_work;
    while (high - low > 1) {  // the last that begins at i or before
      const int64_t middle = low + (high - low) / 2;
      if (all[middle].first <= i) {
        low = middle;
      } else {
        high = middle;
      }
    }
    places[i] = all[low].index[i - all[low].first] & kPlaceMask;
  }
}

// Of each feature where its places begin, without the bit that only the CPU's gradient needs.
std::vector<const int64_t*> PlacesOf(const Cuda& cuda, DeviceScratch* scratch, const PooledFeature* features,
                                     int num_features) {
  std::vector<PlacesWork> work;
  int64_t n = 0;
  for (int f = 0; f < num_features; ++f) {
    if (features[f].n > 0) work.push_back({features[f].index, n});
    n += features[f].n;
  }
  auto* places = scratch->Get<int64_t>(n);
  const int64_t num_work = static_cast<int64_t>(work.size());
  if (n > 0) {
    Launch(PlacesKernel, GridFor(n, kThreads), kThreads, 0, cuda, Upload(cuda, scratch, work.data(), num_work),
           num_work, n, places);
  }
  std::vector<const int64_t*> of_features;
  for (int f = 0; f < num_features; ++f) {
    of_features.push_back(places);
    places += features[f].n;
  }
  return of_features;
}

DeviceSegments SegmentsOf(const PooledFeature& feature) {
  DeviceSegments segments;
  segments.row_splits = feature.row_splits;
  segments.segments = feature.segments;
  segments.n = feature.n;
  return segments;
}

DeviceFeature FeatureAt(const float* answers, int64_t size, const PooledFeature& feature, const int64_t* places) {
  DeviceFeature device;
  device.rows = MatrixRows(answers, 1);
  device.num_rows = std::max<int64_t>(0, size - feature.dim + 1);
  device.dim = feature.dim;
  device.index = places;
  device.segments = SegmentsOf(feature);
  device.weights = feature.weights;
  device.combiner = feature.combiner;
  device.output_stride = feature.dim;
  return device;
}

// The sums of one dim, which go back into the messages.
struct ScatterWork {
  int64_t* places;
  float* rows;
  int64_t* num_rows;
  int64_t most, dim, first_block;
};

__global__ void ScatterKernel(const ScatterWork* all, int64_t num_work, int64_t num_blocks, int64_t size,
                              float* packed) {
  const Tile<kRowLanes> tile;
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const ScatterWork& work = WorkOfBlock(all, num_work, block);
    const int64_t k = (block - work.first_block) * kRowsPerBlock + threadIdx.x / kRowLanes;
    if (k >= *work.num_rows) continue;
    const int64_t place = work.places[k];  // one outside of the answers is what the sum has of all such
    if (place + work.dim <= size) CopyRow(tile, work.rows + k * work.dim, work.dim, packed + place);
  }
}

__global__ void HeadersKernel(const float* answers, const int64_t* begin, int64_t world, float* headers) {
  for (int64_t i = GlobalThread(); i < 2 * world; i += GlobalThreads()) headers[i] = answers[begin[i / 2] + i % 2];
}

}  // namespace

void AnswerHeadersToHost(const Cuda& cuda, DeviceScratch* scratch, const float* answers, const int64_t* begin,
                         int64_t world, float* headers) {
  auto* on_device = scratch->Get<float>(2 * world);
  Launch(HeadersKernel, GridFor(2 * world, kThreads), kThreads, 0, cuda, answers, Upload(cuda, scratch, begin, world),
         world, on_device);
  CopyToHost(cuda, headers, on_device, 2 * world * static_cast<int64_t>(sizeof(float)));
}

void CombineAnswers(const Cuda& cuda, DeviceScratch* scratch, const float* answers, int64_t size,
                    const PooledFeature* features, int num_features, float* const* outputs) {
  const std::vector<const int64_t*> places = PlacesOf(cuda, scratch, features, num_features);
  std::vector<DeviceFeature> on_device;
  for (int f = 0; f < num_features; ++f) {
    on_device.push_back(FeatureAt(answers, size, features[f], places[f]));
    on_device.back().output = outputs[f];
  }
  CombineGroup(cuda, scratch, on_device.data(), num_features, FloatType::kFloat32, nullptr);
}

void CombineAnswersGrad(const Cuda& cuda, DeviceScratch* scratch, const PooledFeature* features, int num_features,
                        const float* const* grads, int64_t size, float* packed) {
  ZeroOnDevice(cuda, packed, size * static_cast<int64_t>(sizeof(float)));
  const std::vector<const int64_t*> places = PlacesOf(cuda, scratch, features, num_features);
  // A place is that of a row of one table, so all who name it have the same dim: places of each dim are rows of a table.
  std::map<int64_t, ScatterWork> of_dim;
  for (int f = 0; f < num_features; ++f) of_dim[features[f].dim].most += features[f].n;
  std::vector<ScatterWork> work;
  std::vector<DeviceRowSums> sums;
  std::map<int64_t, int64_t> table_of;
  int64_t num_blocks = 0;
  for (auto& [dim, one] : of_dim) {
    one = {scratch->Get<int64_t>(one.most),
           scratch->Get<float>(one.most * dim),
           scratch->Get<int64_t>(1),
           one.most,
           dim,
           num_blocks};
    num_blocks += (one.most + kRowsPerBlock - 1) / kRowsPerBlock;
    table_of[dim] = static_cast<int64_t>(sums.size());
    sums.push_back({size, dim, one.places, one.rows, one.num_rows, 0});
    work.push_back(one);
  }
  std::vector<DeviceAddends> addends;
  for (int f = 0; f < num_features; ++f) {
    DeviceAddends a;
    a.table = table_of[features[f].dim];
    a.row_ids = places[f];
    a.values = grads[f];
    a.values_stride = features[f].dim;
    a.segments = SegmentsOf(features[f]);
    a.weights = features[f].weights;
    a.combiner = features[f].combiner;
    addends.push_back(a);
  }
  SumRowsOfTables(cuda, scratch, addends.data(), num_features, sums.data(), static_cast<int64_t>(sums.size()),
                  FloatType::kFloat32, nullptr);
  const int64_t num_work = static_cast<int64_t>(work.size());
  if (num_blocks == 0) return;
  Launch(ScatterKernel, GridFor(num_blocks, 1), kThreads, 0, cuda, Upload(cuda, scratch, work.data(), num_work),
         num_work, num_blocks, size, packed);
}

void CombineAnswersGradWeights(const Cuda& cuda, DeviceScratch* scratch, const float* answers, int64_t size,
                               const PooledFeature& feature, const float* grad, float* grad_weights) {
  const int64_t* places = PlacesOf(cuda, scratch, &feature, 1)[0];
  CombineGradWeights(cuda, FeatureAt(answers, size, feature, places), grad, grad_weights, nullptr);
}

}  // namespace sok
