// What a fresh row holds: a pure function of (seed, key), so it is the same at any world size, in any order of arrival.
// The formulas are stated in docs/design/initial_values.md.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sok/device.h"
#include "sok/exact_math.h"
#include "sok/own_initializer.h"
#include "sok/philox.h"

namespace sok {

enum class InitKind { kConstant, kUniform, kNormal, kTruncatedNormal, kBank, kOwn };

constexpr std::string_view kOwnKind = "own:";  // the name of an initializer of one's own follows

struct Initializer {
  InitKind kind = InitKind::kUniform;
  float a = -0.05f;  // constant: value; uniform: minval; normal: mean
  float b = 0.05f;   // uniform: maxval; normal: stddev
  uint64_t seed = 0;
  std::vector<float> bank;  // [bank_rows, dim], for kBank
  int64_t bank_rows = 0;
  SokInitializerFunction function = nullptr;  // for kOwn, of uniforms with a = 0, b = 1
  int64_t first_column = 0;                   // rows are these and later elements of longer ones
};

// Uniform in [0, 1) with 24 random bits.
SOK_HOST_DEVICE float UnitUniform(uint32_t word) { return static_cast<float>(word >> 8) * 5.9604644775390625e-8f; }

// Standard normal pair by Box and Muller (1958). The radius draws from (0, 1], so log never sees zero.
SOK_HOST_DEVICE void NormalPair(uint32_t word0, uint32_t word1, float* z0, float* z1) {
  const float u = (static_cast<float>(word0 >> 8) + 1.0f) * 5.9604644775390625e-8f;
  const float radius = sqrtf(-2.0f * static_cast<float>(ExactLog(static_cast<double>(u))));
  const float angle = 6.283185307179586f * UnitUniform(word1);
  double sine, cosine;
  ExactSinCos(static_cast<double>(angle), &sine, &cosine);
  *z0 = radius * static_cast<float>(cosine);
  *z1 = radius * static_cast<float>(sine);
}

// Inverse of erf, single precision. Source: M. Giles, "Approximating the erfinv function", GPU Computing Gems 2 (2010).
SOK_HOST_DEVICE float ErfInv(float x) {
  float w = -static_cast<float>(ExactLog(static_cast<double>((1.0f - x) * (1.0f + x))));
  float p;
  if (w < 5.0f) {
    w -= 2.5f;
    p = 2.81022636e-08f;
    p = 3.43273939e-07f + p * w;
    p = -3.5233877e-06f + p * w;
    p = -4.39150654e-06f + p * w;
    p = 0.00021858087f + p * w;
    p = -0.00125372503f + p * w;
    p = -0.00417768164f + p * w;
    p = 0.246640727f + p * w;
    p = 1.50140941f + p * w;
  } else {
    w = sqrtf(w) - 3.0f;
    p = -0.000200214257f;
    p = 0.000100950558f + p * w;
    p = 0.00134934322f + p * w;
    p = -0.00367342844f + p * w;
    p = 0.00573950773f + p * w;
    p = -0.0076224613f + p * w;
    p = 0.00943887047f + p * w;
    p = 1.00167406f + p * w;
    p = 2.83297682f + p * w;
  }
  return p * x;
}

// Standard normal cut off at two standard deviations, by inverting its distribution function: one word, no rejection.
SOK_HOST_DEVICE float TruncatedNormal(uint32_t word) {
  constexpr float kErf2 = 0.9544997361036416f;  // erf(2 / sqrt(2)): the mass inside two standard deviations
  const float u = (static_cast<float>(word >> 8) + 0.5f) * 5.9604644775390625e-8f;
  const float z = 1.4142135623730951f * ErfInv(kErf2 * (2.0f * u - 1.0f));
  return z < -2.0f ? -2.0f : (z > 2.0f ? 2.0f : z);
}

// An initializer as kernels take it: by value, the bank where the kernel can read it.
struct InitializerView {
  InitKind kind;
  float a, b;
  uint64_t seed;
  const float* bank;  // [bank_rows, dim], for kBank
  int64_t bank_rows;
  SokInitializerFunction function = nullptr;  // for kOwn, on the CPU alone
  int64_t first_column = 0;
};

inline InitializerView ViewOf(const Initializer& init) {
  return {init.kind, init.a, init.b, init.seed, init.bank.data(), init.bank_rows, init.function, init.first_column};
}

// What one block of random words gives: four elements of a row, the first of them that of `column`. Outside [0, dim) they
// are not to be used.
SOK_HOST_DEVICE void ElementsOfBlock(const InitializerView& init, uint64_t key, int64_t dim, int64_t block,
                                     int64_t first_column,
                                     float* value) {  // [4]
  const PhiloxWords words = RowWords(init.seed, key, static_cast<uint32_t>(block));
  if (init.kind == InitKind::kUniform || init.kind == InitKind::kOwn) {
    const float width = init.b - init.a;
    for (int j = 0; j < 4; ++j) value[j] = init.a + UnitUniform(words.word[j]) * width;
  } else if (init.kind == InitKind::kNormal) {
    for (int j = 0; j < 4; j += 2) NormalPair(words.word[j], words.word[j + 1], &value[j], &value[j + 1]);
    for (int j = 0; j < 4; ++j) value[j] = init.a + init.b * value[j];
  } else if (init.kind == InitKind::kTruncatedNormal) {
    for (int j = 0; j < 4; ++j) value[j] = init.a + init.b * TruncatedNormal(words.word[j]);
  } else {
    for (int j = 0; j < 4; ++j) {
      const uint64_t bank_row = (uint64_t{words.word[j]} * static_cast<uint64_t>(init.bank_rows)) >> 32;
      const int64_t column = first_column + j;
      const bool is_inside = column >= 0 && column < dim;
      value[j] = is_inside ? init.bank[static_cast<int64_t>(bank_row) * dim + column] : 0.0f;
    }
  }
}

// Elements 4 * block .. 4 * block + 3 of the fresh row of `key`; those at dim and behind are not to be used.
SOK_HOST_DEVICE void FreshElements(const InitializerView& init, uint64_t key, int64_t dim, int64_t block,
                                   float* value) {  // [4]
  if (init.kind == InitKind::kConstant) {
    for (int j = 0; j < 4; ++j) value[j] = init.a;
    return;
  }
  const int64_t first = init.first_column + 4 * block;
  const int shift = static_cast<int>(first & 3);
  if (shift == 0) return ElementsOfBlock(init, key, dim, first >> 2, 4 * block, value);
  float of_two[8];  // blocks
  for (int i = 0; i < 2; ++i)
    ElementsOfBlock(init, key, dim, (first >> 2) + i, 4 * (block + i) - shift, of_two + 4 * i);
  for (int j = 0; j < 4; ++j) value[j] = of_two[shift + j];
}

// The initializer named `name` ("constant", "uniform", "normal", "truncated_normal", "bank", "own:..." of one's own).
// Throws InvalidArgument for any other name.
InitKind ParseInitKind(const std::string& name);

// The function of an initializer of one's own, "own:...". Throws InvalidArgument if this process has registered none.
SokInitializerFunction OwnInitializer(const std::string& kind);

// Writes the fresh row of `key`. Thread-safe; repeats bit for bit.
void FillRow(const InitializerView& init, uint64_t key, int64_t dim,
             float* row);  // [dim]
inline void FillRow(const Initializer& init, uint64_t key, int64_t dim, float* row) {
  FillRow(ViewOf(init), key, dim, row);
}

// The same for many keys: rows[i] = fresh row of keys[i].
void FillRows(const Initializer& init, const uint64_t* keys, int64_t count, int64_t dim, float* const* rows);

// On a device, into one matrix: row i = fresh row of keys[i], the bits of the CPU. init.bank is device memory.
void FillRows(const Cuda& cuda, const InitializerView& init, const uint64_t* keys, int64_t count, int64_t dim,
              float* rows);  // [count, dim]

}  // namespace sok
