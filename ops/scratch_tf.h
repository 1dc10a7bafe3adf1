// TensorFlow's thread pool and a pool of scratch memory, as the kernels want them.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "sok/device.h"
#include "sok/scratch.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace sok {

// Loops over TensorFlow's intra-op threads.
class TfExecutor final : public Executor {
 public:
  explicit TfExecutor(tensorflow::OpKernelContext* ctx) : workers_(ctx->device()->tensorflow_cpu_worker_threads()) {}

  int num_threads() const override { return workers_->num_threads; }

 private:
  void Run(int64_t n, int64_t cost, const std::function<void(int64_t, int64_t)>& body) const override {
    if (n <= 0) return;
    // Below some ten microseconds a hand-over costs more than it gains.
    constexpr int64_t kMinCycles = 30000;
    if (n == 1 || workers_->num_threads == 1 || n * cost < kMinCycles) return body(0, n);
    workers_->workers->ParallelFor(n, tsl::thread::ThreadPool::SchedulingParams::Adaptive(cost), body);
  }
  const tensorflow::DeviceBase::CpuWorkerThreads* workers_;
};

// Lends scratch memory to one call; the memory goes back for the next. A step of steady size allocates nothing.
class ScratchLease {
 public:
  ScratchLease();
  ~ScratchLease();
  Scratch* get() const { return scratch_.get(); }

 private:
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace sok
