#include "sok/row_store.h"

#include <algorithm>
#include <utility>

#include "detail/copy_row.h"
#include "detail/launch.h"
#include "sok/error.h"
#include "sok/hash_table.h"

namespace sok {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;
constexpr int64_t kLeastSlabBytes = int64_t{2} << 20;
constexpr int64_t kMostSlabs = 1024;  // their addresses then stay in a multiprocessor's first cache

// Addresses travel as arguments: no host memory has to outlive the call.
__global__ void SetSlabKernel(float** slabs, int64_t number, float* slab) { slabs[number] = slab; }

__global__ void WidenKernel(const float* from, int64_t from_stride, int64_t floats, int64_t num_rows, int64_t count,
                            const float* fresh, int64_t to_stride, float* to) {
  for (int64_t i = GlobalThread(); i < num_rows * (floats + count); i += GlobalThreads()) {
    const int64_t row = i / (floats + count), j = i - row * (floats + count);
    to[row * to_stride + j] = j < floats ? from[row * from_stride + j] : fresh[j - floats];
  }
}

template <bool kGather>
__global__ void CopyRecordsKernel(DeviceRows records, const uint32_t* rows, int64_t n, int64_t first, int64_t count,
                                  float* values) {  // [n, count]
  const Tile<kLanes> tile;
  for (int64_t i = GlobalThread() / kLanes; i < n; i += GlobalThreads() / kLanes) {
    float* value = values + i * count;
    if (rows[i] == HashTable::kNoRow) {
      if (kGather) ZeroRow(tile, count, value);
      continue;
    }
    float* record = records.At(rows[i]) + first;
    if (kGather) {
      CopyRow(tile, record, count, value);
    } else {
      CopyRow(tile, value, count, record);
    }
  }
}

}  // namespace

DeviceRowStore::DeviceRowStore(int64_t dim, int64_t max_rows, DeviceMemory* memory)
    : memory_(memory), floats_(dim), stride_(RecordStride(dim)), shift_(6) {
  auto bytes = [&](int shift) { return stride_ * static_cast<int64_t>(sizeof(float)) << shift; };
  while (bytes(shift_ + 1) <= kLeastSlabBytes || (max_rows >> shift_) >= kMostSlabs) ++shift_;
  while (shift_ > 0 && (int64_t{1} << (shift_ - 1)) >= max_rows) --shift_;  // a small table is one small slab
  mask_ = (int64_t{1} << shift_) - 1;
  max_slabs_ = std::max<int64_t>(1, (max_rows + mask_) >> shift_);
}

DeviceRowStore::~DeviceRowStore() {
  for (float* slab : slabs_) memory_->Free(slab, SlabBytes(stride_));
  memory_->Free(device_slabs_, max_slabs_ * static_cast<int64_t>(sizeof(float*)));
}

DeviceRows DeviceRowStore::view() const {
  DeviceRows rows;
  rows.slabs = device_slabs_;
  rows.shift = shift_;
  rows.mask = mask_;
  rows.stride = stride_;
  return rows;
}

void DeviceRowStore::Reserve(const Cuda& cuda, int64_t num_rows) {
  if (device_slabs_ == nullptr) {
    device_slabs_ = static_cast<float**>(
        memory_->Allocate(max_slabs_ * static_cast<int64_t>(sizeof(float*)), "the list of row slabs"));
  }
  slabs_.reserve(static_cast<size_t>(max_slabs_));
  while (this->num_rows() < num_rows) {
    float* slab = static_cast<float*>(memory_->Allocate(SlabBytes(stride_), "embedding rows"));
    slabs_.push_back(slab);
    Launch(SetSlabKernel, 1, 1, 0, cuda, device_slabs_, num_slabs_, slab);
    ++num_slabs_;
  }
}

int64_t DeviceRowStore::AddFloats(const Cuda& cuda, int64_t count, const float* fresh) {
  const int64_t offset = floats_, stride = RecordStride(floats_ + count);
  std::vector<float*> wider;
  wider.reserve(slabs_.size());
  try {
    for (size_t i = 0; i < slabs_.size(); ++i) {
      wider.push_back(static_cast<float*>(memory_->Allocate(
          SlabBytes(stride), "wider embedding rows (an optimizer's slots; while rows move, both widths are there)")));
    }
  } catch (const OutOfMemory&) {
    for (float* slab : wider) memory_->Free(slab, SlabBytes(stride));
    throw;
  }
  for (size_t i = 0; i < wider.size(); ++i) {
    Launch(WidenKernel, GridFor((mask_ + 1) * (floats_ + count), kThreads), kThreads, 0, cuda, slabs_[i], stride_,
           floats_, mask_ + 1, count, fresh, stride, wider[i]);
    Launch(SetSlabKernel, 1, 1, 0, cuda, device_slabs_, static_cast<int64_t>(i), wider[i]);
  }
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  for (float* slab : slabs_) memory_->Free(slab, SlabBytes(stride_));
  slabs_ = std::move(wider);
  floats_ += count;
  stride_ = stride;
  return offset;
}

void DeviceRowStore::Swap(DeviceRowStore* other) {
  std::swap(floats_, other->floats_);
  std::swap(stride_, other->stride_);
  std::swap(num_slabs_, other->num_slabs_);
  slabs_.swap(other->slabs_);
  std::swap(device_slabs_, other->device_slabs_);
}

void GatherRecords(const Cuda& cuda, const DeviceRows& records, const uint32_t* rows, int64_t n, int64_t first,
                   int64_t count, float* out) {
  Launch(CopyRecordsKernel<true>, GridFor(n, kThreads / kLanes), kThreads, 0, cuda, records, rows, n, first, count,
         out);
}

void ScatterRecords(const Cuda& cuda, const DeviceRows& records, const uint32_t* rows, int64_t n, int64_t first,
                    int64_t count, const float* values) {
  Launch(CopyRecordsKernel<false>, GridFor(n, kThreads / kLanes), kThreads, 0, cuda, records, rows, n, first, count,
         const_cast<float*>(values));
}

}  // namespace sok
