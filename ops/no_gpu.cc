// A library without kernels for GPUs.

namespace sok {

const char* GpuDevice() { return nullptr; }

}  // namespace sok
