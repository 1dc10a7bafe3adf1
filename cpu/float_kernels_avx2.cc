// FloatKernels for processors with AVX2 and F16C.
#include "float_kernels_body.h"

namespace sok {

const FloatKernels* Avx2FloatKernels() { return &kKernels; }

}  // namespace sok
