// Tables in the memory of a GPU.
#include "../table_handle_op.h"
#include "../table_resource.h"
#include "gpu_op.h"
#include "sok/device_memory.h"
#include "sok/device_store.h"
#include "sok/device_tier.h"

namespace sok {
namespace {

// TensorFlow's memory of a device for tables: one owner of the card, whose pool serves both as they grow.
class TfTableMemory final : public DeviceAllocator {
 public:
  explicit TfTableMemory(OpKernelContext* ctx)
      : allocator_(ctx->device()->GetAllocator(tensorflow::AllocatorAttributes())), cuda_(CudaOf(ctx)) {}

  void* Allocate(int64_t bytes) override {
    constexpr size_t kAlignment = 256;
    // Who waits for other ops to give memory back may wait for ops that wait for this one.
    const tensorflow::AllocationAttributes no_waiting(/*retry_on_failure=*/false, /*allocation_will_be_logged=*/false,
                                                      /*freed_by_func=*/nullptr);
    return allocator_->AllocateRaw(kAlignment, static_cast<size_t>(bytes), no_waiting);
  }
  void Free(void* p) override { allocator_->DeallocateRaw(p); }
  Cuda stream() const override { return cuda_; }
  std::string Room() const override {
    const auto stats = allocator_->GetStats();
    if (!stats || !stats->bytes_limit) return "TensorFlow's allocator of this device has none";
    return "TensorFlow's allocator of this device has " + std::to_string(*stats->bytes_limit - stats->bytes_in_use) +
           " of " + std::to_string(*stats->bytes_limit) + " bytes left, in pieces";
  }

 private:
  tensorflow::Allocator* const allocator_;
  const Cuda cuda_;
};

class GpuTableHandleOp final : public TableHandleOp {
 public:
  using TableHandleOp::TableHandleOp;

 private:
  TableResource* Make(OpKernelContext* ctx) const override {
    constexpr int64_t kRowsAtATime = int64_t{1} << 20;
    if (is_always_on_host()) return new TableResource(config(), key_dtype());
    auto memory = std::make_unique<TfTableMemory>(ctx);
    const StorageConfig& storage = config().storage;
    if (config().policies.any() || storage.has_file() || storage.device_bytes > 0) {
      TableConfig tiered = config();
      if (tiered.storage.device_bytes == 0) tiered.storage.device_bytes = memory_bytes();
      std::shared_ptr<DeviceTier> tier = DeviceTier::Make(std::move(tiered), kRowsAtATime, std::move(memory));
      DeviceTable* table = &tier->device();
      return new TableResource(std::move(tier), table, key_dtype());
    }
    auto store = std::make_shared<DeviceStore>(config(), memory_bytes(), kRowsAtATime, nullptr, std::move(memory));
    DeviceTable* table = &store->table();
    return new TableResource(std::move(store), table, key_dtype());
  }
};
SOK_GPU_KERNEL(Name("Sok>TableHandle").HostMemory("handle"), GpuTableHandleOp);

}  // namespace
}  // namespace sok
