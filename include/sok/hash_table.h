// Hash table from 64-bit keys to row numbers. Every key is legal; none is reserved.
//
// Layout: a directory of segments chosen by the top hash bits, each an open-addressed array of buckets. A bucket is one
// cache line: five keys, their row numbers, and how many keys had to pass it by because it was full. So a find touches
// one line, and a miss stops at the first bucket that nobody passed. A full segment is rebuilt 1.5 times as large,
// alone: growing stops the caller for one segment (about half a million keys), never for the whole table.
//
// The segment of a key is the same in every process, as files hold rows in the order of segments. Its bucket depends on the
// secret of the process (hash_key.h). So chosen keys may fill one segment, and make that one large, but no chain of buckets.
//
// Thread safety: const members may run at the same time; anything else needs the table to itself.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "sok/device.h"
#include "sok/device_memory.h"
#include "sok/device_rows.h"
#include "sok/hash_key.h"
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
  struct Segment {
    Bucket* buckets = nullptr;
    uint32_t num_buckets = 0;
    uint32_t used = 0;  // places that hold a key
  };
  static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");
  // The segment of a key, of 2^bits.
  static size_t SegmentNumber(uint64_t key, int bits) { return bits == 0 ? 0 : HashKey(key) >> (64 - bits); }

  // max_keys sizes the directory only; no bucket is allocated before the first insert. More keys than that work too.
  // seed: another one is for tests, which chooses keys against it.
  explicit HashTable(int64_t max_keys, uint64_t seed = HashSeed());
  ~HashTable();
  HashTable(const HashTable&) = delete;
  HashTable& operator=(const HashTable&) = delete;

  uint32_t Find(uint64_t key) const;

  // The same for many: rows[i] = row of keys[i]. Runs on the calling thread.
  void Find(const uint64_t* keys, int64_t n, uint32_t* rows) const;

  // Adds those of m keys that are not in the table. number_rows(first, num_new) is called once all are placed: first[k] says
  // whether position k is the first of a new key, num_new how many are. It gives the row of each such position by writing
  // rows[k]; all others then get the row of their key. If it throws, the table is as it was. Throws OutOfMemory, then nothing changed either. Serial order of k decides who is first, not threads.
  void InsertMissing(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t m, uint32_t* rows,
                     const std::function<void(const bool* first, int64_t num_new)>& number_rows);

  // Removes key; gives the row it had, or kNoRow.
  uint32_t Erase(uint64_t key);

  // Makes room for n keys in all, so that inserting up to there rebuilds nothing.
  void Reserve(int64_t n);
  // Bytes that this would add.
  int64_t MissingBytes(int64_t n) const;

  // Buckets that a search for the key looks at.
  int64_t Probes(uint64_t key) const;

  // How often keys had to pass by a full bucket, all together.
  int64_t collisions() const {
    int64_t n = 0;
    for (const Segment& s : segments_)
      for (uint32_t b = 0; b < s.num_buckets; ++b) n += s.buckets[b].passed;
    return n;
  }

  int64_t size() const { return size_; }
  int64_t memory_bytes() const;

  // f(key, row) for every key, in an order that may be another in every process: sort before anyone sees it.
  template <class F>
  void ForEach(F&& f) const {
    for (int64_t s = 0; s < num_segments(); ++s) ForEachIn(s, f);
  }

  // The same in pieces of about half a million keys; which keys a piece has depends on them alone.
  int64_t num_segments() const { return static_cast<int64_t>(segments_.size()); }
  template <class F>
  void ForEachIn(int64_t segment, F&& f) const {
    const Segment& s = segments_[static_cast<size_t>(segment)];
    for (uint32_t b = 0; b < s.num_buckets; ++b)
      for (int i = 0; i < kPlaces; ++i)
        if (s.buckets[b].rows[i] != kNoRow) f(s.buckets[b].keys[i], s.buckets[b].rows[i]);
  }

 private:
  uint64_t Hash(uint64_t key) const { return HashKey(key ^ seed_); }  // of the bucket
  size_t SegmentNumber(uint64_t key) const { return SegmentNumber(key, segment_bits_); }
  const Segment& SegmentOf(uint64_t key) const { return segments_[SegmentNumber(key)]; }
  Segment& SegmentOf(uint64_t key) { return segments_[SegmentNumber(key)]; }
  // Where the row of key is written, or null. The segment must have buckets.
  static uint32_t* FindPlace(const Segment& s, uint64_t hash, uint64_t key);
  // Gives a key that is not there a place.
  static uint32_t* Place(const Segment& s, uint64_t hash, uint64_t key, uint32_t row);
  // The place of a key that may be there; *is_new: it was not.
  static uint32_t* FindOrPlace(const Segment& s, uint64_t hash, uint64_t key, uint32_t row, bool* is_new);
  void Rebuild(Segment* s, uint64_t num_buckets) const;
  uint64_t BucketsToReserve(int64_t n) const;  // of each segment

  const uint64_t seed_;
  std::vector<Segment> segments_;
  int segment_bits_ = 0;
  int64_t size_ = 0;
};

