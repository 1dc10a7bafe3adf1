// The only way from exceptions to the statuses of the C interface.
#pragma once

#include <cuda_runtime.h>

#include <new>
#include <string>
#include <utility>

#include "c_api.h"
#include "detail/home_device.h"
#include "detail/scratch.h"
#include "sok/device.h"
#include "sok/error.h"

struct SokCudaContext {
  explicit SokCudaContext(void* stream) : cuda{static_cast<cudaStream_t>(stream)}, scratch(cuda) {
    // One handle for another stream in each thread: tables could not tell whose work to wait for.
    if (stream == cudaStreamPerThread) {
      throw sok::InvalidArgument(
          "the per-thread default stream cannot be taken. Make one (cupy.cuda.Stream(non_blocking=True)), or leave "
          "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM unset.");
    }
  }

  sok::HomeDevice home;
  sok::Cuda cuda;
  sok::StreamScratch scratch;
};

namespace sok {

// Of this thread.
std::string* LastError();

inline int Failed(int status, const char* text) {
  *LastError() = text;
  return status;
}

// Runs body; what it throws becomes a status.
template <class Body>
int Guard(const Body& body) {
  try {
    body();
    return SOK_CUDA_OK;
  } catch (const InvalidArgument& e) {
    return Failed(SOK_CUDA_INVALID_ARGUMENT, e.what());
  } catch (const TableFull& e) {
    return Failed(SOK_CUDA_TABLE_FULL, e.what());
  } catch (const OutOfMemory& e) {
    return Failed(SOK_CUDA_OUT_OF_MEMORY, e.what());
  } catch (const FailedPrecondition& e) {
    return Failed(SOK_CUDA_FAILED_PRECONDITION, e.what());
  } catch (const CudaError& e) {
    return Failed(SOK_CUDA_ERROR, e.what());
  } catch (const std::bad_alloc&) {
    return Failed(SOK_CUDA_OUT_OF_MEMORY, "the host has no memory");
  } catch (const std::exception& e) {
    return Failed(SOK_CUDA_INTERNAL, e.what());
  }
}

// The same with the context's scratch, which the calls before have done with: they are earlier on the stream.
template <class Body>
int GuardWith(SokCudaContext* context, const Body& body) {
  return Guard([&] {
    if (context == nullptr) throw InvalidArgument("context must not be null.");
    const HomeDevice::Visit visit(context->home);
    context->scratch.Reset();
    body(context->cuda, &context->scratch);
  });
}

}  // namespace sok
