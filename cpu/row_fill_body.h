// Fresh rows.
// Included by row_kernels_body.h, which says how.
#pragma once

#include <cstdint>
#include <cstring>

#include "row_kernels.h"
#include "sok/initializer.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace sok {
namespace {

constexpr int64_t kBlocks = 16;  // Philox blocks side by side: one block gives four floats

// All rounds of kBlocks blocks, word w of block l in c[w][l].
#if defined(__AVX2__)
// By hand, as no compiler sees that one multiplication of the lower halves of 64-bit lanes gives both halves of a product.
// What stands above a lane's lower half is never looked at.
void PhiloxBlocks(uint64_t seed, uint32_t (*c)[kBlocks]) {
  constexpr int64_t kAtOnce = 4;
  const __m256i multiplier_a = _mm256_set1_epi64x(kPhiloxMultiplier0),
                multiplier_b = _mm256_set1_epi64x(kPhiloxMultiplier1);
  const __m256i lower = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
  for (int64_t l = 0; l < kBlocks; l += kAtOnce) {
    __m256i word[4];
    for (int w = 0; w < 4; ++w) word[w] = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<__m128i*>(c[w] + l)));
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m256i a = _mm256_mul_epu32(word[0], multiplier_a), b = _mm256_mul_epu32(word[2], multiplier_b);
      word[0] = _mm256_xor_si256(_mm256_srli_epi64(b, 32), _mm256_xor_si256(word[1], _mm256_set1_epi64x(key0)));
      word[2] = _mm256_xor_si256(_mm256_srli_epi64(a, 32), _mm256_xor_si256(word[3], _mm256_set1_epi64x(key1)));
      word[1] = b;
      word[3] = a;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
    for (int w = 0; w < 4; ++w) {
      const __m256i packed = _mm256_permutevar8x32_epi32(word[w], lower);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(c[w] + l), _mm256_castsi256_si128(packed));
    }
  }
}
#else
void PhiloxBlocks(uint64_t seed, uint32_t (*c)[kBlocks]) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int64_t l = 0; l < kBlocks; ++l) PhiloxRound(&c[0][l], &c[1][l], &c[2][l], &c[3][l], key0, key1);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
}
#endif

void FillUniform(uint64_t seed, float a, float width, const uint64_t* keys, int64_t count, int64_t dim,
                 int64_t first_block, float* const* records) {
  const int64_t per_row = (dim + 3) / 4, total = count * per_row;
  int64_t row = 0, block = 0;        // of the block that is prepared next
  int64_t to_row = 0, to_block = 0;  // of the one that is stored next
  for (int64_t first = 0; first < total; first += kBlocks) {
    uint32_t c[4][kBlocks] = {};
    const int64_t n = total - first < kBlocks ? total - first : kBlocks;
    for (int64_t l = 0; l < n; ++l) {
      const PhiloxWords counter = RowCounter(keys[row], static_cast<uint32_t>(first_block + block));
      for (int w = 0; w < 4; ++w) c[w][l] = counter.word[w];
      if (++block < per_row) continue;
      block = 0;
      ++row;
    }
    PhiloxBlocks(seed, c);
    float value[kBlocks][4];
    for (int64_t l = 0; l < kBlocks; ++l)
      for (int w = 0; w < 4; ++w) value[l][w] = a + UnitUniform(c[w][l]) * width;
    for (int64_t l = 0; l < n; ++l) {
      const int64_t at = to_block * 4, size = dim - at < 4 ? dim - at : 4;
      float* to = records[to_row] + at;
      if (size == 4) {
        std::memcpy(to, value[l], sizeof(value[l]));
      } else {
        for (int64_t j = 0; j < size; ++j) to[j] = value[l][j];
      }
      if (++to_block < per_row) continue;
      to_block = 0;
      ++to_row;
    }
  }
}

}  // namespace
}  // namespace sok
