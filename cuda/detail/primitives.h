// What CUB does for us, in one place: exclusive sums and stable sorts. In the emulator the same by the standard library.
// Everything is put on the stream; temporaries come from the caller's scratch.
#pragma once

#include <cstdint>

#include "check.h"
#include "sok/device.h"
#include "sok/scratch.h"

#if defined(SOK_CUDA_EMULATED)
#include <algorithm>
#include <numeric>
#include <vector>
#else
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#endif

namespace sok {

// out[i] = in[0] + .. + in[i - 1]; out may be in. n < 2^31.
inline void ExclusiveSum(const Cuda& cuda, [[maybe_unused]] DeviceScratch* scratch,
                         const uint32_t* in,  // [n]
                         uint32_t* out,       // [n]
                         int64_t n) {
  if (n <= 0) return;
#if defined(SOK_CUDA_EMULATED)
  sok_emulator::MoveArguments({__FILE__, __LINE__}, &in, &out);
  SOK_CUDA(sok_emulator::Enqueue(cuda.stream, [=] { std::exclusive_scan(in, in + n, out, 0u); }));
#else
  size_t bytes = 0;
  SOK_CUDA(cub::DeviceScan::ExclusiveSum(nullptr, bytes, in, out, static_cast<int>(n), cuda.stream));
  char* temporary = scratch->Get<char>(static_cast<int64_t>(bytes));
  SOK_CUDA(cub::DeviceScan::ExclusiveSum(temporary, bytes, in, out, static_cast<int>(n), cuda.stream));
#endif
}

// Pairs by the low `bits` bits of their keys, equal ones in the order they came. n < 2^31.
inline void SortPairs(const Cuda& cuda, [[maybe_unused]] DeviceScratch* scratch,
                      const uint32_t* keys,    // [n]
                      const uint32_t* values,  // [n]
                      int64_t n, int bits,
                      uint32_t* sorted_keys,      // [n]
                      uint32_t* sorted_values) {  // [n]
  if (n <= 0) return;
#if defined(SOK_CUDA_EMULATED)
  sok_emulator::MoveArguments({__FILE__, __LINE__}, &keys, &values, &sorted_keys, &sorted_values);
  const auto sort = [=] {
    const uint32_t mask = bits >= 32 ? ~0u : (1u << bits) - 1u;
    std::vector<uint32_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return (keys[a] & mask) < (keys[b] & mask); });
    for (int64_t i = 0; i < n; ++i) {
      sorted_keys[i] = keys[order[static_cast<size_t>(i)]];
      sorted_values[i] = values[order[static_cast<size_t>(i)]];
    }
  };
  SOK_CUDA(sok_emulator::Enqueue(cuda.stream, sort));
#else
  size_t bytes = 0;
  SOK_CUDA(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, sorted_keys, values, sorted_values,
                                           static_cast<int>(n), 0, bits, cuda.stream));
  char* temporary = scratch->Get<char>(static_cast<int64_t>(bytes));
  SOK_CUDA(cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, sorted_keys, values, sorted_values,
                                           static_cast<int>(n), 0, bits, cuda.stream));
#endif
}

}  // namespace sok
