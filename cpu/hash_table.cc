#include "sok/hash_table.h"

#include <algorithm>

#include "pages.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int kBucket = 8;
constexpr int64_t kKeysPerSegment = int64_t{1} << 19;  // a rebuild of this many takes 10 to 20 ms
constexpr int kMaxSegmentBits = 12;
constexpr int64_t kPlaceBytes = sizeof(uint64_t) + sizeof(uint32_t);
constexpr int64_t kHugeBytes = int64_t{2} << 20;

// Two rounds of xor-shift and multiply: every output bit depends on every key bit (finaliser after Stafford, 2011).
inline uint64_t Hash(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The low hash bits choose the bucket (the high ones chose the segment), by multiplication, so any bucket count works.
inline uint32_t Home(uint64_t hash, uint32_t num_buckets) {
  return static_cast<uint32_t>((uint64_t{static_cast<uint32_t>(hash)} * num_buckets) >> 32);
}

// At most 7/8 of the places are used or erased: longer and probes run through several buckets.
inline uint64_t MaxFilled(uint64_t num_buckets) { return num_buckets * kBucket * 7 / 8; }

inline uint64_t BucketsFor(uint64_t n) { return std::max<uint64_t>(1, (n * 8 + 7) / 7 / kBucket + 1); }

}  // namespace

HashTable::HashTable(int64_t max_keys) {
  while (segment_bits_ < kMaxSegmentBits && (kKeysPerSegment << segment_bits_) < max_keys) ++segment_bits_;
  segments_.resize(size_t{1} << segment_bits_);
}

HashTable::~HashTable() {
  for (Segment& s : segments_) FreePages(s.keys, int64_t{s.num_buckets} * kBucket * kPlaceBytes);
}

void HashTable::Prepare(const uint64_t* keys, int n, uint64_t* hashes) const {
  for (int i = 0; i < n; ++i) {
    hashes[i] = Hash(keys[i]);
    const Segment& s = SegmentOf(hashes[i]);
    const uint64_t place = uint64_t{Home(hashes[i], s.num_buckets)} * kBucket;
    __builtin_prefetch(s.keys + place);
    __builtin_prefetch(s.rows + place);
  }
}

uint32_t HashTable::Probe(const Segment& s, uint64_t hash, uint64_t key) {
  if (s.num_buckets == 0) return kNoRow;
  for (uint32_t b = Home(hash, s.num_buckets);;) {
    const uint64_t* bucket = s.keys + uint64_t{b} * kBucket;
    bool has_free = false;
    for (int i = 0; i < kBucket; ++i) {
      if (bucket[i] == key) return s.rows[uint64_t{b} * kBucket + static_cast<uint64_t>(i)];
      has_free |= bucket[i] == kMarker[0];
    }
    if (has_free) return kNoRow;
    if (++b == s.num_buckets) b = 0;
  }
}

void HashTable::Resolve(const uint64_t* keys, const uint64_t* hashes, int n, uint32_t* rows) const {
  for (int i = 0; i < n; ++i) {
    if (keys[i] == kMarker[0] || keys[i] == kMarker[1]) {
      rows[i] = marker_row_[keys[i] == kMarker[1]];
    } else {
      rows[i] = Probe(SegmentOf(hashes[i]), hashes[i], keys[i]);
    }
  }
}

uint32_t HashTable::Find(uint64_t key) const {
  uint64_t hash = Hash(key);
  uint32_t row;
  Resolve(&key, &hash, 1, &row);
  return row;
}

void HashTable::Place(const Segment& s, uint64_t hash, uint64_t key, uint32_t row) {
  for (uint32_t b = Home(hash, s.num_buckets);;) {
    for (uint64_t i = uint64_t{b} * kBucket; i < uint64_t{b} * kBucket + kBucket; ++i) {
      if (s.keys[i] == kMarker[0]) {
        s.keys[i] = key;
        s.rows[i] = row;
        return;
      }
    }
    if (++b == s.num_buckets) b = 0;
  }
}

