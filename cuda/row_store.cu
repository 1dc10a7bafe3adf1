#include "sok/row_store.h"

#include <algorithm>
#include <utility>

#include "detail/copy_row.h"
#include "detail/launch.h"
#include "sok/error.h"
#include "sok/hash_table.h"

namespace sok {
namespace {

constexpr int64_t kMostSlabs = 1024;  // their addresses then stay in a multiprocessor's first cache

// Addresses travel as arguments: no host memory has to outlive the call.
__global__ void SetSlabKernel(float** slabs, int64_t number, float* slab) { slabs[number] = slab; }

__global__ void WidenRecordsKernel(const float* from, int64_t from_stride, int64_t floats, int64_t num_rows,
                                   int64_t count, const float* fresh, int64_t to_stride, float* to) {
  for (int64_t i = GlobalThread(); i < num_rows * (floats + count); i += GlobalThreads()) {
    const int64_t row = i / (floats + count), j = i - row * (floats + count);
    to[row * to_stride + j] = j < floats ? from[row * from_stride + j] : fresh[j - floats];
  }
}

template <bool kGather>
__global__ void CopyRecordsKernel(DeviceRows records, const uint32_t* rows, int64_t n, int64_t first, int64_t count,
                                  float* values) {  // [n, count]
  const Tile<kRowLanes> tile;
  for (int64_t i = GlobalThread() / kRowLanes; i < n; i += GlobalThreads() / kRowLanes) {
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

DeviceRowStore::DeviceRowStore(int64_t dim, int64_t max_rows, DeviceMemory* memory, int64_t least_slab_bytes)
    : memory_(memory), max_rows_(std::max<int64_t>(1, max_rows)), floats_(dim), stride_(RecordStride(dim)), shift_(6) {
  auto bytes = [&](int shift) { return stride_ * static_cast<int64_t>(sizeof(float)) << shift; };
  while (bytes(shift_ + 1) <= least_slab_bytes || (max_rows >> shift_) >= kMostSlabs) ++shift_;
  while (shift_ > 0 && (int64_t{1} << (shift_ - 1)) >= max_rows) --shift_;  // a small table is one small slab
  mask_ = (int64_t{1} << shift_) - 1;
  max_slabs_ = std::max<int64_t>(1, (max_rows + mask_) >> shift_);
}

DeviceRowStore::~DeviceRowStore() {
  for (const Slab& slab : slabs_) memory_->Free(slab.data, slab.bytes);
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
        memory_->Allocate(cuda, max_slabs_ * static_cast<int64_t>(sizeof(float*)), "the list of row slabs"));
  }
  slabs_.reserve(static_cast<size_t>(max_slabs_));
  while (this->num_rows() < num_rows) {
    const int64_t bytes = SlabBytes(slabs_.size(), stride_);
    slabs_.push_back({static_cast<float*>(memory_->Allocate(cuda, bytes, "embedding rows")), bytes});
    SetSlab(cuda, static_cast<size_t>(num_slabs_++), slabs_.back());
  }
}

void DeviceRowStore::SetSlab(const Cuda& cuda, size_t number, Slab slab) {
  slabs_[number] = slab;
  Launch(SetSlabKernel, 1, 1, 0, cuda, device_slabs_, static_cast<int64_t>(number), slab.data);
}

void DeviceRowStore::Widen(const Cuda& cuda, int64_t num_rows, const Slab& from, int64_t from_stride, int64_t count,
                           const float* fresh, int64_t to_stride, const Slab& to) const {
  Launch(WidenRecordsKernel, GridFor(num_rows * (floats_ + count), kThreads), kThreads, 0, cuda, from.data, from_stride,
         floats_, num_rows, count, fresh, to_stride, to.data);
}

int64_t DeviceRowStore::AddFloats(const Cuda& cuda, int64_t count, const float* fresh) {
  const char* const what = "wider embedding rows (an optimizer's slots; while rows move, two slabs are there twice)";
  const int64_t offset = floats_, stride = RecordStride(floats_ + count);
  const int64_t rows_twice = std::min(num_rows(), 2 * (mask_ + 1)), word = sizeof(float);
  memory_->CheckBudget(num_rows() * (stride - stride_) * word + rows_twice * stride_ * word, what);
  Slab before;  // the slab that was widened last, as it was
  size_t done = 0;
  try {
    for (; done < slabs_.size(); ++done) {
      const int64_t bytes = SlabBytes(done, stride);
      const Slab wide = {static_cast<float*>(memory_->Allocate(cuda, bytes, what)), bytes};
      Widen(cuda, RowsOfSlab(done), slabs_[done], stride_, count, fresh, stride, wide);
      memory_->Free(cuda, before.data, before.bytes);
      before = slabs_[done];
      SetSlab(cuda, done, wide);
    }
  } catch (const OutOfMemory&) {
    // The last one is still there as it was. Each of the others goes to where the one after it has moved out, so that going
    // back takes no memory.
    for (size_t i = done; i-- > 0;) {
      const Slab wide = slabs_[i];
      if (i + 1 < done) Widen(cuda, RowsOfSlab(i), wide, stride, 0, nullptr, stride_, before);
      SetSlab(cuda, i, before);
      before = wide;
    }
    memory_->Free(cuda, before.data, before.bytes);
    throw;
  }
  memory_->Free(cuda, before.data, before.bytes);
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
  Launch(CopyRecordsKernel<true>, GridFor(n, kThreads / kRowLanes), kThreads, 0, cuda, records, rows, n, first, count,
         out);
}

void ScatterRecords(const Cuda& cuda, const DeviceRows& records, const uint32_t* rows, int64_t n, int64_t first,
                    int64_t count, const float* values) {
  Launch(CopyRecordsKernel<false>, GridFor(n, kThreads / kRowLanes), kThreads, 0, cuda, records, rows, n, first, count,
         const_cast<float*>(values));
}

}  // namespace sok
