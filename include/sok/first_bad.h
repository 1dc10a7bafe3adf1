// How kernels report bad input, since code on a device cannot throw: a word on the device is lowered to the position of the
// first bad value, and the value itself is skipped. Reading the word costs the caller a wait for the stream, when it wants to.
#pragma once

#include <cstdint>

namespace sok {

// What the caller sets the word to before; as bytes all ones, so that a memset does.
inline constexpr uint64_t kNothingBad = ~uint64_t{0};

// What a table keeps, on the device, of bad input until its owner asks; all zero: nothing. What came first stays.
struct TableBad {
  static constexpr uint64_t kUnknownRow = 1, kNotFinite = 2;

  uint64_t has_key, key;
  uint64_t has_gradient, position, row_id;  // has_gradient: 0 or one of the above
};

}  // namespace sok
