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

// In which order a device gives distinct keys.
enum class UniqueOrder {
  kFirstAppearance,  // as tf.unique; results repeat bit for bit
  kAny               // whichever thread comes first; one pass less
};

// The same on a device. The number of distinct keys stays there, in num_unique; nothing waits. Every key is legal.
// Scratch: 4 bytes for each of 2 to 4 n places, and 12 n. Throws InvalidArgument for n >= 2^31.
void Unique(const Cuda& cuda, DeviceScratch* scratch,
            const uint64_t* keys,  // [n]
            int64_t n, UniqueOrder order,
            uint64_t* unique_keys,  // [n], the first num_unique are written
            uint32_t* inverse,      // [n]
            uint32_t* counts,       // [n] or null; behind the first num_unique, zeros
            int64_t* num_unique);   // [1]

// Unique, and its number of distinct keys here: waits for the stream.
int64_t UniqueToHost(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, UniqueOrder order,
                     uint64_t* unique_keys, uint32_t* inverse, uint32_t* counts);

}  // namespace sok
