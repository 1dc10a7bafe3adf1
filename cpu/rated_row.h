// A row that may leave a crowded bucket.
#pragma once

#include <cstdint>

#include "sok/hash_key.h"

namespace sok {

struct Rated {
  double score;
  uint64_t key;
  uint32_t row;
  bool operator<(const Rated& other) const {
    return score != other.score ? score < other.score : HashKey(key) < HashKey(other.key);
  }
};

}  // namespace sok
