// Tasks of unequal cost, handed out one by one to the workers of an executor.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "sok/device.h"

namespace sok {

// How many workers ForTasks uses at most: what a body needs for itself comes in so many copies.
inline int64_t MaxWorkers(const Cpu& cpu, int64_t tasks) {
  return std::max<int64_t>(1, std::min<int64_t>(tasks, cpu.executor.num_threads()));
}

// Calls body(worker, task) once for each task in [0, tasks), 0 <= worker < MaxWorkers(cpu, tasks); calls with the same
// worker never overlap. cost: rough CPU cycles of all tasks together. body must not throw.
template <class Body>
void ForTasks(const Cpu& cpu, int64_t tasks, int64_t cost, const Body& body) {
  if (tasks <= 0) return;
  const int64_t workers = MaxWorkers(cpu, tasks);
  std::atomic<int64_t> next{0};
  cpu.executor.For(workers, cost / workers + 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(worker, task);
    }
  });
}

}  // namespace sok
