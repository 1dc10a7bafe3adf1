// The host's side of the emulator: memory, streams, events.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"
#include "devices.h"
#include "faults.h"
#include "memory.h"

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

// What cudaMallocAsync has given and nobody has freed.
struct PoolMemory {
  std::mutex mutex;
  std::set<void*> given;

  void Note(void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    given.insert(p);
  }
  bool Forget(void* p) {
    std::lock_guard<std::mutex> lock(mutex);
    return given.erase(p) != 0;
  }
};
PoolMemory& pool_memory() {
  static PoolMemory* memory = new PoolMemory;  // outlives those who free at the end of the program
  return *memory;
}

}  // namespace

using sok_emulator::kDevices;
using sok_emulator::Touch;

struct CUevent_st {
  const int device = Touch();
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

  const int device = Touch();
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool stop = false;
  std::thread worker;
};

namespace {

struct Counters {
  std::atomic<int64_t> launches{0}, copies{0}, sets{0}, to_device{0}, to_host{0}, bytes{0}, pageable{0}, marks{0},
      waits{0}, host_waits{0};
};
Counters& counters() {
  static Counters all;
  return all;
}

struct Streams {
  std::mutex mutex;
  std::set<CUstream_st*> all;
};
Streams& streams() {
  static auto* s = new Streams();
  return *s;
}

// The stream that each thread has, on the device where it first used it.
struct OfThread {
  OfThread() { cudaStreamCreateWithFlags(&stream, 0); }
  ~OfThread() { cudaStreamDestroy(stream); }
  cudaStream_t stream = nullptr;
};

CUstream_st* Of(cudaStream_t stream) {
  if (stream == cudaStreamPerThread) {
    thread_local const OfThread own;
    return own.stream;
  }
  if (stream != nullptr && stream != cudaStreamLegacy) return stream;
  static CUstream_st* zero[kDevices] = {};
  const int device = Touch();
  std::lock_guard<std::mutex> lock(streams().mutex);
  if (zero[device] == nullptr) streams().all.insert(zero[device] = new CUstream_st());
  return zero[device];
}

// Waits for the work of a device, or of all (-1).
void WaitFor(int device) {
  ++counters().host_waits;
  std::vector<CUstream_st*> all;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    all.assign(streams().all.begin(), streams().all.end());
  }
  for (CUstream_st* stream : all)
    if (device < 0 || stream->device == device) stream->Synchronize();
}

using sok_emulator::Kind;

// One side of a copy is where the direction says.
void CheckSide(const char* name, const void* p, Kind found, cudaMemcpyKind kind, bool on_device) {
  if (kind == cudaMemcpyDefault || (found == Kind::kDevice) == on_device) return;
  if (found == Kind::kHost && sok_emulator::IsHostMemoryDevice()) return;
  static const char* const kDirections[] = {"HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice"};
  sok_emulator::EndWith("cudaMemcpyAsync(cudaMemcpy%s): `%s` = %p is memory of the %s", kDirections[kind], name, p,
                        found == Kind::kDevice ? "device" : "host");
}

}  // namespace

namespace sok_emulator {

cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work) {
  SOK_MAY_FAIL();
  ++counters().launches;
  CUstream_st* to = Of(stream);
  if (to->device != Touch()) {
    EndWith("a kernel is started on a stream of device %d while device %d is current", to->device, Touch());
  }
  to->Add(std::move(work));
  return cudaSuccess;
}

Counts CountsSoFar() {
  const Counters& c = counters();
  return {c.launches, c.copies, c.sets, c.to_device, c.to_host, c.bytes, c.pageable, c.marks, c.waits, c.host_waits};
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
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorInvalidValue:
      break;
  }
  return "cudaErrorInvalidValue";
}
const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(status);
}
cudaError_t cudaGetLastError() { return sok_emulator::LastError(true); }
cudaError_t cudaPeekAtLastError() { return sok_emulator::LastError(false); }
// What waits does so where it fails, too: what it waits for writes into memory of the caller.
cudaError_t cudaDeviceSynchronize() {
  WaitFor(Touch());
  return sok_emulator::NextStatus();
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  SOK_MAY_FAIL();
  size_t in_use;
  sok_emulator::MemoryInfo(&in_use, total_bytes);
  *free_bytes = *total_bytes > in_use ? *total_bytes - in_use : 0;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
  const int device = Touch();
  *p = nullptr;
  if (const cudaError_t fault = sok_emulator::NextStatus(true); fault != cudaSuccess) return fault;
  return bytes == 0 ? cudaSuccess : sok_emulator::Noted(sok_emulator::AllocateDevice(p, bytes, device));
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  *attributes = sok_emulator::AttributesOf(p, Touch());
  return cudaSuccess;
}

