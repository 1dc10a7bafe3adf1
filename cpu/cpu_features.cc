#include "cpu_features.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace sok {
namespace {

Isa BestIsa() {
#if defined(__x86_64__)
  // Conversions to 16 bit, which __builtin_cpu_supports does not know in every compiler.
  unsigned eax, ebx, ecx = 0, edx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_F16C) == 0) return Isa::kGeneric;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

Isa Choose() {
  const Isa best = BestIsa();
  const char* wish = std::getenv("SOK_ISA");
  if (wish == nullptr) return best;
  const Isa wanted = std::strcmp(wish, "generic") == 0 ? Isa::kGeneric
                     : std::strcmp(wish, "avx2") == 0  ? Isa::kAvx2
                                                       : Isa::kAvx512;
  return wanted < best ? wanted : best;
}

}  // namespace

Isa ChosenIsa() {
  static const Isa isa = Choose();
  return isa;
}

}  // namespace sok
