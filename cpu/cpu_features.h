// Which instruction set the hot loops use, chosen once when the process starts.
#pragma once

namespace sok {

enum class Isa { kGeneric, kAvx2, kAvx512 };

// The best one this processor has. SOK_ISA=generic|avx2|avx512 asks for a lesser one (to test the others).
Isa ChosenIsa();

}  // namespace sok
