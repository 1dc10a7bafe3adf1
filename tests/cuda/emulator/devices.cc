// The devices of the emulator, and their contexts.
#include "devices.h"

#include <atomic>
#include <string>
#include <vector>

#include "cuda_runtime.h"

using sok_emulator::kDevices;
using sok_emulator::Touch;

namespace {

std::atomic<int64_t> calls_on[kDevices];
char contexts[kDevices];  // their addresses are contexts

// The device of a thread: that of the context it has pushed last, else the one it has set. Until something is done there, the
// thread has no context.
struct Thread {
  int set = 0;
  bool has_context = false;
  std::vector<int> pushed;

  int device() const { return pushed.empty() ? set : pushed.back(); }
};
Thread& thread() {
  thread_local Thread current;
  return current;
}

int PushContext(void* context) {
  thread().pushed.push_back(static_cast<int>(static_cast<char*>(context) - contexts));
  return 0;
}
int PopContext(void** context) {
  if (thread().pushed.empty()) return 1;
  *context = &contexts[thread().pushed.back()];
  thread().pushed.pop_back();
  return 0;
}
int CurrentContext(void** context) {
  const bool has_one = thread().has_context || !thread().pushed.empty();
  *context = has_one ? &contexts[thread().device()] : nullptr;
  return 0;
}

}  // namespace

namespace sok_emulator {

int Touch() {
  if (thread().pushed.empty()) thread().has_context = true;
  ++calls_on[thread().device()];
  return thread().device();
}

int64_t CallsOn(int device) { return calls_on[device]; }

}  // namespace sok_emulator

cudaError_t cudaGetDevice(int* device) { return *device = thread().device(), cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  (thread().pushed.empty() ? thread().set : thread().pushed.back()) = device;
  Touch();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) { return *count = kDevices, cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const std::string asked = name;
  *function = asked == "cuCtxPushCurrent"  ? reinterpret_cast<void*>(PushContext)
              : asked == "cuCtxPopCurrent" ? reinterpret_cast<void*>(PopContext)
              : asked == "cuCtxGetCurrent" ? reinterpret_cast<void*>(CurrentContext)
                                           : nullptr;
  *found = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 2, cudaSuccess; }
