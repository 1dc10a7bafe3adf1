// What can be wrong with a rank's input, as it travels between ops and ranks (docs/design/exchange.md).
#pragma once

#include <cstdint>

namespace sok {

// In the header of a rank's keys, and in a report in place of row splits (input_limits.h).
enum KeyStatus : int64_t {
  kFine = 0,
  kKeyOutOfRange = 1,     // detail: the key
  kTooManyInSegment = 2,  // the segment
  kTooManyInSample = 3,   // the sample
  kBadSplits = 4,         // -
  kRowOutOfRange = 5,     // which key of a sparse input
  kRowsNotWhole = 6,      // rows of the input
  kWrongSlotNum = 7,      // features of the input
  kUneven = 8,            // -
  kWeightsDiffer = 9,     // -
  kRefused = 10,          // bytes of a text that follows
  kBadNumRows = 11,       // rows of the input
  kSlotKeyTooLarge = 12,  // the key
  kLastStatus = kSlotKeyTooLarge,
};

}  // namespace sok
