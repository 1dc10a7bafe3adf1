// Which rank owns a key.
#pragma once

#include <cstdint>

namespace sok {

inline constexpr int kByKey = -1;

// Row-wise: owner = key mod world_size, never negative. Signed keys are 64-bit two's complement words.
inline int Owner(uint64_t key, int world_size, bool is_unsigned) {
  const uint64_t world = static_cast<uint64_t>(world_size);
  // Powers of two divide 2^64, so the low bits say it for words of either sign, without a division.
  if ((world & (world - 1)) == 0) return static_cast<int>(key & (world - 1));
  if (is_unsigned || static_cast<int64_t>(key) >= 0) return static_cast<int>(key % world);
  const int64_t r = static_cast<int64_t>(key) % world_size;
  return static_cast<int>(r < 0 ? r + world_size : r);
}

// How the rows of a table lie on ranks: each on that of its key, or all on one (table-wise).
struct Partition {
  int world_size = 1;
  int owner = kByKey;
  bool is_unsigned = false;

  int OwnerOf(uint64_t key) const { return owner == kByKey ? Owner(key, world_size, is_unsigned) : owner; }
  // Ranks that hold rows. The row of key k in an identity table is k / num_shards.
  int num_shards() const { return owner == kByKey ? world_size : 1; }
};

}  // namespace sok
