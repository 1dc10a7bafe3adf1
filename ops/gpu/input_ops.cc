// What is wrong with an input that lies on a GPU.
#include "../validate_csr_op.h"
#include "gpu_op.h"

namespace sok {
namespace {

// Keys stay where they are, and nothing waits for them: a key that the table cannot hold is found by its lookup, reads as
// zeros, and is raised by the table's next call on the host (DeviceTable::ThrowIfBadToHost).
class GpuValidateCsrOp final : public ValidateCsrOp {
 public:
  using ValidateCsrOp::ValidateCsrOp;

 private:
  InputStatus InspectKeys(const TableConfig&, const Tensor&) const override { return {kFine, 0}; }
};
SOK_GPU_KERNEL(Name("Sok>ValidateCsr").HostMemory("handle").HostMemory("row_splits"), GpuValidateCsrOp);

}  // namespace
}  // namespace sok
