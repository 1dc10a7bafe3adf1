#include "detail/row_changes.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "detail/launch.h"
#include "sok/hash_table.h"

namespace sok {
namespace {

constexpr uint8_t kLastMark = 255;

__global__ void CountChangedKernel(RowFilter filter, int64_t first, int64_t count, uint64_t* total) {
  unsigned long long mine = 0;
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) mine += filter.Has(first + i) ? 1 : 0;
  if (mine > 0) atomicAdd(reinterpret_cast<unsigned long long*>(total), mine);
}

// Two generations are left: what belongs to the next save, and the rest.
__global__ void RenumberKernel(uint8_t above, int64_t n, uint8_t* marks) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) marks[i] = marks[i] > above ? 1 : 0;
}

}  // namespace

void DeviceRowChanges::MakeRoom(const Cuda& cuda, int64_t num_rows) {
  if (is_on()) marks_.Grow(cuda, num_rows, num_rows, "notes of which rows have changed");
}

void DeviceRowChanges::NoteErased(const Cuda& cuda, const uint64_t* keys, const uint32_t* erased, int64_t n) {
  if (!is_on() || n == 0) return;
  std::vector<uint64_t> words(static_cast<size_t>(n));
  std::vector<uint32_t> rows(static_cast<size_t>(n));
  SOK_CUDA(cudaMemcpyAsync(words.data(), keys, words.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost, cuda.stream));
  SOK_CUDA(cudaMemcpyAsync(rows.data(), erased, rows.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost, cuda.stream));
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i] != HashTable::kNoRow) keys_.MarkErased(words[i]);
}

void DeviceRowChanges::Begin(const Cuda& cuda, int64_t num_rows) {
  marks_.Grow(cuda, num_rows, num_rows, "notes of which rows have changed");
  keys_.End("");  // of a save that was not ended
  if (mark_ == kLastMark) {
    Launch(RenumberKernel, GridFor(marks_.capacity(), kThreads), kThreads, 0, cuda, base_mark_, marks_.capacity(),
           marks_.data());
    base_mark_ = 0;
    mark_ = 1;
  }
  keys_.Begin(0, [](uint64_t) { return false; });
  saving_mark_ = mark_++;
}

void DeviceRowChanges::End(const Cuda& cuda, const std::string& base) {
  if (!is_saving()) return;
  keys_.End(base);
  if (!base.empty()) base_mark_ = saving_mark_;
  if (is_on()) return;
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  TurnOff();
}

void DeviceRowChanges::TurnOff() {
  keys_.TurnOff();
  GrowingArray<uint8_t> gone(memory_);
  gone.Swap(&marks_);
  base_mark_ = 0;
  mark_ = 1;
}

std::vector<uint64_t> DeviceRowChanges::Erased() const {
  std::vector<uint64_t> keys = keys_.saved_erased();
  keys.insert(keys.end(), keys_.erased().begin(), keys_.erased().end());
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

int64_t DeviceRowChanges::CountToHost(const Cuda& cuda, DeviceScratch* scratch) const {
  return CountToHost(cuda, scratch, {marks_.data(), is_saving() ? saving_mark_ : base_mark_}, 0, marks_.capacity());
}

int64_t DeviceRowChanges::CountToHost(const Cuda& cuda, DeviceScratch* scratch, const RowFilter& filter, int64_t first,
                                      int64_t count) const {
  count = std::min(count, marks_.capacity() - first);
  if (count <= 0) return 0;
  auto* total = scratch->Get<uint64_t>(1);
  uint64_t on_host = 0;
  SOK_CUDA(cudaMemsetAsync(total, 0, sizeof(on_host), cuda.stream));
  // One addition a thread: no more of them than keep a device busy.
  Launch(CountChangedKernel, std::min<int64_t>(GridFor(count, kThreads), 1024), kThreads, 0, cuda, filter, first, count,
         total);
  SOK_CUDA(cudaMemcpyAsync(&on_host, total, sizeof(on_host), cudaMemcpyDeviceToHost, cuda.stream));
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  return static_cast<int64_t>(on_host);
}

}  // namespace sok