void HashTable::Rebuild(Segment* s, uint64_t num_buckets) {
  if (num_buckets >= (uint64_t{1} << 32)) throw OutOfMemory("a hash table segment cannot hold this many keys");
  Segment bigger;
  const int64_t bytes = static_cast<int64_t>(num_buckets) * kBucket * kPlaceBytes;
  bigger.keys = static_cast<uint64_t*>(AllocatePages(bytes, bytes >= kHugeBytes, "the key index"));
  bigger.rows = reinterpret_cast<uint32_t*>(bigger.keys + num_buckets * kBucket);
  bigger.num_buckets = static_cast<uint32_t>(num_buckets);
  bigger.used = s->used;
  std::fill(bigger.keys, bigger.keys + num_buckets * kBucket, kMarker[0]);
  for (uint64_t i = 0; i < uint64_t{s->num_buckets} * kBucket; ++i) {
    const uint64_t key = s->keys[i];
    if (key != kMarker[0] && key != kMarker[1]) Place(bigger, Hash(key), key, s->rows[i]);
  }
  FreePages(s->keys, int64_t{s->num_buckets} * kBucket * kPlaceBytes);
  *s = bigger;
}

std::pair<uint32_t, bool> HashTable::FindOrInsert(uint64_t key, uint32_t row) {
  if (key == kMarker[0] || key == kMarker[1]) {
    uint32_t& held = marker_row_[key == kMarker[1]];
    if (held != kNoRow) return {held, false};
    held = row;
    ++size_;
    return {row, true};
  }
  const uint64_t hash = Hash(key);
  Segment& s = SegmentOf(hash);
  const uint32_t found = Probe(s, hash, key);
  if (found != kNoRow) return {found, false};
  if (s.used + s.erased + 1 > MaxFilled(s.num_buckets)) {
    // Many erased places: rebuild at the same size to get rid of them; else a quarter larger.
    const bool crowded = s.used + 1 > MaxFilled(s.num_buckets) * 3 / 4;
    Rebuild(&s, crowded ? s.num_buckets + std::max<uint64_t>(1, s.num_buckets / 4) : s.num_buckets);
  }
  Place(s, hash, key, row);
  ++s.used;
  ++size_;
  return {row, true};
}

uint32_t HashTable::Erase(uint64_t key) {
  if (key == kMarker[0] || key == kMarker[1]) {
    uint32_t& held = marker_row_[key == kMarker[1]];
    const uint32_t row = held;
    if (row != kNoRow) --size_;
    held = kNoRow;
    return row;
  }
  const uint64_t hash = Hash(key);
  Segment& s = SegmentOf(hash);
  if (s.num_buckets == 0) return kNoRow;
  for (uint32_t b = Home(hash, s.num_buckets);;) {
    uint64_t* bucket = s.keys + uint64_t{b} * kBucket;
    const uint64_t* end = bucket + kBucket;
    const bool has_free = std::find(bucket, bucket + kBucket, kMarker[0]) != end;
    uint64_t* place = std::find(bucket, bucket + kBucket, key);
    if (place != end) {
      // A bucket that never overflowed stops every probe anyway, so its place can simply become free.
      *place = has_free ? kMarker[0] : kMarker[1];
      if (!has_free) ++s.erased;
      --s.used;
      --size_;
      return s.rows[place - s.keys];
    }
    if (has_free) return kNoRow;
    if (++b == s.num_buckets) b = 0;
  }
}

void HashTable::Reserve(int64_t n) {
  // Keys spread over segments like balls over bins: a few standard deviations above the mean are enough.
  const double mean = static_cast<double>(n) / static_cast<double>(segments_.size());
  const uint64_t per_segment = segments_.size() == 1 ? static_cast<uint64_t>(n)
                                                     : static_cast<uint64_t>(mean + 5.0 * __builtin_sqrt(mean) + 8.0);
  for (Segment& s : segments_) {
    const uint64_t wanted = BucketsFor(per_segment + s.erased);
    if (wanted > s.num_buckets) Rebuild(&s, wanted);
  }
}

int64_t HashTable::memory_bytes() const {
  int64_t bytes = static_cast<int64_t>(segments_.size() * sizeof(Segment));
  for (const Segment& s : segments_) bytes += int64_t{s.num_buckets} * kBucket * kPlaceBytes;
  return bytes;
}

}  // namespace sok
