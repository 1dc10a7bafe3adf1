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
  throw InvalidArgument(
      "initializer must be 'constant', 'uniform', 'normal', 'truncated_normal' or 'bank'. Received: '" + name + "'.");
}

void FillRow(const Initializer& init, uint64_t key, int64_t dim, float* row) {
  if (init.kind == InitKind::kConstant) {
    for (int64_t j = 0; j < dim; ++j) row[j] = init.a;
    return;
  }
  const float width = init.b - init.a;
  for (int64_t first = 0; first < dim; first += 4) {
    const PhiloxWords words = RowWords(init.seed, key, static_cast<uint32_t>(first / 4));
    float value[4] = {};
    switch (init.kind) {
      case InitKind::kUniform:
        for (int j = 0; j < 4; ++j) value[j] = init.a + UnitUniform(words.word[j]) * width;
        break;
      case InitKind::kNormal:
        for (int j = 0; j < 4; j += 2) NormalPair(words.word[j], words.word[j + 1], &value[j], &value[j + 1]);
        for (int j = 0; j < 4; ++j) value[j] = init.a + init.b * value[j];
        break;
      case InitKind::kTruncatedNormal:
        for (int j = 0; j < 4; ++j) value[j] = init.a + init.b * TruncatedNormal(words.word[j]);
        break;
      case InitKind::kBank:
        for (int j = 0; j < 4 && first + j < dim; ++j) {
          const uint64_t bank_row = (uint64_t{words.word[j]} * static_cast<uint64_t>(init.bank_rows)) >> 32;
          value[j] = init.bank[bank_row * static_cast<uint64_t>(dim) + static_cast<uint64_t>(first + j)];
        }
        break;
      case InitKind::kConstant:
        break;
    }
    for (int64_t j = 0; j < 4 && first + j < dim; ++j) row[first + j] = value[j];
  }
}

void FillRows(const Initializer& init, const uint64_t* keys, int64_t count, int64_t dim, float* const* rows) {
  if (init.kind == InitKind::kUniform) {
    ChosenRowKernels().fill_uniform(init.seed, init.a, init.b - init.a, keys, count, dim, rows);
    return;
  }
  for (int64_t i = 0; i < count; ++i) FillRow(init, keys[i], dim, rows[i]);
}

}  // namespace sok
