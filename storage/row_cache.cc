#include "row_cache.h"

#include <sys/mman.h>

#include <cstring>
#include <string>

#include "sok/error.h"

namespace sok {
namespace {

constexpr uint8_t kEmpty = 0, kRow = 1, kUnseen = 2, kKind = 3, kUsed = 4;

}  // namespace

RowCache::RowCache(int64_t bytes, int64_t row_bytes) : row_bytes_(row_bytes), locks_(kLocks) {
  const int64_t of_set = kWays * (row_bytes + 9) + 1;
  sets_ = bytes / of_set;
  if (sets_ <= 0) return;
  mapped_bytes_ = static_cast<size_t>(sets_ * of_set);
  void* memory =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw OutOfMemory("no memory for a cache of " + std::to_string(bytes) + " bytes of rows");
  memory_ = static_cast<char*>(memory);
  const int64_t entries = sets_ * kWays;
  keys_ = reinterpret_cast<uint64_t*>(memory_);
  rows_ = memory_ + 8 * entries;
  states_ = reinterpret_cast<uint8_t*>(rows_ + row_bytes_ * entries);
  hands_ = states_ + entries;
}

RowCache::~RowCache() {
  if (memory_ != nullptr) munmap(memory_, mapped_bytes_);
}

int64_t RowCache::SetOf(uint64_t mixed) const {
  __extension__ using Wide = unsigned __int128;
  // Not by the highest bits alone, which a bucket's keys have in common.
  return static_cast<int64_t>((static_cast<Wide>(mixed * 0x9E3779B97F4A7C15u) * static_cast<uint64_t>(sets_)) >> 64);
}

RowCache::Found RowCache::Read(uint64_t mixed, char* row) const {
  if (sets_ <= 0) return Found::kNothing;
  const int64_t set = SetOf(mixed);
  const std::lock_guard<std::mutex> lock(locks_[static_cast<size_t>(set % kLocks)]);
  for (int64_t e = set * kWays; e < (set + 1) * kWays; ++e) {
    if (states_[e] == kEmpty || keys_[e] != mixed) continue;
    states_[e] |= kUsed;
    if ((states_[e] & kKind) == kUnseen) return Found::kUnseen;
    std::memcpy(row, RowOf(e), static_cast<size_t>(row_bytes_));
    return Found::kRow;
  }
  return Found::kNothing;
}

void RowCache::Put(uint64_t mixed, const char* row) {
  if (sets_ <= 0) return;
  const int64_t set = SetOf(mixed), first = set * kWays;
  const std::lock_guard<std::mutex> lock(locks_[static_cast<size_t>(set % kLocks)]);
  int64_t chosen = -1;
  for (int64_t e = first; e < first + kWays; ++e) {
    if (states_[e] != kEmpty && keys_[e] == mixed) return;
    if (states_[e] == kEmpty && chosen < 0) chosen = e;
  }
  while (chosen < 0) {
    const int64_t e = first + hands_[set];
    hands_[set] = static_cast<uint8_t>((hands_[set] + 1) % kWays);
    if ((states_[e] & kUsed) == 0) chosen = e;
    states_[e] &= static_cast<uint8_t>(~kUsed);
  }
  keys_[chosen] = mixed;
  states_[chosen] = row == nullptr ? kUnseen : kRow;
  if (row != nullptr) std::memcpy(RowOf(chosen), row, static_cast<size_t>(row_bytes_));
}

}  // namespace sok
