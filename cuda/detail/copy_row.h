// Rows of floats, moved by a tile of lanes: 16 bytes a lane where both ends are aligned, single floats elsewhere.
#pragma once

#include "launch.h"
#include "vector4.h"

namespace sok {

template <int kLanes>
__device__ __forceinline__ void CopyRow(const Tile<kLanes>& tile, const float* from, int64_t count, float* to) {
  int64_t done = 0;
  if (IsAligned16(from) && IsAligned16(to)) {
    constexpr int64_t kAtOnce = 4;  // loads under way before the first store
    const int64_t vectors = count / 4;
    for (int64_t v = tile.lane; v < vectors; v += kAtOnce * kLanes) {
      float4 value[kAtOnce];
      SOK_UNROLL
      for (int64_t k = 0; k < kAtOnce; ++k)
        if (v + k * kLanes < vectors) value[k] = LoadFloat4(from + 4 * (v + k * kLanes));
      SOK_UNROLL
      for (int64_t k = 0; k < kAtOnce; ++k)
        if (v + k * kLanes < vectors) StoreFloat4(to + 4 * (v + k * kLanes), value[k]);
    }
    done = 4 * vectors;
  }
  for (int64_t j = done + tile.lane; j < count; j += kLanes) to[j] = from[j];
}

template <int kLanes>
__device__ __forceinline__ void ZeroRow(const Tile<kLanes>& tile, int64_t count, float* to) {
  for (int64_t j = tile.lane; j < count; j += kLanes) to[j] = 0.0f;
}

}  // namespace sok
