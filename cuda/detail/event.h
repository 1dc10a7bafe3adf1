// Places in streams, for others to wait for.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "check.h"
#include "sok/device.h"

namespace sok {

// A place in a stream.
class Event {
 public:
  Event() { SOK_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { Ignore(cudaEventDestroy(event_)); }

  void Record(const Cuda& cuda) { SOK_CUDA(cudaEventRecord(event_, cuda.stream)); }
  void Before(const Cuda& cuda) const { SOK_CUDA(cudaStreamWaitEvent(cuda.stream, event_, 0)); }
  void Wait() const { Ignore(cudaEventSynchronize(event_)); }
  bool HasPassed() const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaSuccess) return true;
    if (status != cudaErrorNotReady) ThrowCuda(status, "asking for an event", __FILE__, __LINE__);
    static_cast<void>(cudaGetLastError());  // else who looks for errors of launches finds this one
    return false;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// One of the current device for as long as somebody holds it; then it serves others. So work on many tables is one place
// that all of them know. Throws CudaError.
std::shared_ptr<Event> TakeEvent();

}  // namespace sok
