#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/exchange_wire.h"
#include "sok/float_bits.h"

namespace {

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

}  // namespace

TEST(MessagesHaveTheBitsOfTheCpu) {
  const sok::Cuda cuda;
  const sok::SerialExecutor executor;
  std::mt19937 rng(1);
  for (const auto type : {sok::FloatType::kFloat16, sok::FloatType::kBFloat16}) {
    const std::vector<std::vector<int64_t>> cases = {{0}, {1, 0, 2, 0, 0, 3}, {5, 5, 5}, {3333, 1, 100}, {0, 0}};
    for (const std::vector<int64_t>& sizes : cases) {
      std::vector<int64_t> floats = {0}, words = {0};
      for (const int64_t n : sizes) {
        floats.push_back(floats.back() + sok::kAnswerHeader + n);
        words.push_back(words.back() + sok::WireWords(sok::kAnswerHeader + n));
      }
      const sok::WireLayout layout = {floats.data(), words.data(), static_cast<int64_t>(sizes.size())};
      std::vector<float> in;
      // Words of any kind but for NaN, whose payload is up to the device.
      while (static_cast<int64_t>(in.size()) < floats.back()) {
        const float x = sok::FloatOfWord(rng());
        if (!std::isnan(x)) in.push_back(x);
      }
      std::vector<float> wire(static_cast<size_t>(words.back())), back(in.size());
      sok::NarrowMessages(sok::Cpu{executor}, layout, type, in.data(), wire.data());
      sok::WidenMessages(sok::Cpu{executor}, layout, type, wire.data(), back.data());

      sok::StreamScratch scratch(cuda);
      DeviceArray<float> from(in), to(words.back()), again(floats.back());
      sok::NarrowMessages(cuda, &scratch, layout, type, from, to);
      CHECK(SameBits(to.Get(), wire));
      sok::WidenMessages(cuda, &scratch, layout, type, to, again);
      CHECK(SameBits(again.Get(), back));
    }
  }
}

TEST(ANanStaysOne) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  const std::vector<int64_t> floats = {0, sok::kAnswerHeader + 2}, words = {0, sok::kAnswerHeader + 1};
  std::vector<float> in(static_cast<size_t>(floats[1]), 0.0f);
  in[16] = sok::FloatOfWord(0x7F800001u);
  in[17] = sok::FloatOfWord(0xFFFFFFFFu);
  for (const auto type : {sok::FloatType::kFloat16, sok::FloatType::kBFloat16}) {
    DeviceArray<float> from(in), to(words[1]), again(floats[1]);
    const sok::WireLayout layout = {floats.data(), words.data(), 1};
    sok::NarrowMessages(cuda, &scratch, layout, type, from, to);
    sok::WidenMessages(cuda, &scratch, layout, type, to, again);
    const std::vector<float> back = again.Get();
    CHECK(std::isnan(back[16]) && std::isnan(back[17]));
    for (int i = 0; i < 16; ++i) CHECK_EQ(back[i], 0.0f);
  }
}
