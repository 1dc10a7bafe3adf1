// A thread has one word: eight bytes on one side and four on the other, side by side with its neighbours'.
#include "sok/exchange_wire.h"

#include <type_traits>

#include "detail/launch.h"
#include "detail/upload.h"
#include "detail/vector4.h"

namespace sok {
namespace {

// The layout on the device.
struct Begins {
  const int64_t* floats;  // [world + 1]
  const int64_t* words;   // [world + 1]
  int64_t world;

  // The message that has the word.
  __device__ __forceinline__ int64_t MessageOf(int64_t word) const {
    int64_t low = 0, high = world;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (words[middle] <= word) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

Begins BeginsOnDevice(const Cuda& cuda, DeviceScratch* scratch, const WireLayout& layout) {
  return {Upload(cuda, scratch, layout.floats, layout.world + 1), Upload(cuda, scratch, layout.words, layout.world + 1),
          layout.world};
}

template <class T>
__global__ void NarrowKernel(Begins begins, int64_t num_words, const float* floats, float* words) {
  for (int64_t i = GlobalThread(); i < num_words; i += GlobalThreads()) {
    const int64_t r = begins.MessageOf(i), word = i - begins.words[r] - kAnswerHeader;
    if (word < 0) {
      words[i] = floats[begins.floats[r] + kAnswerHeader + word];
      continue;
    }
    const int64_t at = begins.floats[r] + kAnswerHeader + 2 * word;
    T low, high = {0};
    FromFloat(floats[at], &low);
    if (at + 1 < begins.floats[r + 1]) FromFloat(floats[at + 1], &high);
    words[i] = FloatOfWord(low.bits | uint32_t{high.bits} << 16);
  }
}

template <class T>
__global__ void WidenWordsKernel(Begins begins, int64_t num_words, const float* words, float* floats) {
  for (int64_t i = GlobalThread(); i < num_words; i += GlobalThreads()) {
    const int64_t r = begins.MessageOf(i), word = i - begins.words[r] - kAnswerHeader;
    if (word < 0) {
      floats[begins.floats[r] + kAnswerHeader + word] = words[i];
      continue;
    }
    const int64_t at = begins.floats[r] + kAnswerHeader + 2 * word;
    const uint32_t both = WordOfFloat(words[i]);
    floats[at] = ToFloat(T{static_cast<uint16_t>(both)});
    if (at + 1 < begins.floats[r + 1]) floats[at + 1] = ToFloat(T{static_cast<uint16_t>(both >> 16)});
  }
}

// Calls f with a null pointer of the type, one of 16 bit.
template <class F>
void WithHalfType(FloatType type, const F& f) {
  if (type == FloatType::kFloat16) {
    f(static_cast<Half*>(nullptr));
  } else {
    f(static_cast<BFloat16*>(nullptr));
  }
}

}  // namespace

void NarrowMessages(const Cuda& cuda, DeviceScratch* scratch, const WireLayout& layout, FloatType type,
                    const float* floats, float* words) {
  const Begins begins = BeginsOnDevice(cuda, scratch, layout);
  const int64_t num_words = layout.words[layout.world];
  WithHalfType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    Launch(NarrowKernel<T>, GridFor(num_words, kThreads), kThreads, 0, cuda, begins, num_words, floats, words);
  });
}

void WidenMessages(const Cuda& cuda, DeviceScratch* scratch, const WireLayout& layout, FloatType type,
                   const float* words, float* floats) {
  const Begins begins = BeginsOnDevice(cuda, scratch, layout);
  const int64_t num_words = layout.words[layout.world];
  WithHalfType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    Launch(WidenWordsKernel<T>, GridFor(num_words, kThreads), kThreads, 0, cuda, begins, num_words, words, floats);
  });
}

}  // namespace sok
