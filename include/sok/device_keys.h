// Keys on a device as they came: 64-bit words, or 32-bit ones, which are widened where they are read.
#pragma once

#include <cstdint>

#include "sok/philox.h"

namespace sok {

// Trivially copyable, passed by value.
struct DeviceKeys {
  DeviceKeys() = default;
  DeviceKeys(const uint64_t* wide) : words(wide) {}  // NOLINT: as an array is a pointer
  DeviceKeys(const uint32_t* narrow, bool unsigned_words)
      : words(narrow), is_narrow(true), is_unsigned(unsigned_words) {}

  // Key number i as the 64-bit word that tables take.
  SOK_HOST_DEVICE uint64_t At(int64_t i) const {
    if (!is_narrow) return static_cast<const uint64_t*>(words)[i];
    const uint32_t word = static_cast<const uint32_t*>(words)[i];
    return is_unsigned ? word : static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(word)));
  }
  // Those from number i on.
  DeviceKeys From(int64_t i) const {
    DeviceKeys rest = *this;
    rest.words = static_cast<const char*>(words) + i * (is_narrow ? 4 : 8);
    return rest;
  }
  const uint64_t* wide() const { return is_narrow ? nullptr : static_cast<const uint64_t*>(words); }

  const void* words = nullptr;
  bool is_narrow = false, is_unsigned = false;
};

}  // namespace sok
