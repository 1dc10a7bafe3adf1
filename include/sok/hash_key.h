// How keys are hashed.
#pragma once

#include <cstdint>
#include <random>

#include "sok/philox.h"

namespace sok {

// Two rounds of xor-shift and multiply: every output bit depends on every key bit (finaliser after Stafford, 2011). A bijection
// that anyone can invert: enough for orders that are promised, and for shares of work that stays linear.
SOK_HOST_DEVICE uint64_t HashKey(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// What tables in which one key waits behind another are searched by: HashKey(key ^ HashSeed()). Whoever chooses keys must not
// choose their places, or n keys of one place would cost n^2 steps. So the seed is a secret of this process: it must never
// show, neither in an order nor in a message or a file.
inline uint64_t HashSeed() {
  static const uint64_t seed = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return seed;
}

}  // namespace sok
