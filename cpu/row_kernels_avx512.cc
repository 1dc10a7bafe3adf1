// RowKernels for processors with AVX512.
#include "row_kernels_body.h"

namespace sok {

const RowKernels* Avx512RowKernels() { return &kKernels; }

}  // namespace sok
