// What the runtime's functions ask before they do something: whether this call is the one that fails.
#pragma once

#include "cuda_runtime.h"

namespace sok_emulator {

cudaError_t NextStatus(bool allocates = false);
// The status of a call, which cudaGetLastError says until it was asked.
cudaError_t Noted(cudaError_t status);
cudaError_t LastError(bool clears);

}  // namespace sok_emulator

// Gives up with the error where this call is to fail.
#define SOK_MAY_FAIL()                                                                            \
  do {                                                                                            \
    if (const cudaError_t fault = sok_emulator::NextStatus(); fault != cudaSuccess) return fault; \
  } while (false)
