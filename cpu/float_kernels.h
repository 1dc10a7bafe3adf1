// Floats to 16 bit and back, compiled once per instruction set and chosen at run time (cpu_features.h). All versions give
// the same bits: those of sok/float_bits.h.
#pragma once

#include <cstdint>

namespace sok {

// Each converts from[0 .. n), which need not be aligned.
struct FloatKernels {
  void (*to_half)(const float* from, int64_t n, uint16_t* to);
  void (*from_half)(const uint16_t* from, int64_t n, float* to);
  void (*to_bfloat16)(const float* from, int64_t n, uint16_t* to);
  void (*from_bfloat16)(const uint16_t* from, int64_t n, float* to);
};

// That of this processor.
const FloatKernels& ChosenFloatKernels();

const FloatKernels* GenericFloatKernels();
const FloatKernels* Avx2FloatKernels();  // and F16C

}  // namespace sok
