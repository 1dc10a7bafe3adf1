// Which rank owns a key, and the layout of what ranks send one another (docs/design/exchange.md).
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/scratch.h"

namespace sok {

// owner = key mod world_size, never negative. Signed keys are 64-bit two's complement words.
inline int Owner(uint64_t key, int world_size, bool is_unsigned) {
  if (is_unsigned || static_cast<int64_t>(key) >= 0) return static_cast<int>(key % static_cast<uint64_t>(world_size));
  const int64_t r = static_cast<int64_t>(key) % world_size;
  return static_cast<int>(r < 0 ? r + world_size : r);
}

inline constexpr int kHeaderWords = 2;  // status, detail

// Distinct keys in order of first appearance, bucketed by owner (stable). Answers are laid out as
// [header, rows of owner 0, header, rows of owner 1, ...]; index[i] is the place of key i's row in them.
struct Route {
  int64_t num_unique = 0;
  const uint64_t* keys = nullptr;   // [num_unique], by owner
  const int64_t* counts = nullptr;  // [world_size]
};
Route RouteKeys(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, int world_size, bool is_unsigned,
                int64_t* index);  // [n]

}  // namespace sok
