// Philox4x32-10, a counter-based random number generator: the value is a pure function of (key, counter).
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Bit-equal to its
// published known-answer vectors on host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SOK_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined: row kernels are compiled once per instruction set, and a shared out-of-line copy of such a function
// could be the one that this processor cannot run.
#define SOK_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace sok {

struct PhiloxWords {
  uint32_t word[4];
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;  // the key moves by these after each round

SOK_HOST_DEVICE void PhiloxRound(uint32_t* c0, uint32_t* c1, uint32_t* c2, uint32_t* c3, uint32_t key0, uint32_t key1) {
  const uint64_t a = uint64_t{kPhiloxMultiplier0} * *c0;
  const uint64_t b = uint64_t{kPhiloxMultiplier1} * *c2;
  const uint32_t hi_a = static_cast<uint32_t>(a >> 32), lo_a = static_cast<uint32_t>(a);
  const uint32_t hi_b = static_cast<uint32_t>(b >> 32), lo_b = static_cast<uint32_t>(b);
  *c0 = hi_b ^ *c1 ^ key0;
  *c2 = hi_a ^ *c3 ^ key1;
  *c1 = lo_b;
  *c3 = lo_a;
}

SOK_HOST_DEVICE PhiloxWords Philox4x32(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    PhiloxRound(&counter.word[0], &counter.word[1], &counter.word[2], &counter.word[3], key0, key1);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// Where in the stream lie elements 4 * block .. 4 * block + 3 of the fresh row of `key`.
SOK_HOST_DEVICE PhiloxWords RowCounter(uint64_t key, uint32_t block) {
  constexpr uint32_t kPurpose = 0x736F6B31u;  // 'sok1': keeps these numbers apart from any later use of Philox
  return {{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), block, kPurpose}};
}

// The four words that elements 4 * block .. 4 * block + 3 of the fresh row of `key` are made from.
SOK_HOST_DEVICE PhiloxWords RowWords(uint64_t seed, uint64_t key, uint32_t block) {
  return Philox4x32(RowCounter(key, block), static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace sok
