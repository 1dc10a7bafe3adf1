// The devices of the emulator, and their contexts.
#include "devices.h"

#include <atomic>
#include <map>
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

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
#if defined(SOK_TRACED)  // CUB asks for more of an A100
  static const std::map<int, int> kOfA100 = {{2, 1024},  {5, 2147483647}, {8, 49152}, {10, 32},    {16, 108},
                                             {39, 2048}, {75, 8},         {76, 0},    {97, 166912}};
  const auto found = kOfA100.find(attribute);
  if (found == kOfA100.end()) return cudaErrorInvalidValue;
  *value = found->second;
#else
  static_cast<void>(attribute);
  *value = 2;
#endif
  return cudaSuccess;
}