// In place of the row of a key that has none.
inline constexpr uint32_t kNoRow = HashTable::kNoRow;

// ---- On a device

// Ten keys and their rows in 128 bytes, one line of the cache. As on the CPU, what is free is marked in the rows, and `passed`
// counts the keys that belong here or before and live behind.
struct alignas(128) DeviceBucket {
  static constexpr int kPlaces = 10;
  uint64_t keys[kPlaces];
  uint32_t rows[kPlaces];  // HashTable::kNoRow: the place is free
  uint32_t passed;
  uint32_t unused;
};
static_assert(sizeof(DeviceBucket) == 128, "a bucket is eight times 16 bytes");

// What kernels see of the table. num_buckets < 2^32; of none, nothing is found.
struct HashTableView {
  DeviceBucket* buckets = nullptr;
  uint64_t num_buckets = 0;
  uint64_t seed = 0;  // of HashKey
};

// What the device knows of a table's keys and rows.
struct DeviceHashCounters {
  int64_t size;      // keys
  int64_t next_row;  // row numbers given out so far
  int64_t num_free;  // of them, how many wait on the list
  int64_t num_new;   // keys that the last InsertMissing found new
  uint64_t key;      // for messages
};

// The table on the current device, and the numbers of its rows: 0, 1, .. in the order in which keys first appear, numbers of
// erased keys again, the one erased last first. Every key is legal. Filled to eight tenths of its places; grows by half, out
// of place, when that is not enough.
//
// Calls are put on a stream, in order; calls on several streams are the caller's to order (DeviceTable does). Not
// thread-safe on the host.
class DeviceHashTable {
 public:
  // label: how messages name the table. capacity: rows, below 2^32 - 1. No memory is taken before keys come.
  DeviceHashTable(std::string label, int64_t capacity, DeviceMemory* memory);
  ~DeviceHashTable();
  DeviceHashTable(const DeviceHashTable&) = delete;
  DeviceHashTable& operator=(const DeviceHashTable&) = delete;

  HashTableView view() const { return view_; }
  int64_t capacity() const { return capacity_; }

  // rows[i] = row of keys[i], or kNoRow. Nothing waits.
  void Find(const Cuda& cuda, const uint64_t* keys, int64_t n, uint32_t* rows) const;

  // Gives rows to the keys that Find left without one, all or none.
  // room: row numbers below it need no make_room(num_rows), which is called on the host before anything is stored: row numbers
  // will be below num_rows. It may throw; then nothing was stored. It is called again with more (SpareRows), and what it
  // throws then is of no matter if it is OutOfMemory.
  // leaders[i], if rows[i] was kNoRow, is the first position of the same key, else kNoRow: what is at leaders[i] == i is new.
  // The rows are the same in every run. Waits for the stream only if the table may have to grow, in index, in rows or past
  // its capacity. Throws InvalidArgument for n >= 2^31, what throw_full throws of the first key that has no room, OutOfMemory;
  // then nothing changed.
  void InsertMissing(const Cuda& cuda, DeviceScratch* scratch,
                     const uint64_t* keys,  // [n]
                     int64_t n,
                     uint32_t* rows,     // [n], in and out
                     uint32_t* leaders,  // [n]
                     int64_t room, const std::function<void(int64_t num_rows)>& make_room,
                     const std::function<void(uint64_t key)>& throw_full);

