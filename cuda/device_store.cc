#include "sok/device_store.h"

#include <cuda_runtime.h>

#include <mutex>
#include <utility>

#include "detail/check.h"
#include "detail/scratch.h"
#include "sok/device_words.h"
#include "sok/error.h"

namespace sok {

struct DeviceStore::Stream {
  Stream() { SOK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream)); }

  std::mutex mutex;
  cudaStream_t stream = nullptr;
};

class DeviceStore::Call {
 public:
  explicit Call(Stream* stream) : lock_(stream->mutex), cuda{stream->stream}, scratch(cuda) {}

 private:
  const std::lock_guard<std::mutex> lock_;

 public:
  const Cuda cuda;
  StreamScratch scratch;
};

DeviceStore::DeviceStore(TableConfig config, int64_t budget_bytes)
    : table_(std::make_unique<DeviceTable>(std::move(config), budget_bytes)), stream_(std::make_unique<Stream>()) {}
DeviceStore::~DeviceStore() = default;

int64_t DeviceStore::size() const {
  Call call(stream_.get());
  return table_->SizeToHost(call.cuda);
}

int64_t DeviceStore::memory_bytes() const { return table_->memory_bytes(); }

void DeviceStore::Reserve(const Cpu&, int64_t n, bool) {
  Call call(stream_.get());
  table_->Reserve(call.cuda, n);
}

void DeviceStore::Assign(const Cpu&, Scratch*, const uint64_t* keys, const float* rows, int64_t n) {
  Call call(stream_.get());
  auto* device_keys = call.scratch.Get<uint64_t>(n);
  auto* device_rows = call.scratch.Get<float>(n * dim());
  CopyToDevice(call.cuda, device_keys, keys, n * 8);
  CopyToDevice(call.cuda, device_rows, rows, n * dim() * 4);
  table_->Assign(call.cuda, &call.scratch, device_keys, device_rows, n);
  SOK_CUDA(cudaStreamSynchronize(call.cuda.stream));
}

std::vector<uint64_t> DeviceStore::Keys() const { throw FailedPrecondition("not yet"); }
void DeviceStore::Export(const Cpu&, const std::string& slot_set,
                         const std::function<ExportTarget(int64_t, int64_t)>& allocate) const {
  if (!slot_set.empty()) throw FailedPrecondition("not yet");
  Call call(stream_.get());
  const int64_t n = table_->SizeToHost(call.cuda);
  const ExportTarget target = allocate(n, 0);
  auto* keys = call.scratch.Get<uint64_t>(n);
  auto* row_ids = call.scratch.Get<int64_t>(n);
  auto* rows = call.scratch.Get<float>(n * dim());
  table_->Export(call.cuda, &call.scratch, keys, row_ids, n);
  table_->Weights(call.cuda, &call.scratch, row_ids, n, rows);
  CopyToHost(call.cuda, target.keys, keys, n * 8);
  CopyToHost(call.cuda, target.rows, rows, n * dim() * 4);
}
int64_t DeviceStore::SlotFloats(const std::string& slot_set) const { return table_->SlotFloats(slot_set); }
void DeviceStore::Slots(const std::string&, const uint64_t*, int64_t, float*, int64_t*) const {
  throw FailedPrecondition("not yet");
}
std::vector<TableStore::SlotSetInfo> DeviceStore::SlotSets() const { throw FailedPrecondition("not yet"); }
void DeviceStore::ReadAll(const Cpu&, RowSink*) const { throw FailedPrecondition("not yet"); }
void DeviceStore::BeginSave(SnapshotOf) { throw FailedPrecondition("not yet"); }
void DeviceStore::EndSave(const std::string&) { throw FailedPrecondition("not yet"); }
void DeviceStore::ReadSnapshot(const Cpu&, RowSink*) { throw FailedPrecondition("not yet"); }
void DeviceStore::ReadChanges(const Cpu&, RowSink*) const { throw FailedPrecondition("not yet"); }
void DeviceStore::SkipCalls(const std::string&, const std::vector<SlotSetInfo>&) {
  throw FailedPrecondition("not yet");
}
TableStore::ChangeInfo DeviceStore::Changes() const { return {}; }
int64_t DeviceStore::Restore(const Cpu&, Scratch*, const std::vector<SlotSetInfo>&, const RowValues&) {
  throw FailedPrecondition("not yet");
}
void DeviceStore::Swap(TableStore*) { throw FailedPrecondition("not yet"); }
int64_t DeviceStore::Erase(const uint64_t*, int64_t) { throw FailedPrecondition("not yet"); }

}  // namespace sok
