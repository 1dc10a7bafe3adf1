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

// Runs body; what it throws becomes a status.
template <class Body>
int Guard(const Body& body) {
  try {
    body();
    return SOK_CUDA_OK;
  } catch (const InvalidArgument& e) {
    *LastError() = e.what();
    return SOK_CUDA_INVALID_ARGUMENT;
  } catch (const TableFull& e) {
    *LastError() = e.what();
    return SOK_CUDA_TABLE_FULL;
  } catch (const OutOfMemory& e) {
    *LastError() = e.what();
    return SOK_CUDA_OUT_OF_MEMORY;
  } catch (const FailedPrecondition& e) {
    *LastError() = e.what();
    return SOK_CUDA_FAILED_PRECONDITION;
  } catch (const CudaError& e) {
    *LastError() = e.what();
    return SOK_CUDA_ERROR;
  } catch (const std::bad_alloc&) {
    *LastError() = "the host has no memory";
    return SOK_CUDA_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    *LastError() = e.what();
    return SOK_CUDA_INTERNAL;
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