  // Removes keys, which may repeat or be none of the table's. erased[i] = the row that position i gave up, or kNoRow. Nothing waits, but
  // the list of free numbers may have to grow. Throws InvalidArgument for n >= 2^31, OutOfMemory; then nothing changed.
  void Erase(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, uint32_t* erased);  // [n]

  // Keys and rows of the table in the order of rows: SizeToHost of them. Nothing waits.
  void Export(const Cuda& cuda, DeviceScratch* scratch,
              uint64_t* keys,         // [size]
              uint32_t* rows) const;  // [size]
  // The same of those rows first .. first + count - 1 that the filter has. Gives, on the device, how many are in use.
  const uint32_t* Export(const Cuda& cuda, DeviceScratch* scratch, int64_t first, int64_t count,
                         uint64_t* keys,  // [count]
                         uint32_t* rows,  // [count]
                         const RowFilter& filter = {}) const;

  // Room for n keys without growing. Waits for the stream. Throws OutOfMemory, then nothing changed.
  void Reserve(const Cuda& cuda, int64_t n);

  // What the stream's work so far makes of the table. Waits for it.
  int64_t SizeToHost(const Cuda& cuda);
  // The same, and the table's owner learns nothing from it: may be asked beside other readers.
  int64_t CountToHost(const Cuda& cuda) const;

  // Exchanges keys and rows with another table of the same capacity, whose memory the caller accounts for.
  void Swap(DeviceHashTable* other);

  // No row number is above this, and no more are in use.
  int64_t rows_bound() const { return rows_bound_; }

  // InsertMissing in steps, for who gives rows to the keys of many tables at once: MakeCounters; the new keys are counted on the
  // device; if MayNotFit(as many as were asked for), the true counters are learned, and all must have rows; rows for
  // RowsAfter, then MakeKeyRoom, then, if the counters were learned, rows for SpareRows too where there is memory; the keys
  // are placed, and counters() say so; AddToBounds.
  void MakeCounters(const Cuda& cuda);
  bool MayNotFit(int64_t n, int64_t room) const;  // n new keys in so many rows, for all that the host knows
  void Learn(const DeviceHashCounters& counters);
  bool HasRowsFor(int64_t num_new) const { return num_new <= rows_left(); }
  int64_t rows_left() const { return capacity_ - size_bound_; }
  int64_t RowsAfter(int64_t num_new) const;  // row numbers will be below
  // With room for so many the next lookups of n keys need not wait for how many of them are new.
  int64_t SpareRows(int64_t num_new, int64_t n) const;
  void MakeKeyRoom(const Cuda& cuda, int64_t num_new);  // may rebuild; throws OutOfMemory
  void AddToBounds(int64_t num_new);
  // From now on SpareRows are none, for a table whose rows are exactly as many as there is memory for.
  void TakeNoSpareRows() { takes_spare_rows_ = false; }
  // Room for the numbers of as many rows when they are erased. Waits for the stream if it grows. Throws OutOfMemory, then nothing
  // changed.
  void MakeFreeRoom(const Cuda& cuda, int64_t num_rows);
  DeviceHashCounters* counters() const { return counters_; }
  const uint32_t* free_rows() const { return free_rows_; }

 private:
  void Refresh(const Cuda& cuda);
  void Rebuild(const Cuda& cuda, int64_t keys);
  int64_t Room() const;

  const std::string label_;
  const int64_t capacity_;
  DeviceMemory* const memory_;
  HashTableView view_;
  DeviceHashCounters* counters_ = nullptr;
  DeviceHashCounters* on_host_ = nullptr;  // pinned
  uint32_t* free_rows_ = nullptr;          // [free_capacity_] erased numbers
  int64_t free_capacity_ = 0;
  int64_t size_bound_ = 0;  // at least the number of keys; exact after Refresh
  int64_t rows_bound_ = 0;  // at least the row numbers given out so far
  int64_t free_bound_ = 0;  // at most the erased numbers that are to be given out again
  bool takes_spare_rows_ = true;
};

}  // namespace sok
