// The bytes of a slot of a RowLog: [CRC32C of what follows | row | record], and with versions [CRC32C | row | key | order | record |
// words of the table]. `floats` below are those of the record and the words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "sok/crc32c.h"

namespace sok {

constexpr int64_t kLogBlock = 4096;  // enough for every disk

struct SlotHead {
  uint32_t row = 0;
  uint64_t key = 0, order = 0;
};

inline int64_t RoundedUp(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

constexpr int64_t SlotHeadBytes(bool has_versions) { return has_versions ? 24 : 8; }

inline int64_t SlotBytesOf(int64_t floats, bool has_versions) {
  const int64_t bytes =
      RoundedUp(SlotHeadBytes(has_versions) + floats * static_cast<int64_t>(sizeof(float)), sizeof(uint64_t));
  return bytes <= kLogBlock ? bytes : RoundedUp(bytes, kLogBlock);
}

// Slots do not cross these.
inline int64_t BlockBytesOf(int64_t slot_bytes) { return std::max(kLogBlock, slot_bytes); }

inline uint32_t CrcOfSlot(const char* slot, bool has_versions, int64_t floats) {
  return Crc32c(slot + sizeof(uint32_t), static_cast<size_t>(SlotHeadBytes(has_versions)) - sizeof(uint32_t) +
                                             static_cast<size_t>(floats) * sizeof(float));
}

inline uint32_t RowOfSlot(const char* slot) {
  uint32_t row;
  std::memcpy(&row, slot + 4, sizeof(row));
  return row;
}

inline void WriteSlot(char* slot, bool has_versions, const SlotHead& head, const float* record, int64_t floats,
                      const uint32_t* words, int64_t num_words) {
  std::memcpy(slot + 4, &head.row, 4);
  if (has_versions) {
    std::memcpy(slot + 8, &head.key, 8);
    std::memcpy(slot + 16, &head.order, 8);
  }
  const size_t record_bytes = static_cast<size_t>(floats) * sizeof(float);
  std::memcpy(slot + SlotHeadBytes(has_versions), record, record_bytes);
  if (num_words > 0) {
    std::memcpy(slot + SlotHeadBytes(has_versions) + record_bytes, words,
                static_cast<size_t>(num_words) * sizeof(uint32_t));
  }
  const uint32_t crc = CrcOfSlot(slot, has_versions, floats + num_words);
  std::memcpy(slot, &crc, sizeof(crc));
}

// Whether the slot is what was written; what it says of itself in any case.
inline bool ReadSlotHead(const char* slot, bool has_versions, int64_t floats, SlotHead* head) {
  uint32_t crc;
  std::memcpy(&crc, slot, sizeof(crc));
  head->row = RowOfSlot(slot);
  if (has_versions) {
    std::memcpy(&head->key, slot + 8, 8);
    std::memcpy(&head->order, slot + 16, 8);
  }
  return crc == CrcOfSlot(slot, has_versions, floats);
}

}  // namespace sok
