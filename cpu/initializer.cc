#include "sok/initializer.h"

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

void FillRow(const InitializerView& init, uint64_t key, int64_t dim, float* row) {
  for (int64_t first = 0; first < dim; first += 4) {
    float value[4];
    FreshElements(init, key, dim, first / 4, value);
    for (int64_t j = 0; j < 4 && first + j < dim; ++j) row[first + j] = value[j];
  }
  if (init.function != nullptr) {
    const SokInitializerBlock block = {sizeof(SokInitializerBlock), 1, dim, &key, init.seed, &row};
    init.function(&block);
  }
}

void FillRows(const Initializer& init, const uint64_t* keys, int64_t count, int64_t dim, float* const* rows) {
  if (init.kind == InitKind::kUniform || init.kind == InitKind::kOwn) {
    ChosenRowKernels().fill_uniform(init.seed, init.a, init.b - init.a, keys, count, dim, rows);
    if (init.function == nullptr) return;
    const SokInitializerBlock block = {sizeof(SokInitializerBlock), count, dim, keys, init.seed, rows};
    return init.function(&block);
  }
  for (int64_t i = 0; i < count; ++i) FillRow(init, keys[i], dim, rows[i]);
}

}  // namespace sok
