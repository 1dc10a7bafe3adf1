// The machine's own bandwidth, in sequence and by random rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common.h"

inline void Machine() {
  static Array<float> from(size_t{1} << 27), to(size_t{1} << 27);  // 512 MiB each
  const size_t lines = from.size() / 16;
  static volatile float sink;
  Offer("read", [lines](int) {
#pragma omp parallel num_threads(threads)
    {
      Line a = {}, b = {}, c = {}, d = {};
#pragma omp for schedule(static)
      for (size_t i = 0; i < lines / 4; ++i) {
        const float* p = from.data() + 64 * i;
        a += Load(p), b += Load(p + 16), c += Load(p + 32), d += Load(p + 48);
      }
      sink = ((a + b) + (c + d))[0];
    }
  });
  Offer("copy", [lines](int) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t i = 0; i < lines; ++i) Stream(to.data() + 16 * i, Load(from.data() + 16 * i));
    StreamsDone();
  });
  static std::vector<uint32_t> index((size_t{1} << 22) + 64);
  for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<uint32_t>(Mix(i) >> 32);
  for (int width : {1, 4, 8}) {
    const size_t rows = lines / static_cast<size_t>(width);
    const size_t count = size_t{1} << 20;
    Offer("gather/" + std::to_string(64 * width), [=](int step) {
      const uint32_t* at = index.data() + static_cast<size_t>(step % 4) * count;
#pragma omp parallel num_threads(threads)
      {
        Line sum = {};
#pragma omp for schedule(static)
        for (size_t i = 0; i < count; ++i) {
          const float* ahead = from.data() + ((at[i + 24] * uint64_t{rows}) >> 32) * 16 * static_cast<size_t>(width);
          const float* row = from.data() + ((at[i] * uint64_t{rows}) >> 32) * 16 * static_cast<size_t>(width);
          for (int l = 0; l < width; ++l) __builtin_prefetch(ahead + 16 * l);
          for (int l = 0; l < width; ++l) sum += Load(row + 16 * l);
        }
        sink = sum[0];
      }
    });
  }
}