cudaError_t cudaFree(void* p) {
  Touch();
  SOK_MAY_FAIL();
  if (p == nullptr) return cudaSuccess;
  // As on a device: of memory of a pool it is the caller who knows that nobody uses it any more.
  if (!pool_memory().Forget(p)) WaitFor(-1);
  return sok_emulator::FreeDevice(p) ? cudaSuccess : sok_emulator::Noted(cudaErrorInvalidValue);
}

cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) {
  const cudaError_t status = cudaMalloc(p, bytes);
  if (status == cudaSuccess && *p != nullptr) pool_memory().Note(*p);
  return status;
}

cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  Touch();
  SOK_MAY_FAIL();
  if (p == nullptr) return cudaSuccess;
  pool_memory().Forget(p);
  sok_emulator::NoteGoing(p);
  Of(stream)->Add([p] {
    if (!sok_emulator::FreeDevice(p)) sok_emulator::EndWith("cudaFreeAsync: no device memory begins at %p", p);
  });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  Touch();
  if (const cudaError_t fault = sok_emulator::NextStatus(true); fault != cudaSuccess) return fault;
  *p = std::aligned_alloc(256, (bytes + 256) / 256 * 256);
  if (*p == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*p, 0xA5, bytes);
  sok_emulator::Pin(*p, bytes);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* p) {
  if (p == nullptr) return cudaSuccess;
  cudaHostUnregister(p);
  std::free(p);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  sok_emulator::Pin(p, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* p) {
  Touch();
  WaitFor(-1);
  sok_emulator::Unpin(p);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  Touch();
  SOK_MAY_FAIL();
  if (bytes == 0) return cudaSuccess;
  ++counters().copies;
  const Kind to_kind = sok_emulator::KindOf(to, bytes, "cudaMemcpyAsync to the device or from it");
  const Kind from_kind = sok_emulator::KindOf(from, bytes, "cudaMemcpyAsync to the device or from it");
  CheckSide("to", to, to_kind, kind, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
  CheckSide("from", from, from_kind, kind, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
  if (to_kind != from_kind) {
    const bool is_upload = to_kind == Kind::kDevice;
    ++(is_upload ? counters().to_device : counters().to_host);
    counters().bytes += static_cast<int64_t>(bytes);
    if ((is_upload ? from_kind : to_kind) == Kind::kHost) ++counters().pageable;
  }
  void* target = sok_emulator::OnDevice(to);
  // NumPy's arrays stand for the device's (HostMemoryIsDevice): kernels before this copy still write into them.
  const bool is_devices =
      sok_emulator::IsHostMemoryDevice() && (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
  if (from_kind == Kind::kHost && !is_devices) {
    auto copy =
        std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    Of(stream)->Add([=] { std::memcpy(target, copy->data(), bytes); });
  } else {
    const void* source = sok_emulator::OnDevice(from);
    Of(stream)->Add([=] { std::memcpy(target, source, bytes); });
  }
  if (to_kind == Kind::kHost) Of(stream)->Synchronize();
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t status = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return status != cudaSuccess ? status : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  Touch();
  SOK_MAY_FAIL();
  ++counters().sets;
  if (bytes == 0) return cudaSuccess;
  if (sok_emulator::KindOf(p, bytes, "cudaMemsetAsync") == Kind::kHost && !sok_emulator::IsHostMemoryDevice()) {
    sok_emulator::EndWith("cudaMemsetAsync: %p is memory of the host that is not pinned", p);
  }
  void* target = sok_emulator::OnDevice(p);
  Of(stream)->Add([=] { std::memset(target, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  SOK_MAY_FAIL();
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
  return sok_emulator::NextStatus();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++counters().host_waits;
  Of(stream)->Synchronize();
  return sok_emulator::NextStatus();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument) {
  Touch();
  Of(stream)->Add([=] { function(argument); });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  SOK_MAY_FAIL();
  ++counters().waits;
  const auto point = event->Last();
  if (point != nullptr) Of(stream)->Add([point] { point->Wait(); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  SOK_MAY_FAIL();
  return *event = new CUevent_st(), cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return sok_emulator::NextStatus();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  SOK_MAY_FAIL();
  ++counters().marks;
  if (event->device != Of(stream)->device) {
    sok_emulator::EndWith("an event of device %d is recorded on a stream of device %d", event->device,
                          Of(stream)->device);
  }
  auto point = std::make_shared<Point>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->last = point;
  }
  Of(stream)->Add([point] { point->Reach(); });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++counters().host_waits;
  const auto point = event->Last();
  if (point != nullptr) point->Wait();
  return sok_emulator::NextStatus();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  SOK_MAY_FAIL();
  const auto point = event->Last();
  return point == nullptr || point->IsReached() ? cudaSuccess : sok_emulator::Noted(cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const auto from = start->Last(), to = end->Last();
  if (from == nullptr || to == nullptr) return cudaErrorInvalidValue;
  if (!from->IsReached() || !to->IsReached()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
  return cudaSuccess;
}
