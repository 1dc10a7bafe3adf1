// When a record was written into a log: under which version of its table, and where among all appends.
#pragma once

#include <cstdint>

namespace sok {

constexpr int kAppendBits = 44;
constexpr uint32_t kMaxVersion = (uint32_t{1} << (64 - kAppendBits)) - 1;

constexpr uint64_t OrderOf(uint32_t version, int64_t append) {
  return uint64_t{version} << kAppendBits | static_cast<uint64_t>(append);
}
constexpr uint32_t VersionOfOrder(uint64_t order) { return static_cast<uint32_t>(order >> kAppendBits); }

// What a record adds to the digest of the versions that it belongs to. Sums of these do not depend on their order.
constexpr uint64_t DigestOf(uint32_t row, uint64_t order) {
  uint64_t x = order + 0x9E3779B97F4A7C15u * (uint64_t{row} + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace sok
