// The bodies of RowKernels. Included by one file per instruction set, each compiled with its own flags, so nothing here and in
// the files below may have external linkage: the linker would keep one copy for all.
#include "row_fill_body.h"
#include "row_floats_body.h"
#include "row_kernels.h"
#include "row_lookup_body.h"
#include "row_sums_body.h"
#include "row_update_body.h"

namespace sok {
namespace {

constexpr RowKernels kKernels = {Gather,      Fence,     Pool,        PoolKeys,   AllBelow,    NeverFalls,
                                 Narrow,      Widen,     SumSegments, Scatter,    UpdateRows,  Accumulate,
                                 Scale,       SumBySlot, AddRows,     Update,     ReadDecayed, Settle,
                                 FillUniform, ToHalf,    FromHalf,    ToBFloat16, FromBFloat16};

}  // namespace
}  // namespace sok
