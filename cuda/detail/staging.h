// Copies to the device that neither wait nor keep the caller's memory: through pinned memory.
#pragma once

#include <cstdint>

#include "sok/device.h"

namespace sok {

// to[0 .. bytes) = from[0 .. bytes), put on the stream; `from` is read before the call returns. From any thread. Throws
// CudaError.
void UploadBytes(const Cuda& cuda, const void* from, int64_t bytes, void* to);

}  // namespace sok
