// RowKernels for processors with AVX2.
#include "row_kernels_body.h"

namespace sok {

const RowKernels* Avx2RowKernels() { return &kKernels; }

}  // namespace sok
