#include "sok/initializer.h"

#include "detail/launch.h"

namespace sok {
namespace {

// A thread makes four neighbouring elements: what one call of Philox gives.
__global__ void FillRowsKernel(InitializerView init, const uint64_t* keys,  // [count]
                               int64_t count, int64_t dim,
                               float* rows) {  // [count, dim]
  const int64_t blocks = (dim + 3) / 4;
  for (int64_t i = GlobalThread(); i < count * blocks; i += GlobalThreads()) {
    const int64_t row = i / blocks, block = i - row * blocks;
    float value[4];
    FreshElements(init, keys[row], dim, block, value);
    float* out = rows + row * dim + 4 * block;
    for (int j = 0; j < 4; ++j)
      if (4 * block + j < dim) out[j] = value[j];
  }
}

}  // namespace

void FillRows(const Cuda& cuda, const InitializerView& init, const uint64_t* keys, int64_t count, int64_t dim,
              float* rows) {
  const int64_t items = count * ((dim + 3) / 4);
  Launch(FillRowsKernel, GridFor(items, kThreads), kThreads, 0, cuda, init, keys, count, dim, rows);
}

}  // namespace sok
