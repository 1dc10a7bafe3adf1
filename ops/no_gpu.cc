// A library without kernels for GPUs.
#include "gpu_kernel.h"

namespace sok {

const char* GpuDevice() { return nullptr; }

}  // namespace sok
