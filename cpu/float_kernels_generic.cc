// FloatKernels for any processor.
#include "float_kernels_body.h"

namespace sok {

const FloatKernels* GenericFloatKernels() { return &kKernels; }

}  // namespace sok
