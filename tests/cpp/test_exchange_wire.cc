#include "sok/exchange_wire.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "sok/float_bits.h"
#include "threads.h"

namespace {

struct Type {
  sok::FloatType type;
  int mantissa_bits, exponent_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  uint32_t quiet() const { return 1u << (mantissa_bits - 1); }
};
constexpr Type kTypes[] = {{sok::FloatType::kFloat16, 10, 5}, {sok::FloatType::kBFloat16, 7, 8}};

// The value of 16 bits, as the standard says it.
double Value(const Type& t, uint32_t bits) {
  const uint32_t magnitude = bits & 0x7FFFu, mantissa = magnitude & ((1u << t.mantissa_bits) - 1);
  const int exponent = static_cast<int>(magnitude >> t.mantissa_bits);
  double value = exponent == 0 ? std::ldexp(mantissa, 1 - t.bias() - t.mantissa_bits)
                               : std::ldexp(mantissa + (1u << t.mantissa_bits), exponent - t.bias() - t.mantissa_bits);
  if (magnitude == t.infinity()) value = INFINITY;
  if (magnitude > t.infinity()) value = NAN;
  return (bits & 0x8000u) != 0 ? -value : value;
}

// The 16 bits next to x: of all of one sign, in order, those between which it lies; of two as near, the even ones.
uint32_t Nearest(const Type& t, float x) {
  const uint32_t word = sok::WordOfFloat(x), sign = word >> 31 << 15;
  if (std::isnan(x)) {
    // Sign and upper bits of the payload stay.
    const uint32_t payload = (word & 0x7FFFFFu) >> (23 - t.mantissa_bits);
    return sign | t.infinity() | t.quiet() | payload;
  }
  const double magnitude = std::fabs(static_cast<double>(x));
  uint32_t low = 0, high = t.infinity();  // Value(low) <= magnitude < what comes after it
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (Value(t, middle) <= magnitude ? low : high) = middle;
  }
  // Past the largest number, as if another one followed.
  const double below = Value(t, low);
  const double step = low == 0 ? Value(t, 1) : below - Value(t, low - 1);
  const double above = high == t.infinity() ? below + step : Value(t, high);
  if (std::isinf(x) || magnitude - below > above - magnitude) return sign | high;
  if (magnitude - below < above - magnitude) return sign | low;
  return sign | (low % 2 == 0 ? low : high);
}

sok::WireLayout LayoutOf(const std::vector<int64_t>& floats, const std::vector<int64_t>& words) {
  return {floats.data(), words.data(), static_cast<int64_t>(floats.size()) - 1};
}

std::vector<uint16_t> Halves(const std::vector<float>& words) {
  std::vector<uint16_t> halves(2 * words.size());
  if (!words.empty()) std::memcpy(halves.data(), words.data(), 4 * words.size());
  return halves;
}

// All of these as one message.
std::vector<uint16_t> Narrow(const Type& t, std::vector<float> floats) {
  floats.insert(floats.begin(), sok::kAnswerHeader, 0.0f);
  const int64_t n = static_cast<int64_t>(floats.size());
  std::vector<float> words(static_cast<size_t>(sok::WireWords(n)));
  const sok::SerialExecutor executor;
  sok::NarrowMessages(sok::Cpu{executor}, LayoutOf({0, n}, {0, sok::WireWords(n)}), t.type, floats.data(),
                      words.data());
  words.erase(words.begin(), words.begin() + sok::kAnswerHeader);
  return Halves(words);
}

TEST(EachHalfHasTheValueThatTheStandardSays) {
  for (const Type& t : kTypes) {
    std::vector<float> words(sok::kAnswerHeader + 0x8000), floats(sok::kAnswerHeader + 0x10000);
    for (uint32_t i = 0; i < 0x8000; ++i) words[sok::kAnswerHeader + i] = sok::FloatOfWord(2 * i | (2 * i + 1) << 16);
    const sok::SerialExecutor executor;
    const int64_t n = static_cast<int64_t>(floats.size());
    sok::WidenMessages(sok::Cpu{executor}, LayoutOf({0, n}, {0, sok::WireWords(n)}), t.type, words.data(),
                       floats.data());
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float x = floats[sok::kAnswerHeader + bits];
      const double expected = Value(t, bits);
      CHECK(std::isnan(expected) ? std::isnan(x) : x == expected);
      CHECK_EQ(std::signbit(x), (bits & 0x8000u) != 0);
    }
  }
}

