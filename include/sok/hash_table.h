// Hash table from 64-bit keys to row numbers. Every key is legal; none is reserved.
//
// Layout: a directory of segments chosen by the top hash bits, each an open-addressed array of buckets of eight keys
// (one cache line) beside their eight row numbers. A full segment is rebuilt 1.25 times as large, alone: growing stops
// the caller for one segment (at most about half a million keys), never for the whole table, and memory stays within
// 12 bytes per key / load factor 0.7 .. 0.875.
//
// Thread safety: const members may run at the same time; anything else needs the table to itself.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace sok {

class HashTable {
 public:
  static constexpr uint32_t kNoRow = 0xFFFFFFFFu;
  static constexpr int kBlock = 32;  // keys per software-pipelined block

  // max_keys sizes the directory only; no bucket is allocated before the first insert. More keys than that work too.
  explicit HashTable(int64_t max_keys);
  ~HashTable();
  HashTable(const HashTable&) = delete;
  HashTable& operator=(const HashTable&) = delete;

  // Hashes up to kBlock keys and asks the memory for their buckets. Call Resolve for the same keys a little later.
  void Prepare(const uint64_t* keys, int n, uint64_t* hashes) const;

  // rows[i] = row of keys[i], or kNoRow. hashes as written by Prepare for the same keys.
  void Resolve(const uint64_t* keys, const uint64_t* hashes, int n, uint32_t* rows) const;

  uint32_t Find(uint64_t key) const;

  // The row of key, and whether it was added just now with row number `row`. Throws OutOfMemory, then nothing changed.
  std::pair<uint32_t, bool> FindOrInsert(uint64_t key, uint32_t row);

  // Removes key; gives the row it had, or kNoRow.
  uint32_t Erase(uint64_t key);

  // Makes room for n keys in all, so that inserting up to there rebuilds nothing.
  void Reserve(int64_t n);

  int64_t size() const { return size_; }
  int64_t memory_bytes() const;

  // f(key, row) for every key, in an order that is unspecified but the same for the same history.
  template <class F>
  void ForEach(F&& f) const {
    for (int i = 0; i < 2; ++i)
      if (marker_row_[i] != kNoRow) f(kMarker[i], marker_row_[i]);
    for (const Segment& s : segments_)
      for (uint64_t i = 0; i < uint64_t{s.num_buckets} * 8; ++i)
        if (s.keys[i] != kMarker[0] && s.keys[i] != kMarker[1]) f(s.keys[i], s.rows[i]);
  }

 private:
  // Two arbitrary key values mark free and erased places; the rows of these two keys themselves live in marker_row_.
  static constexpr uint64_t kMarker[2] = {0xB5C0FBCFEC4D3B2Full, 0xE9B5DBA58189DBBCull};

  struct Segment {
    uint64_t* keys = nullptr;  // [num_buckets * 8], 64-byte aligned
    uint32_t* rows = nullptr;  // [num_buckets * 8]
    uint32_t num_buckets = 0;
    uint32_t used = 0;    // places that hold a key
    uint32_t erased = 0;  // places marked erased
  };

  Segment& SegmentOf(uint64_t hash) { return segments_[segment_bits_ == 0 ? 0 : hash >> (64 - segment_bits_)]; }
  const Segment& SegmentOf(uint64_t hash) const {
    return segments_[segment_bits_ == 0 ? 0 : hash >> (64 - segment_bits_)];
  }
  static uint32_t Probe(const Segment& s, uint64_t hash, uint64_t key);
  static void Place(const Segment& s, uint64_t hash, uint64_t key, uint32_t row);
  static void Rebuild(Segment* s, uint64_t num_buckets);

  std::vector<Segment> segments_;
  int segment_bits_ = 0;
  int64_t size_ = 0;
  uint32_t marker_row_[2] = {kNoRow, kNoRow};
};

}  // namespace sok
