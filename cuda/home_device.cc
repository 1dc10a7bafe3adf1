#include "detail/home_device.h"

#include "detail/check.h"

namespace sok {
namespace {

// Of CUDA's driver, whose library is found by the runtime: we link to none.
struct Driver {
  int (*push)(void* context);
  int (*pop)(void** context);
  int (*current)(void** context);
};

template <class Function>
void Find(const char* name, Function* function) {
  cudaDriverEntryPointQueryResult found;
  void* address = nullptr;
#if CUDART_VERSION >= 12050
  constexpr unsigned kSince = 12000;
  SOK_CUDA(cudaGetDriverEntryPointByVersion(name, &address, kSince, cudaEnableDefault, &found));
#else
  SOK_CUDA(cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &found));
#endif
  if (found != cudaDriverEntryPointSuccess) throw CudaError(std::string("the driver has no ") + name + ".");
  *function = reinterpret_cast<Function>(address);
}

const Driver& TheDriver() {
  static const Driver driver = [] {
    Driver found{};
    Find("cuCtxPushCurrent", &found.push);
    Find("cuCtxPopCurrent", &found.pop);
    Find("cuCtxGetCurrent", &found.current);
    return found;
  }();
  return driver;
}

void* Current() {
  void* context = nullptr;
  static_cast<void>(TheDriver().current(&context));
  return context;
}

}  // namespace

HomeDevice::HomeDevice() {
  context_ = Current();
  if (context_ != nullptr) return;
  SOK_CUDA(cudaFree(nullptr));  // makes it
  context_ = Current();
}

HomeDevice::Visit::Visit(const HomeDevice& home)
    : has_pushed_(Current() != home.context_ && TheDriver().push(home.context_) == 0) {}

HomeDevice::Visit::~Visit() {
  void* popped = nullptr;
  if (has_pushed_) static_cast<void>(TheDriver().pop(&popped));
}

}  // namespace sok
