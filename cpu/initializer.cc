#include "sok/initializer.h"

#include <algorithm>
#include <vector>

#include "row_kernels.h"
#include "sok/error.h"

namespace sok {

InitKind ParseInitKind(const std::string& name) {
  if (name == "constant") return InitKind::kConstant;
  if (name == "uniform") return InitKind::kUniform;
  if (name == "normal") return InitKind::kNormal;
  if (name == "truncated_normal") return InitKind::kTruncatedNormal;
  if (name == "bank") return InitKind::kBank;
  if (name.rfind(kOwnKind, 0) == 0) return InitKind::kOwn;
  throw InvalidArgument(
      "initializer must be 'constant', 'uniform', 'normal', 'truncated_normal', 'bank' or 'own:' and a name. Received: "
      "'" +
      name + "'.");
}

namespace {

// A function of one's own makes rows from their first element on.
void FillByFunction(const InitializerView& init, const uint64_t* keys, int64_t count, int64_t dim, float* const* rows) {
  if (init.first_column == 0) {
    const SokInitializerBlock block = {sizeof(SokInitializerBlock), count, dim, keys, init.seed, rows};
    return init.function(&block);
  }
  InitializerView whole = init;
  whole.first_column = 0;
  std::vector<float> row(static_cast<size_t>(init.first_column + dim));
  for (int64_t i = 0; i < count; ++i) {
    FillRow(whole, keys[i], init.first_column + dim, row.data());
    std::copy_n(row.data() + init.first_column, dim, rows[i]);
  }
}

}  // namespace

void FillRow(const InitializerView& init, uint64_t key, int64_t dim, float* row) {
  for (int64_t first = 0; first < dim; first += 4) {
    float value[4];
    FreshElements(init, key, dim, first / 4, value);
    for (int64_t j = 0; j < 4 && first + j < dim; ++j) row[first + j] = value[j];
  }
  if (init.function != nullptr) FillByFunction(init, &key, 1, dim, &row);
}

void FillRows(const Initializer& init, const uint64_t* keys, int64_t count, int64_t dim, float* const* rows) {
  if ((init.kind == InitKind::kUniform || init.kind == InitKind::kOwn) && init.first_column % 4 == 0) {
    ChosenRowKernels().fill_uniform(init.seed, init.a, init.b - init.a, keys, count, dim, init.first_column / 4, rows);
    if (init.function != nullptr) FillByFunction(ViewOf(init), keys, count, dim, rows);
    return;
  }
  for (int64_t i = 0; i < count; ++i) FillRow(init, keys[i], dim, rows[i]);
}

}  // namespace sok
