// A build by clang calls these before each load and each store of a kernel (-fsanitize-coverage=trace-loads,trace-stores): threads of a
// block give way there, too, and not only at atomic operations.
#include <cstdint>

#include "cuda_runtime.h"

namespace {

struct alignas(16) Sixteen {
  uint64_t words[2];
};

}  // namespace

#define SOK_GIVES_WAY(what, bytes, Type) \
  extern "C" void __sanitizer_cov_##what##bytes(Type*) { sok_emulator::MaybeYield(); }
SOK_GIVES_WAY(load, 1, uint8_t)
SOK_GIVES_WAY(load, 2, uint16_t)
SOK_GIVES_WAY(load, 4, uint32_t)
SOK_GIVES_WAY(load, 8, uint64_t)
SOK_GIVES_WAY(load, 16, Sixteen)
SOK_GIVES_WAY(store, 1, uint8_t)
SOK_GIVES_WAY(store, 2, uint16_t)
SOK_GIVES_WAY(store, 4, uint32_t)
SOK_GIVES_WAY(store, 8, uint64_t)
SOK_GIVES_WAY(store, 16, Sixteen)
