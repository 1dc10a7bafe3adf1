// Rows of one table that were read from elsewhere, in bounded memory. A version of a table never changes, so nothing in it
// grows old; of keys without a row it remembers that.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace sok {

// Sets of eight entries; one that was used since the set was last full stays (the "clock" rule). Memory is taken from the
// system as it is filled. Thread-safe: each set has a lock, which it shares with others.
class RowCache {
 public:
  enum class Found { kNothing, kRow, kUnseen };

  // At most `bytes`, all things together; with none of them it holds nothing. Throws OutOfMemory.
  RowCache(int64_t bytes, int64_t row_bytes);
  ~RowCache();
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  // Copies the row of a key, at a multiple of 4, if it is there. `mixed` is MixKey of the key.
  Found Read(uint64_t mixed, char* row) const;
  // row: null for a key without one.
  void Put(uint64_t mixed, const char* row);

  int64_t bytes() const { return static_cast<int64_t>(mapped_bytes_); }

 private:
  static constexpr int kWays = 8, kLocks = 256;

  char* RowOf(int64_t entry) const { return rows_ + entry * row_bytes_; }
  int64_t SetOf(uint64_t mixed) const;

  int64_t row_bytes_, sets_ = 0;
  size_t mapped_bytes_ = 0;
  char* memory_ = nullptr;
  char* rows_ = nullptr;       // [sets, kWays, row_bytes]
  uint64_t* keys_ = nullptr;   // [sets, kWays] mixed
  uint8_t* states_ = nullptr;  // [sets, kWays]: 0 empty, else 1 row or 2 unseen, and 4 used
  uint8_t* hands_ = nullptr;   // [sets]
  mutable std::vector<std::mutex> locks_;
};

}  // namespace sok
