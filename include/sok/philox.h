// Philox4x32-10, a counter-based random number generator: the value is a pure function of (key, counter).
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Bit-equal to its
// published known-answer vectors on host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SOK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SOK_HOST_DEVICE inline
#endif

namespace sok {

struct PhiloxWords {
  uint32_t word[4];
};

SOK_HOST_DEVICE PhiloxWords Philox4x32(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter.word[2];
    const uint32_t hi_a = static_cast<uint32_t>(a >> 32), lo_a = static_cast<uint32_t>(a);
    const uint32_t hi_b = static_cast<uint32_t>(b >> 32), lo_b = static_cast<uint32_t>(b);
    counter = {{hi_b ^ counter.word[1] ^ key0, lo_b, hi_a ^ counter.word[3] ^ key1, lo_a}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The four words that elements 4 * block .. 4 * block + 3 of the fresh row of `key` are made from.
SOK_HOST_DEVICE PhiloxWords RowWords(uint64_t seed, uint64_t key, uint32_t block) {
  constexpr uint32_t kPurpose = 0x736F6B31u;  // 'sok1': keeps these numbers apart from any later use of Philox
  const PhiloxWords counter = {{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), block, kPurpose}};
  return Philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace sok
