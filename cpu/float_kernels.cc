#include "float_kernels.h"

#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace sok {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports does not know it in every compiler.
bool HasF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

const FloatKernels& Choose() {
#if defined(__x86_64__)
  // Wider vectors would not be faster: these loops wait for memory.
  if (ChosenIsa() != Isa::kGeneric && HasF16c()) return *Avx2FloatKernels();
#endif
  return *GenericFloatKernels();
}

}  // namespace

const FloatKernels& ChosenFloatKernels() {
  static const FloatKernels& kernels = Choose();
  return kernels;
}

}  // namespace sok
