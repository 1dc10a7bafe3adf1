// CRC32C (Castagnoli; RFC 3720), with the processor's instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sok {

// The CRC of n bytes that follow bytes of CRC `before`: Crc32c(b, m, Crc32c(a, n)) is that of a and b together.
uint32_t Crc32c(const void* data, size_t n, uint32_t before = 0);

// The same without that instruction, for processors without it and for tests.
uint32_t Crc32cByTable(const void* data, size_t n, uint32_t before = 0);

}  // namespace sok
