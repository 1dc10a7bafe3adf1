// TensorFlow's threads take subnormal floats for zeros and make none. Kernels give the same bits on all instruction sets there,
// too, and 16-bit values, of which some are subnormal, stay what they are.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "../../cpu/cpu_features.h"
#include "../../cpu/row_kernels.h"
#include "check.h"
#include "sok/float_bits.h"
#include "sok/initializer.h"

namespace {

// As TensorFlow sets it for its threads.
class Flushed {
 public:
#if defined(__x86_64__)
  Flushed() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~Flushed() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#endif
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Of all sizes, some of them subnormal.
std::vector<float> Floats(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& one : x) {
    const uint32_t word = static_cast<uint32_t>(random());
    one = std::ldexp(static_cast<float>(word >> 8) * 0x1p-24f - 0.5f,
                     word % 4 == 0 ? -127 - static_cast<int>(word % 20) : 0);
  }
  return x;
}

std::vector<const sok::RowKernels*> All() {
  std::vector<const sok::RowKernels*> all = {sok::GenericRowKernels()};
  if (sok::ChosenIsa() != sok::Isa::kGeneric) all.push_back(sok::Avx2RowKernels());
  if (sok::ChosenIsa() == sok::Isa::kAvx512) all.push_back(sok::Avx512RowKernels());
  return all;
}

}  // namespace

TEST(UpdatesAndSumsHaveTheSameBitsOnAllInstructionSets) {
  const Flushed flushed;
#if defined(__x86_64__)
  volatile float tiny = 0x1p-140f;
  CHECK_EQ(tiny * 1.0f, 0.0f);  // the test is about something
#endif
  constexpr int64_t kRows = 40;
  const double hyper[4] = {0.01, 0.9, 0.999, 1e-7}, adagrad[3] = {0.01, 0.1, 1e-7};
  for (const int64_t dim : {1, 3, 4, 8, 16, 17, 32, 40}) {
    std::vector<std::vector<float>> of_kernel;
    for (const sok::RowKernels* kernels : All()) {
      std::vector<float> records = Floats(static_cast<size_t>(kRows * dim * 3), 1);
      for (int64_t i = 0; i < kRows * dim * 3; ++i)
        if (i % (3 * dim) >= dim) records[static_cast<size_t>(i)] = std::fabs(records[static_cast<size_t>(i)]);
      const std::vector<float> grads = Floats(static_cast<size_t>(kRows * dim), 2);
      float* at[kRows];
      const float* rows[kRows];
      for (int64_t i = 0; i < kRows; ++i) rows[i] = at[i] = records.data() + i * 3 * dim;
      kernels->update(sok::MakeUpdateRule("adagrad", adagrad, 3, 1), at, dim, grads.data(), kRows, dim);
      kernels->update(sok::MakeUpdateRule("lazy_adam", hyper, 4, 3), at, dim, grads.data(), kRows, dim);
      std::vector<float> sum(static_cast<size_t>(dim));
      kernels->accumulate(rows, nullptr, kRows, dim, true, sum.data());
      records.insert(records.end(), sum.begin(), sum.end());
      of_kernel.push_back(records);
    }
    for (const auto& one : of_kernel) CHECK(SameBits(one, of_kernel[0]));
  }
}

TEST(FreshRowsAreThoseOfAnyThread) {
  sok::Initializer init;
  init.kind = sok::InitKind::kUniform;
  init.a = -1e-38f;
  init.b = 2.0f;
  for (const int64_t dim : {1, 5, 16, 33}) {
    std::vector<std::vector<float>> of_kernel;
    for (const sok::RowKernels* kernels : All()) {
      const Flushed flushed;
      std::vector<float> rows(static_cast<size_t>(9 * dim));
      uint64_t keys[9];
      float* at[9];
      for (int64_t i = 0; i < 9; ++i) {
        keys[i] = static_cast<uint64_t>(i) * 0x123456789ABCDEFull;
        at[i] = rows.data() + i * dim;
      }
      kernels->fill_uniform(7, init.a, init.b - init.a, keys, 9, dim, 0, at);
      of_kernel.push_back(rows);
    }
    for (const auto& one : of_kernel) CHECK(SameBits(one, of_kernel[0]));
  }
}

TEST(SixteenBitsGoThereAndBack) {
  std::vector<uint16_t> all(65536), back(all.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> plain(all.size()), flushed(all.size());
  for (size_t i = 0; i < all.size(); ++i) plain[i] = sok::FloatOfHalf(all[i]);
  const sok::RowKernels& kernels = sok::ChosenRowKernels();
  const auto n = static_cast<int64_t>(all.size());
  {
    const Flushed now;
    int64_t wrong = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      wrong += sok::WordOfFloat(sok::FloatOfHalf(all[i])) != sok::WordOfFloat(plain[i]);
      const bool is_nan = (all[i] & 0x7FFFu) > 0x7C00u;
      wrong += !is_nan && sok::HalfBits(plain[i]) != all[i];
    }
    CHECK_EQ(wrong, 0);
    kernels.from_half(all.data(), n, flushed.data());
    kernels.to_half(flushed.data(), n, back.data());
  }
  int64_t wrong = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool is_nan = (all[i] & 0x7FFFu) > 0x7C00u;
    wrong += !is_nan && (sok::WordOfFloat(flushed[i]) != sok::WordOfFloat(plain[i]) || back[i] != all[i]);
  }
  CHECK_EQ(wrong, 0);
  // bfloat16 is the upper half of a float, subnormal or not.
  {
    const Flushed now;
    kernels.from_bfloat16(all.data(), n, flushed.data());
    kernels.to_bfloat16(flushed.data(), n, back.data());
  }
  wrong = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool is_nan = (all[i] & 0x7FFFu) > 0x7F80u;
    wrong += !is_nan && back[i] != all[i];
  }
  CHECK_EQ(wrong, 0);
}
