// What a promise runs on: the device tag of every kernel.
#pragma once

#include <cstdint>
#include <functional>

// As CUDA's headers declare it, so that a promise can be read, and called, without them.
struct CUstream_st;
typedef struct CUstream_st* cudaStream_t;

namespace sok {

// Splits a loop over threads. Implemented by ops/ on TensorFlow's pool, and by tests on plain threads.
class Executor {
 public:
  virtual ~Executor() = default;

  // Calls body(begin, end) over disjoint ranges that cover [0, n), possibly at the same time; returns when all are done.
  // cost is a rough number of CPU cycles per item. body must not throw.
  template <class Body>
  void For(int64_t n, int64_t cost, const Body& body) const {
    Run(n, cost, std::cref(body));  // a reference, so that no loop fails for want of memory before it begins
  }

  virtual int num_threads() const = 0;

 private:
  virtual void Run(int64_t n, int64_t cost, const std::function<void(int64_t, int64_t)>& body) const = 0;
};

// Runs on the calling thread.
class SerialExecutor final : public Executor {
 public:
  int num_threads() const override { return 1; }

 private:
  void Run(int64_t n, int64_t /*cost*/, const std::function<void(int64_t, int64_t)>& body) const override {
    if (n > 0) body(0, n);
  }
};

struct Cpu {
  const Executor& executor;
};

// The current CUDA device. Work is put on the stream, in order; a call returns before it is done, unless its name ends in
// ToHost. Pointers of such a call are device memory, and must live until the stream has come past it.
struct Cuda {
  cudaStream_t stream = nullptr;
};

}  // namespace sok
