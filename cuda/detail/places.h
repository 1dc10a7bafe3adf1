// Tables of positions, probed linearly (elect.h, table_group.cu, unique.cu): how large.
#pragma once

#include <cstdint>

namespace sok {

// At most half full with n entries; a power of two. n < 2^31: at most 2^32, so that a place has 32 bits.
constexpr int64_t PlacesFor(int64_t n) {
  int64_t places = 64;
  while (places < 2 * n) places *= 2;
  return places;
}

}  // namespace sok
