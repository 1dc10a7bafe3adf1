#include "sok/exchange_wire.h"

#include <algorithm>

#include "row_kernels.h"

namespace sok {
namespace {

// A word of a message behind its header is two floats, read and written: about two cycles.
constexpr int64_t kCyclesPerWord = 2;

// Calls header(words, floats) and body(words, floats, number of floats) until all messages are covered, in parallel. Both are
// given where they begin; words of a body are cut anywhere.
template <class Header, class Body>
void ForWords(const Cpu& cpu, const WireLayout& layout, const Header& header, const Body& body) {
  cpu.executor.For(layout.words[layout.world], kCyclesPerWord, [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < layout.world; ++r) {
      const int64_t words = layout.words[r] + kAnswerHeader, floats = layout.floats[r] + kAnswerHeader;
      if (begin <= layout.words[r] && layout.words[r] < end) header(layout.words[r], layout.floats[r]);
      const int64_t first = std::max(begin, words), last = std::min(end, layout.words[r + 1]);
      if (first >= last) continue;
      const int64_t from = floats + 2 * (first - words), to = floats + 2 * (last - words);
      body(first, from, std::min(to, layout.floats[r + 1]) - from);
    }
  });
}

}  // namespace

void NarrowMessages(const Cpu& cpu, const WireLayout& layout, FloatType type, const float* floats, float* words) {
  const RowKernels& kernels = ChosenRowKernels();
  const auto convert = type == FloatType::kFloat16 ? kernels.to_half : kernels.to_bfloat16;
  ForWords(
      cpu, layout, [&](int64_t to, int64_t from) { std::copy_n(floats + from, kAnswerHeader, words + to); },
      [&](int64_t to, int64_t from, int64_t n) {
        auto* halves = reinterpret_cast<uint16_t*>(words + to);
        convert(floats + from, n, halves);
        if (n % 2 != 0) halves[n] = 0;
      });
}

void WidenMessages(const Cpu& cpu, const WireLayout& layout, FloatType type, const float* words, float* floats) {
  const RowKernels& kernels = ChosenRowKernels();
  const auto convert = type == FloatType::kFloat16 ? kernels.from_half : kernels.from_bfloat16;
  ForWords(
      cpu, layout, [&](int64_t from, int64_t to) { std::copy_n(words + from, kAnswerHeader, floats + to); },
      [&](int64_t from, int64_t to, int64_t n) {
        convert(reinterpret_cast<const uint16_t*>(words + from), n, floats + to);
      });
}

}  // namespace sok
