// What nvcc's objects ask of CUDA's runtime beyond the calls that the emulator has (tests/cuda/emulator): kernels are registered and
// started. None runs. Each launch is looked at: its kernel, its geometry, its stream, and the device memory its arguments point to.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "launches.h"

namespace sok_emulator {

// The emulator's, whose header is not CUDA's.
cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work);
cudaError_t NextStatus(bool allocates);
void CheckArgument(uint64_t word, const char* kernel, int number);
[[noreturn]] void EndWith(const char* format, ...);

}  // namespace sok_emulator

namespace {

std::map<const void*, std::string>& Kernels() {
  static auto* kernels = new std::map<const void*, std::string>;
  return *kernels;
}
std::atomic<int64_t> ours{0}, of_cub{0};

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> pushed;

const char* NameOf(const void* kernel) {
  const auto found = Kernels().find(kernel);
  if (found == Kernels().end()) sok_emulator::EndWith("a launch of %p, which is no kernel", kernel);
  return found->second.c_str();
}

// Of each parameter of a kernel, by the types in its name, whether it is a pointer.
std::vector<bool> ArePointers(const std::string& name) {
  size_t begin = name.size() - 1;
  for (int depth = 0; begin > 0; --begin) {
    depth += name[begin] == ')' ? 1 : name[begin] == '(' ? -1 : 0;
    if (depth == 0) break;
  }
  std::vector<bool> found;
  int depth = 0;
  for (size_t at = begin + 1; at < name.size(); ++at) {
    const char c = name[at];
    if (depth == 0 && (c == ',' || c == ')')) found.push_back(name[at - 1] == '*');
    depth += c == '(' || c == '<' || c == '{' ? 1 : c == ')' || c == '>' || c == '}' ? -1 : 0;
  }
  return found;
}

cudaError_t Start(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.x > 0x7FFFFFFFu || grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535) {
    sok_emulator::EndWith("%s: a grid of %u, %u, %u blocks", kernel, grid.x, grid.y, grid.z);
  }
  if (threads == 0 || threads > 1024)
    sok_emulator::EndWith("%s: blocks of %llu threads", kernel, static_cast<unsigned long long>(threads));
  if (shared_bytes > 49152)
    sok_emulator::EndWith("%s: %zu bytes of shared memory, for which nobody asked", kernel, shared_bytes);
  return sok_emulator::Enqueue(stream, [] {});
}

}  // namespace

Launches LaunchesSoFar() { return {ours, of_cub}; }

extern "C" {

void** __cudaRegisterFatBinary(void* code) { return static_cast<void**>(code); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  int status = 0;
  char* readable = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  Kernels()[host] = status == 0 ? readable : name;
  std::free(readable);
}

// Of our own `Launch`, behind whose arguments there is a null.
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  ++ours;
  const char* name = NameOf(kernel);
  const std::vector<bool> are_pointers = ArePointers(name);
  for (size_t i = 0; i < are_pointers.size(); ++i) {
    if (arguments[i] == nullptr) sok_emulator::EndWith("%s: %zu arguments", name, i);
    if (are_pointers[i]) {
      sok_emulator::CheckArgument(*static_cast<const uint64_t*>(arguments[i]), name, static_cast<int>(i) + 1);
    }
  }
  return Start(name, grid, block, shared_bytes, stream);
}

// Those of CUB.
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  pushed.push_back({grid, block, shared_bytes, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (pushed.empty()) sok_emulator::EndWith("a kernel is started without a configuration");
  *grid = pushed.back().grid;
  *block = pushed.back().block;
  *shared_bytes = pushed.back().shared_bytes;
  *static_cast<cudaStream_t*>(stream) = pushed.back().stream;
  pushed.pop_back();
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* kernel) {
  *handle = static_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared_bytes,
                               cudaStream_t stream) {
  ++of_cub;
  return Start(NameOf(kernel), grid, block, shared_bytes, stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  NameOf(kernel);
  if (const cudaError_t fault = sok_emulator::NextStatus(false); fault != cudaSuccess) return fault;
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->binaryVersion = attributes->ptxVersion = 80;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel, int, size_t,
                                                                   unsigned) {
  NameOf(kernel);
  if (const cudaError_t fault = sok_emulator::NextStatus(false); fault != cudaSuccess) return fault;
  *blocks = 2;
  return cudaSuccess;
}

}  // extern "C"
