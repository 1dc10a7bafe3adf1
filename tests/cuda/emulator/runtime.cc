// The host's side of the emulator: memory, streams, events.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Point {  // a place in a stream
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  Clock::time_point time;

  void Reach() {
    std::lock_guard<std::mutex> lock(mutex);
    reached = true;
    time = Clock::now();
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return reached; });
  }
  bool IsReached() {
    std::lock_guard<std::mutex> lock(mutex);
    return reached;
  }
};

struct Memory {
  std::mutex mutex;
  std::map<void*, size_t> device, pinned;
  size_t in_use = 0, limit = size_t{16} << 30;
};
Memory& memory() {
  static auto* m = new Memory();
  return *m;
}

bool IsPinned(const void* p) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto after = memory().pinned.upper_bound(const_cast<void*>(p));
  if (after == memory().pinned.begin()) return false;
  --after;
  return static_cast<const char*>(p) < static_cast<const char*>(after->first) + after->second;
}

bool IsDevice(const void* p) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto after = memory().device.upper_bound(const_cast<void*>(p));
  if (after == memory().device.begin()) return false;
  --after;
  return static_cast<const char*>(p) < static_cast<const char*>(after->first) + after->second;
}

}  // namespace

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Point> last;
  std::shared_ptr<Point> Last() {
    std::lock_guard<std::mutex> lock(mutex);
    return last;
  }
};

struct CUstream_st {
  CUstream_st() : worker([this] { Work(); }) {}
  ~CUstream_st() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop = true;
    }
    changed.notify_all();
    worker.join();
  }

  void Add(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      queue.push_back(std::move(work));
    }
    changed.notify_all();
  }

  void Work() {
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return stop || !queue.empty(); });
        if (queue.empty()) return;
        next = std::move(queue.front());
        queue.pop_front();
      }
      next();
    }
  }

  void Synchronize() {
    auto point = std::make_shared<Point>();
    Add([point] { point->Reach(); });
    point->Wait();
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool stop = false;
  std::thread worker;
};

namespace {

struct Streams {
  std::mutex mutex;
  std::set<CUstream_st*> all;
};
Streams& streams() {
  static auto* s = new Streams();
  return *s;
}

CUstream_st* Of(cudaStream_t stream) {
  if (stream != nullptr) return stream;
  static CUstream_st* zero = [] {
    auto* s = new CUstream_st();
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.insert(s);
    return s;
  }();
  return zero;
}

}  // namespace

namespace sok_emulator {

void Enqueue(cudaStream_t stream, std::function<void()> work) { Of(stream)->Add(std::move(work)); }

void SetMemoryLimit(size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().limit = bytes;
}
size_t MemoryInUse() {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().in_use;
}

}  // namespace sok_emulator

const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidValue:
      break;
  }
  return "cudaErrorInvalidValue";
}
const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(status);
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 2, cudaSuccess; }

cudaError_t cudaDeviceSynchronize() {
  std::vector<CUstream_st*> all;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    all.assign(streams().all.begin(), streams().all.end());
  }
  for (CUstream_st* stream : all) stream->Synchronize();
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  *total_bytes = memory().limit;
  *free_bytes = memory().limit > memory().in_use ? memory().limit - memory().in_use : 0;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  std::lock_guard<std::mutex> lock(memory().mutex);
  if (bytes > memory().limit || memory().in_use > memory().limit - bytes) return cudaErrorMemoryAllocation;
  *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*p == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*p, 0xA5, bytes);  // fresh memory holds anything
  memory().device[*p] = bytes;
  memory().in_use += bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* p) {
  if (p == nullptr) return cudaSuccess;
  cudaDeviceSynchronize();
  std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().device.find(p);
  if (found == memory().device.end()) return cudaErrorInvalidValue;
  memory().in_use -= found->second;
  memory().device.erase(found);
  std::free(p);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }

cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  if (p == nullptr) return cudaSuccess;
  sok_emulator::Enqueue(stream, [p] {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const auto found = memory().device.find(p);
    if (found == memory().device.end()) std::abort();
    memory().in_use -= found->second;
    memory().device.erase(found);
    std::free(p);
  });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  *p = std::aligned_alloc(256, (bytes + 256) / 256 * 256);
  if (*p == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*p, 0xA5, bytes);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().pinned[*p] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* p) {
  if (p == nullptr) return cudaSuccess;
  cudaDeviceSynchronize();
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().pinned.erase(p);
  std::free(p);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!IsPinned(from) && !IsDevice(from)) {
    auto copy =
        std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    sok_emulator::Enqueue(stream, [=] { std::memcpy(to, copy->data(), bytes); });
  } else {
    sok_emulator::Enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  }
  if (!IsPinned(to) && !IsDevice(to)) return cudaStreamSynchronize(stream);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  sok_emulator::Enqueue(stream, [=] { std::memset(p, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st();
  std::lock_guard<std::mutex> lock(streams().mutex);
  streams().all.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(stream);
  }
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Of(stream)->Synchronize();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto point = event->Last();
  if (point != nullptr) sok_emulator::Enqueue(stream, [point] { point->Wait(); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = new CUevent_st(), cudaSuccess; }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto point = std::make_shared<Point>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->last = point;
  }
  sok_emulator::Enqueue(stream, [point] { point->Reach(); });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const auto point = event->Last();
  if (point != nullptr) point->Wait();
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto point = event->Last();
  return point == nullptr || point->IsReached() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const auto from = start->Last(), to = end->Last();
  if (from == nullptr || to == nullptr) return cudaErrorInvalidValue;
  if (!from->IsReached() || !to->IsReached()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
  return cudaSuccess;
}
