// The stream of a DeviceStore, and one call on it.
#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "check.h"
#include "home_device.h"
#include "scratch.h"
#include "sok/device_store.h"
#include "table_state.h"

namespace sok {

struct DeviceStore::Stream {
  HomeDevice home;
  Stream() { SOK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Stream() {
    const HomeDevice::Visit visit(home);
    Ignore(cudaStreamDestroy(stream));
  }

  std::mutex mutex;
  cudaStream_t stream = nullptr;
};

class DeviceStore::Call {
 public:
  explicit Call(const DeviceStore& store)
      : lock_(store.stream_->mutex),
        visit_(store.stream_->home),
        cuda{store.stream_->stream},
        state(*store.table_->state()),
        scratch(cuda),
        stage(cuda) {}

 private:
  const std::lock_guard<std::mutex> lock_;
  const HomeDevice::Visit visit_;

 public:
  const Cuda cuda;
  DeviceTable::State& state;
  StreamScratch scratch;
  StreamScratch stage;  // of rows on their way
};

}  // namespace sok
