// Rows and gradients in 16 bit while they travel between ranks (docs/design/exchange.md).
//
// A transport moves float32 words, and never looks at them. On the wire a message of n floats (exchange.h) is its header, bit for
// bit, and then its other floats rounded to 16 bit, two to a word: the first in the lower half. An odd number of them is
// followed by 16 zero bits.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/exchange.h"
#include "sok/float_type.h"
#include "sok/scratch.h"

namespace sok {

// The words of a message of that many floats, header and all: at least kAnswerHeader.
inline int64_t WireWords(int64_t floats) { return kAnswerHeader + (floats - kAnswerHeader + 1) / 2; }

// The most floats that so many words may be.
inline int64_t WireFloats(int64_t words) { return kAnswerHeader + 2 * (words - kAnswerHeader); }

// Where the messages of each rank begin, as floats and as words: [world + 1] each. Message r is WireWords(its floats) long.
struct WireLayout {
  const int64_t* floats = nullptr;
  const int64_t* words = nullptr;
  int64_t world = 0;
};

// Writes all words, rounded to the nearest of `type` (not float32), ties to even; what is too large becomes infinite, a NaN
// stays one. The same bits with every instruction set.
void NarrowMessages(const Cpu& cpu, const WireLayout& layout, FloatType type, const float* floats, float* words);

// And back: writes all floats.
void WidenMessages(const Cpu& cpu, const WireLayout& layout, FloatType type, const float* words, float* floats);

// ---- On a device

// The same; the layout's arrays are host memory, read before the call returns. Nothing waits. The CPU's bits, but for the
// payload of a NaN.
void NarrowMessages(const Cuda& cuda, DeviceScratch* scratch, const WireLayout& layout, FloatType type,
                    const float* floats, float* words);
void WidenMessages(const Cuda& cuda, DeviceScratch* scratch, const WireLayout& layout, FloatType type,
                   const float* words, float* floats);

}  // namespace sok
