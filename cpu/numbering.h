// Numbers distinct keys by first appearance.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "sok/hash_key.h"

namespace sok {

// A hash table that lives for one call, in memory of its caller. A slot holds 1 + the number of its key, and above it
// bits of the hash: most keys that differ are told apart by those, and four bytes a slot keep it in the cache.
class Numbering {
 public:
  static int64_t SlotsFor(int64_t n) {
    int64_t size = 16;
    while (size < 2 * n) size *= 2;
    return size;
  }

  // For at most n < 2^31 keys. slots [SlotsFor(n)], cleared here; distinct [n] gets the keys. seed: another one is for tests.
  Numbering(int64_t n, uint32_t* slots, uint64_t* distinct, uint64_t seed = HashSeed())
      : slots_(slots),
        distinct_(distinct),
        seed_(seed),
        mask_(static_cast<uint64_t>(SlotsFor(n)) - 1),
        shift_(__builtin_clzll(mask_)) {
    std::memset(slots, 0, (mask_ + 1) * sizeof(uint32_t));
  }

  // How many distinct keys there were so far: the next new one gets this number.
  uint32_t count() const { return count_; }

  uint32_t NumberOf(uint64_t key) {
    const uint64_t hash = Hash(key);
    const uint32_t id_mask = static_cast<uint32_t>(mask_), tag = static_cast<uint32_t>(hash >> 8) & ~id_mask;
    for (uint64_t at = hash >> shift_;; at = (at + 1) & mask_) {
      const uint32_t slot = slots_[at];
      if (slot == 0) {
        distinct_[count_] = key;
        slots_[at] = (count_ + 1) | tag;
        return count_++;
      }
      const uint32_t number = (slot & id_mask) - 1;
      if ((slot & ~id_mask) == tag && distinct_[number] == key) return number;
    }
  }

  // Slots that a search for the key looks at.
  int64_t Probes(uint64_t key) const {
    int64_t probes = 1;
    for (uint64_t at = Hash(key) >> shift_; slots_[at] != 0; at = (at + 1) & mask_, ++probes)
      if (distinct_[(slots_[at] & static_cast<uint32_t>(mask_)) - 1] == key) break;
    return probes;
  }

  // NumberOf for many, for tables that are larger than the cache: slots are asked for ahead.
  void Number(const uint64_t* keys, int64_t n, uint32_t* numbers) {
    constexpr int64_t kAhead = 16;
    for (int64_t i = 0; i < std::min(n, kAhead); ++i) Ask(keys[i]);
    int64_t i = 0;
    for (; i + kAhead < n; ++i) {
      Ask(keys[i + kAhead]);
      numbers[i] = NumberOf(keys[i]);
    }
    for (; i < n; ++i) numbers[i] = NumberOf(keys[i]);
  }

 private:
  // Of HashKey what its high bits need; those choose the slot, and others below them are kept in it.
  uint64_t Hash(uint64_t key) const {
    key ^= seed_;
    key = (key ^ (key >> 32)) * 0xD6E8FEB86659FD93ull;
    return (key ^ (key >> 29)) * 0x9E3779B97F4A7C15ull;
  }
  void Ask(uint64_t key) const { __builtin_prefetch(slots_ + (Hash(key) >> shift_), 1); }

  uint32_t* const slots_;
  uint64_t* const distinct_;
  const uint64_t seed_;
  const uint64_t mask_;
  const int shift_;
  uint32_t count_ = 0;
};

}  // namespace sok
