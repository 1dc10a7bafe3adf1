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

// The instruction gives a result every third cycle and takes an operand in each: three stretches are summed side by side.
constexpr size_t kStretch = 4096;

// What kStretch zero bytes do to a CRC: it is linear, so what they do to each of its bytes.
class Zeros {
 public:
  Zeros() {
    for (size_t byte = 0; byte < 4; ++byte) {
      for (uint32_t bit = 0; bit < 8; ++bit) {
        uint32_t crc = 1u << (8 * byte + bit);
        for (size_t i = 0; i < kStretch; ++i) crc = (crc >> 8) ^ kTables[0][crc & 0xFF];
        for (uint32_t value = 0; value < 256; ++value) table_[byte][value] ^= (value >> bit & 1) != 0 ? crc : 0;
      }
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return table_[0][crc & 0xFF] ^ table_[1][crc >> 8 & 0xFF] ^ table_[2][crc >> 16 & 0xFF] ^ table_[3][crc >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> table_{};
};

#if defined(__x86_64__)
uint64_t Word(const unsigned char* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

__attribute__((target("sse4.2"))) uint32_t ByInstruction(const unsigned char* p, size_t n, uint32_t before) {
  static const Zeros kAfterZeros;
  uint64_t crc = ~before;
  for (; n >= 3 * kStretch; n -= 3 * kStretch, p += 3 * kStretch) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < kStretch; i += 8) {
      crc = __builtin_ia32_crc32di(crc, Word(p + i));
      second = __builtin_ia32_crc32di(second, Word(p + kStretch + i));
      third = __builtin_ia32_crc32di(third, Word(p + 2 * kStretch + i));
    }
    crc = kAfterZeros(kAfterZeros(static_cast<uint32_t>(crc)) ^ static_cast<uint32_t>(second)) ^ third;
  }
  for (; n >= 8; n -= 8, p += 8) crc = __builtin_ia32_crc32di(crc, Word(p));
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

// The same for Python's ctypes.
extern "C" uint32_t SokCrc32c(const void* data, size_t n, uint32_t before) { return sok::Crc32c(data, n, before); }

// out[i] = CRC of the `bytes` of row i that follow bytes of CRC `before`.
extern "C" void SokCrc32cEach(const char* rows, size_t bytes, size_t n, uint32_t before, uint32_t* out) {
  for (size_t i = 0; i < n; ++i) out[i] = sok::Crc32c(rows + i * bytes, bytes, before);
}
