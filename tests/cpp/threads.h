// Loops over plain threads, so that kernels are tested as TensorFlow's pool runs them.
#pragma once

#include <algorithm>
#include <functional>
#include <thread>
#include <vector>

#include "own_threads.h"
#include "sok/device.h"

class ThreadExecutor final : public sok::Executor {
 public:
  explicit ThreadExecutor(int num_threads) : num_threads_(num_threads) {}

  int num_threads() const override { return num_threads_; }

 private:
  // Cuts even small loops, or the tests would not see what threads do to them.
  void Run(int64_t n, int64_t /*cost*/, const std::function<void(int64_t, int64_t)>& body) const override {
    const int64_t parts = std::min<int64_t>(num_threads_, n);
    OwnThreads::Run(static_cast<int>(parts), [&](int p) { body(n * p / parts, n * (p + 1) / parts); });
  }
  const int num_threads_;
};

// Runs body(0), ..., body(count - 1) in threads of their own.
inline void RunTogether(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) threads.emplace_back(body, t);
  for (std::thread& thread : threads) thread.join();
}
