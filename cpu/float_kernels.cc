#include "float_kernels.h"

#include "cpu_features.h"

namespace sok {
namespace {

const FloatKernels& Choose() {
#if defined(__x86_64__)
  // Wider vectors would not be faster: these loops wait for memory.
  if (ChosenIsa() != Isa::kGeneric && __builtin_cpu_supports("f16c")) return *Avx2FloatKernels();
#endif
  return *GenericFloatKernels();
}

}  // namespace

const FloatKernels& ChosenFloatKernels() {
  static const FloatKernels& kernels = Choose();
  return kernels;
}

}  // namespace sok
