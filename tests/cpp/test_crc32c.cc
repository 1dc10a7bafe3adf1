#include "sok/crc32c.h"

#include <string>
#include <vector>

#include "check.h"

namespace {

// RFC 3720, B.4, and the check value of the catalogue of CRCs.
struct Known {
  std::string bytes;
  uint32_t crc;
};

std::vector<Known> KnownValues() {
  std::string up(32, '\0'), down(32, '\0');
  for (int i = 0; i < 32; ++i) {
    up[static_cast<size_t>(i)] = static_cast<char>(i);
    down[static_cast<size_t>(i)] = static_cast<char>(31 - i);
  }
  return {{"", 0u},
          {"123456789", 0xE3069283u},
          {std::string(32, '\0'), 0x8A9136AAu},
          {std::string(32, '\xff'), 0x62A8AB43u},
          {up, 0x46DD794Eu},
          {down, 0x113FDB5Cu}};
}

std::string Noise(size_t n) {
  std::string text(n, '\0');
  uint32_t x = 1;
  for (char& c : text) c = static_cast<char>((x = x * 1664525u + 1013904223u) >> 24);
  return text;
}

}  // namespace

TEST(KnownVectorsAreMet) {
  for (const Known& known : KnownValues()) {
    CHECK_EQ(sok::Crc32c(known.bytes.data(), known.bytes.size()), known.crc);
    CHECK_EQ(sok::Crc32cByTable(known.bytes.data(), known.bytes.size()), known.crc);
  }
}

TEST(BothWaysAgreeOnAnyLengthAndAlignment) {
  const std::string text = Noise(300);
  for (size_t from = 0; from < 9; ++from)
    for (size_t n = 0; n + from <= text.size(); n += 7)
      CHECK_EQ(sok::Crc32c(text.data() + from, n, 5u), sok::Crc32cByTable(text.data() + from, n, 5u));
}

TEST(LongStretchesAreSummedSideBySideToTheSameValue) {
  const std::string text = Noise(40000);
  for (const size_t n : {12287u, 12288u, 12289u, 24575u, 24576u, 24584u, 39990u})
    for (const size_t from : {0u, 1u, 9u})
      CHECK_EQ(sok::Crc32c(text.data() + from, n, 5u), sok::Crc32cByTable(text.data() + from, n, 5u));
}

TEST(PiecesGiveWhatTheWholeGives) {
  const std::string text = Noise(100);
  const uint32_t whole = sok::Crc32c(text.data(), text.size());
  for (size_t cut = 0; cut <= text.size(); ++cut)
    CHECK_EQ(sok::Crc32c(text.data() + cut, text.size() - cut, sok::Crc32c(text.data(), cut)), whole);
}
