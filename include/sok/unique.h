// Distinct keys, and which of them each position holds.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/scratch.h"

namespace sok {

// As tf.unique: distinct keys in order of first appearance. Gives their number. n < 2^31, else InvalidArgument.
// inverse, [n], says for each position which distinct key it holds. The same for any number of threads.
int64_t Unique(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n,
               uint64_t* unique_keys,  // [n], the first num_unique are written
               uint32_t* inverse,      // [n]
               uint32_t* counts);      // [n] or null, the first num_unique are written

}  // namespace sok
