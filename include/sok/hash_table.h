// Hash table from 64-bit keys to row numbers. Every key is legal; none is reserved.
//
// Layout: a directory of segments chosen by the top hash bits, each an open-addressed array of buckets. A bucket is one
// cache line: five keys, their row numbers, and how many keys had to pass it by because it was full. So a find touches
// one line, and a miss stops at the first bucket that nobody passed. A full segment is rebuilt 1.25 times as large,
// alone: growing stops the caller for one segment (at most about half a million keys), never for the whole table.
//
// Thread safety: const members may run at the same time; anything else needs the table to itself.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "sok/device.h"
#include "sok/scratch.h"

namespace sok {

class HashTable {
 public:
  static constexpr uint32_t kNoRow = 0xFFFFFFFFu;
  static constexpr int kPlaces = 5;
  struct alignas(64) Bucket {
    uint64_t keys[kPlaces];
    uint32_t rows[kPlaces];  // kNoRow: the place is free
    uint32_t passed;         // keys that belong here or before and live after
  };
  static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

  // max_keys sizes the directory only; no bucket is allocated before the first insert. More keys than that work too.
  explicit HashTable(int64_t max_keys);
  ~HashTable();
  HashTable(const HashTable&) = delete;
  HashTable& operator=(const HashTable&) = delete;

  uint32_t Find(uint64_t key) const;

  // The same for many: rows[i] = row of keys[i]. Runs on the calling thread.
  void Find(const uint64_t* keys, int64_t n, uint32_t* rows) const;

  // Adds m keys that are not in the table, but may repeat among themselves. number_rows(first, num_new) is called once
  // all are placed: first[k] says whether position k is the first of its key, num_new how many are. It gives the row of
  // each such position by writing rows[k]; all others then get the row of the first. If it throws, the table is as it
  // was. Throws OutOfMemory, then nothing changed either. Serial order of k decides who is first, not threads.
  void InsertMissing(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t m, uint32_t* rows,
                     const std::function<void(const bool* first, int64_t num_new)>& number_rows);

  // Removes key; gives the row it had, or kNoRow.
  uint32_t Erase(uint64_t key);

  // Makes room for n keys in all, so that inserting up to there rebuilds nothing.
  void Reserve(int64_t n);

  int64_t size() const { return size_; }
  int64_t memory_bytes() const;

  // f(key, row) for every key, in an order that is unspecified but the same for the same history.
  template <class F>
  void ForEach(F&& f) const {
    for (int64_t s = 0; s < num_segments(); ++s) ForEachIn(s, f);
  }

  // The same in pieces of about half a million keys at most.
  int64_t num_segments() const { return static_cast<int64_t>(segments_.size()); }
  template <class F>
  void ForEachIn(int64_t segment, F&& f) const {
    const Segment& s = segments_[static_cast<size_t>(segment)];
    for (uint32_t b = 0; b < s.num_buckets; ++b)
      for (int i = 0; i < kPlaces; ++i)
        if (s.buckets[b].rows[i] != kNoRow) f(s.buckets[b].keys[i], s.buckets[b].rows[i]);
  }

 private:
  struct Segment {
    Bucket* buckets = nullptr;
    uint32_t num_buckets = 0;
    uint32_t used = 0;  // places that hold a key
  };

  const Segment& SegmentOf(uint64_t hash) const {
    return segments_[segment_bits_ == 0 ? 0 : hash >> (64 - segment_bits_)];
  }
  Segment& SegmentOf(uint64_t hash) { return const_cast<Segment&>(std::as_const(*this).SegmentOf(hash)); }
  void Prepare(const uint64_t* keys, int64_t n, const Bucket** homes) const;
  // Where the row of key is written, or null. The segment must have buckets.
  static uint32_t* FindPlace(const Segment& s, uint64_t hash, uint64_t key);
  static uint32_t* Place(const Segment& s, uint64_t hash, uint64_t key, uint32_t row);
  static void Rebuild(Segment* s, uint64_t num_buckets);

  std::vector<Segment> segments_;
  int segment_bits_ = 0;
  int64_t size_ = 0;
};

}  // namespace sok
