// Which rank owns a key.
#pragma once

#include <cstdint>

namespace sok {

// owner = key mod world_size, never negative. Signed keys are 64-bit two's complement words.
inline int Owner(uint64_t key, int world_size, bool is_unsigned) {
  const uint64_t world = static_cast<uint64_t>(world_size);
  // Powers of two divide 2^64, so the low bits say it for words of either sign, without a division.
  if ((world & (world - 1)) == 0) return static_cast<int>(key & (world - 1));
  if (is_unsigned || static_cast<int64_t>(key) >= 0) return static_cast<int>(key % world);
  const int64_t r = static_cast<int64_t>(key) % world_size;
  return static_cast<int>(r < 0 ? r + world_size : r);
}

}  // namespace sok
