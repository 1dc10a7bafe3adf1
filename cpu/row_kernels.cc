#include "row_kernels.h"

#include "cpu_features.h"

namespace sok {
namespace {

const RowKernels& Choose() {
#if defined(__x86_64__)
  switch (ChosenIsa()) {
    case Isa::kAvx512:
      return *Avx512RowKernels();
    case Isa::kAvx2:
      return *Avx2RowKernels();
    case Isa::kGeneric:
      break;
  }
#endif
  return *GenericRowKernels();
}

}  // namespace

const RowKernels& ChosenRowKernels() {
  static const RowKernels& kernels = Choose();
  return kernels;
}

}  // namespace sok
