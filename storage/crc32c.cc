#include "sok/crc32c.h"

#include <array>
#include <cstring>

namespace sok {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // bit-reversed

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b, followed by k zero bytes, does to the CRC.
constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t b = 0; b < 256; ++b) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xFF];
  return tables;
}

constexpr Tables kTables = MakeTables();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t ByInstruction(const unsigned char* p, size_t n, uint32_t before) {
  uint64_t crc = ~before;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    crc = __builtin_ia32_crc32di(crc, word);
  }
  uint32_t low = static_cast<uint32_t>(crc);
  for (; n > 0; --n, ++p) low = __builtin_ia32_crc32qi(low, *p);
  return ~low;
}

bool HasInstruction() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}
#endif

}  // namespace

uint32_t Crc32cByTable(const void* data, size_t n, uint32_t before) {
  const unsigned char* p = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  for (; n >= 8; n -= 8, p += 8) {
    uint32_t folded = 0;
    for (size_t k = 0; k < 4; ++k) folded ^= kTables[7 - k][((crc >> (8 * k)) & 0xFF) ^ p[k]];
    for (size_t k = 4; k < 8; ++k) folded ^= kTables[7 - k][p[k]];
    crc = folded;
  }
  for (; n > 0; --n, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xFF];
  return ~crc;
}

uint32_t Crc32c(const void* data, size_t n, uint32_t before) {
#if defined(__x86_64__)
  if (HasInstruction()) return ByInstruction(static_cast<const unsigned char*>(data), n, before);
#endif
  return Crc32cByTable(data, n, before);
}

}  // namespace sok
