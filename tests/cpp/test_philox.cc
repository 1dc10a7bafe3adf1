#include "check.h"
#include "sok/philox.h"

namespace {

void CheckWords(const sok::PhiloxWords& got, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  CHECK_EQ(got.word[0], a);
  CHECK_EQ(got.word[1], b);
  CHECK_EQ(got.word[2], c);
  CHECK_EQ(got.word[3], d);
}

}  // namespace

// The known answers published with the authors' Random123 library.
TEST(GivesThePublishedAnswers) {
  CheckWords(sok::Philox4x32({{0, 0, 0, 0}}, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  const uint32_t ones = 0xffffffff;
  CheckWords(sok::Philox4x32({{ones, ones, ones, ones}}, ones, ones), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  CheckWords(sok::Philox4x32({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0), 0xd16cfe09,
             0x94fdcceb, 0x5001e420, 0x24126ea1);
}

TEST(RowWordsLayTheCounterOut) {
  const uint64_t seed = 0x0123456789abcdefull, key = 0xfedcba9876543210ull;
  const sok::PhiloxWords expected =
      sok::Philox4x32({{0x76543210u, 0xfedcba98u, 5, 0x736f6b31u}}, 0x89abcdefu, 0x01234567u);
  CheckWords(sok::RowWords(seed, key, 5), expected.word[0], expected.word[1], expected.word[2], expected.word[3]);
}

TEST(EveryPartOfTheCounterMatters) {
  const uint32_t base = sok::RowWords(1, 2, 3).word[0];
  CHECK(sok::RowWords(2, 2, 3).word[0] != base);
  CHECK(sok::RowWords(1 + (uint64_t{1} << 32), 2, 3).word[0] != base);
  CHECK(sok::RowWords(1, 3, 3).word[0] != base);
  CHECK(sok::RowWords(1, 2 + (uint64_t{1} << 32), 3).word[0] != base);
  CHECK(sok::RowWords(1, 2, 4).word[0] != base);
}
