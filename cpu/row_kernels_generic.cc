// RowKernels for any processor.
#include "row_kernels_body.h"

namespace sok {

const RowKernels* GenericRowKernels() { return &kKernels; }

}  // namespace sok
