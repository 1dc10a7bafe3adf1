// DeviceTable: what calls could not say when they were made.
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "detail/launch.h"
#include "detail/table_state.h"
#include "detail/upload.h"
#include "sok/error.h"

namespace sok {
namespace {

// What the first table kept that had something, and its number; n: none had.
struct Taken {
  TableBad bad;
  uint64_t table;
};

// One block. The number of the first table that keeps something, or n.
__device__ unsigned FirstBad(TableBad* const* bads, int64_t n) {
  __shared__ unsigned first;
  if (threadIdx.x == 0) first = static_cast<unsigned>(n);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
    if (bads[i]->has_key != 0 || bads[i]->has_gradient != 0) atomicMin(&first, static_cast<unsigned>(i));
  __syncthreads();
  return first;
}

__global__ void TakeBadKernel(TableBad* const* bads, int64_t n, Taken* taken) {
  const unsigned first = FirstBad(bads, n);
  if (threadIdx.x != 0) return;
  taken->table = first;
  if (first == n) return;
  taken->bad = *bads[first];
  *bads[first] = TableBad{};
}

__global__ void AnyBadKernel(TableBad* const* bads, int64_t n, uint64_t* any) {
  const unsigned first = FirstBad(bads, n);
  if (threadIdx.x == 0) *any = first != n;
}

TableBad* const* UploadBads(const Cuda& cuda, DeviceScratch* scratch, const std::vector<DeviceTable::State*>& states) {
  std::vector<TableBad*> bads;
  for (const DeviceTable::State* state : states) bads.push_back(state->bad.data());
  return Upload(cuda, scratch, bads.data(), static_cast<int64_t>(bads.size()));
}

std::vector<DeviceTable::State*> StatesOf(const std::vector<DeviceTable*>& tables) {
  std::vector<DeviceTable::State*> states;
  for (DeviceTable* table : tables) states.push_back(table->state());
  return states;
}

void ThrowIf(const TableBad& bad, const TableConfig& config) {
  if (bad.has_key != 0) config.CheckOwned(bad.key);
  if (bad.has_gradient == 0) return;
  const std::string which = config.Label() + ": gradient " + std::to_string(bad.position) + ", for row id " +
                            std::to_string(static_cast<int64_t>(bad.row_id));
  if (bad.has_gradient == TableBad::kUnknownRow) {
    throw InvalidArgument(which + ", which this shard does not have, was left out. Row ids come from a lookup of the " +
                          "same table on the same worker.");
  }
  throw InvalidArgument(which + ", holds NaN or infinity; nothing was updated (nonfinite_gradients='raise').");
}

}  // namespace

void DeviceTable::ThrowIfBadToHost(const Cuda& cuda) {
  TableBad bad;
  {
    const TableWriting writing(state_.get(), cuda);
    SOK_CUDA(cudaMemcpyAsync(&bad, state_->bad.data(), sizeof(bad), cudaMemcpyDeviceToHost, cuda.stream));
    SOK_CUDA(cudaMemsetAsync(state_->bad.data(), 0, sizeof(bad), cuda.stream));
    SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  }
  ThrowIf(bad, config());
}

void DeviceTable::ThrowIfBadToHost(const Cuda& cuda, DeviceScratch* scratch, const std::vector<DeviceTable*>& tables) {
  if (tables.empty()) return;
  Taken taken;
  {
    const std::vector<State*> states = StatesOf(tables);
    const TableWriting writing(states, cuda);
    Taken* on_device = scratch->Get<Taken>(1);
    Launch(TakeBadKernel, 1, kThreads, 0, cuda, UploadBads(cuda, scratch, states), static_cast<int64_t>(states.size()),
           on_device);
    SOK_CUDA(cudaMemcpyAsync(&taken, on_device, sizeof(taken), cudaMemcpyDeviceToHost, cuda.stream));
    SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  }
  if (taken.table < tables.size()) ThrowIf(taken.bad, tables[taken.table]->config());
}

void DeviceTable::ThrowIfBadIsKnown(const Cuda& cuda) {
  State& state = *state_;
  {
    const std::lock_guard<std::mutex> lock(state.seen_mutex);
    if (state.is_seen_asked && !state.seen_copied.HasPassed()) return;
    const bool was_bad = state.is_seen_asked && (state.seen.get()->has_key != 0 || state.seen.get()->has_gradient != 0);
    state.is_seen_asked = !was_bad;
    if (!was_bad) {
      const TableReading reading(state_.get(), cuda);
      SOK_CUDA(
          cudaMemcpyAsync(state.seen.get(), state.bad.data(), sizeof(TableBad), cudaMemcpyDeviceToHost, cuda.stream));
      state.seen_copied.Record(cuda);
      return;
    }
  }
  ThrowIfBadToHost(cuda);
}

struct DeviceTableWatch::State {
  HomeDevice home;
  PinnedValue<uint64_t> any_bad;  // a kernel writes it there
  std::shared_ptr<Event> written;
};

DeviceTableWatch::DeviceTableWatch() = default;
DeviceTableWatch::~DeviceTableWatch() {
  if (state_ == nullptr) return;
  const HomeDevice::Visit visit(state_->home);
  if (state_->written != nullptr) state_->written->Wait();
  state_.reset();
}

void DeviceTableWatch::ThrowIfBadIsKnown(const Cuda& cuda, DeviceScratch* scratch,
                                         const std::vector<DeviceTable*>& tables) {
  if (tables.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == nullptr) state_ = std::make_unique<State>();
    if (state_->written != nullptr && !state_->written->HasPassed()) return;
    const bool was_bad = state_->written != nullptr && *state_->any_bad.get() != 0;
    state_->written.reset();
    if (!was_bad) {
      const std::vector<DeviceTable::State*> states = StatesOf(tables);
      const TableReading reading(states, cuda);
      Launch(AnyBadKernel, 1, kThreads, 0, cuda, UploadBads(cuda, scratch, states), static_cast<int64_t>(states.size()),
             state_->any_bad.get());
      const std::shared_ptr<Event> written = TakeEvent();
      written->Record(cuda);
      state_->written = written;
      return;
    }
  }
  DeviceTable::ThrowIfBadToHost(cuda, scratch, tables);
}

}  // namespace sok