TEST(FloatsAreRoundedToTheNearest) {
  std::mt19937 rng(1);
  for (const Type& t : kTypes) {
    std::vector<float> floats = {0.0f,          -0.0f,         INFINITY,       -INFINITY, 65504.0f, 65519.99f,
                                 65520.0f,      -65520.0f,     3e38f,          -3.4e38f,  1e-45f,   -1e-38f,
                                 5.9604645e-8f, 2.9802322e-8f, 2.98023242e-8f, 6.1e-5f};
    // Every value, what lies halfway to the next, and the floats around that.
    for (uint32_t bits = 0; bits < t.infinity(); ++bits) {
      const double value = Value(t, bits),
                   next = bits + 1 == t.infinity() ? 2 * value - Value(t, bits - 1) : Value(t, bits + 1);
      const float middle = static_cast<float>(value / 2 + next / 2);
      for (const float x :
           {static_cast<float>(value), middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY)}) {
        floats.push_back(x);
        floats.push_back(-x);
      }
    }
    // Any words: NaN with any payload, subnormal numbers, and all else.
    for (int i = 0; i < 100000; ++i) floats.push_back(sok::FloatOfWord(rng()));
    for (int i = 0; i < 1000; ++i) floats.push_back(sok::FloatOfWord(0x7F800000u | (rng() & 0x807FFFFFu)));
    for (int i = 0; i < 10000; ++i) floats.push_back(sok::FloatOfWord(0x30000000u + rng() % 0x20000000u));
    const std::vector<uint16_t> got = Narrow(t, floats);
    for (size_t i = 0; i < floats.size(); ++i) {
      const uint32_t expected = Nearest(t, floats[i]);
      if (got[i] != expected) std::fprintf(stderr, "of word %08x\n", sok::WordOfFloat(floats[i]));
      CHECK_EQ(got[i], expected);
    }
  }
}

TEST(MessagesOfAnySizesLieSideBySide) {
  std::mt19937 rng(2);
  for (const Type& t : kTypes) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{0}, {1, 0, 2, 0, 0, 3}, {5, 5, 5}, {33333, 1, 100}, {0, 0}}) {
      std::vector<int64_t> floats = {0}, words = {0};
      for (const int64_t n : sizes) {
        floats.push_back(floats.back() + sok::kAnswerHeader + n);
        words.push_back(words.back() + sok::kAnswerHeader + (n + 1) / 2);
        CHECK_EQ(sok::WireWords(sok::kAnswerHeader + n), sok::kAnswerHeader + (n + 1) / 2);
      }
      const sok::WireLayout layout = LayoutOf(floats, words);
      std::vector<float> in(static_cast<size_t>(floats.back()));
      for (float& x : in) x = std::normal_distribution<float>()(rng);
      for (size_t r = 0; r < sizes.size(); ++r) {
        // Bit for bit: neither a length nor a NaN of the header may be rounded.
        in[static_cast<size_t>(floats[r])] = 1234567.0f;
        in[static_cast<size_t>(floats[r]) + 1] = sok::FloatOfWord(0x7F812345u);
      }
      std::vector<float> first;
      for (const int threads : {1, 5}) {
        const ThreadExecutor executor(threads);
        constexpr float kGuard = 7.0f;
        std::vector<float> wire(static_cast<size_t>(words.back()) + 1, sok::FloatOfWord(0xFFFFFFFFu));
        wire.back() = kGuard;
        sok::NarrowMessages(sok::Cpu{executor}, layout, t.type, in.data(), wire.data());
        CHECK_EQ(wire.back(), kGuard);
        std::vector<float> out(in.size() + 1, kGuard);
        sok::WidenMessages(sok::Cpu{executor}, layout, t.type, wire.data(), out.data());
        CHECK_EQ(out.back(), kGuard);
        for (size_t r = 0; r < sizes.size(); ++r) {
          const size_t begin = static_cast<size_t>(floats[r]), at = static_cast<size_t>(words[r]);
          const size_t n = static_cast<size_t>(sizes[r]);
          CHECK(std::memcmp(&wire[at], &in[begin], 4 * sok::kAnswerHeader) == 0);
          CHECK(std::memcmp(&out[begin], &in[begin], 4 * sok::kAnswerHeader) == 0);
          const std::vector<uint16_t> halves = Halves({&wire[at] + sok::kAnswerHeader, &wire[0] + words[r + 1]});
          CHECK_EQ(halves.size(), (n + 1) / 2 * 2);
          for (size_t i = 0; i < n; ++i) {
            const uint32_t expected = Nearest(t, in[begin + sok::kAnswerHeader + i]);
            CHECK_EQ(halves[i], expected);
            CHECK_EQ(out[begin + sok::kAnswerHeader + i], static_cast<float>(Value(t, expected)));
          }
          if (n % 2 != 0) CHECK_EQ(halves[n], 0);
        }
        if (threads == 1) first = wire;
        CHECK(std::memcmp(first.data(), wire.data(), 4 * wire.size()) == 0);
      }
    }
  }
}

}  // namespace
