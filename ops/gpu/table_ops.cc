// Tables in the memory of a GPU.
#include "../table_handle_op.h"
#include "../table_resource.h"
#include "gpu_op.h"
#include "sok/device_store.h"

namespace sok {
namespace {

class GpuTableHandleOp final : public TableHandleOp {
 public:
  using TableHandleOp::TableHandleOp;

 private:
  TableResource* Make() const override {
    auto store = std::make_shared<DeviceStore>(config(), memory_bytes());
    DeviceTable* table = &store->table();
    return new TableResource(std::move(store), table, key_dtype());
  }
};
SOK_GPU_KERNEL(Name("Sok>TableHandle").HostMemory("handle"), GpuTableHandleOp);

}  // namespace
}  // namespace sok
