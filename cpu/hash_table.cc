#include "sok/hash_table.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>

#include "cpu_features.h"
#include "sok/error.h"
#include "sok/pages.h"
#include "tasks.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sok {
namespace {

using Bucket = HashTable::Bucket;
using Segment = HashTable::Segment;
constexpr int kPlaces = HashTable::kPlaces;
constexpr int64_t kKeysPerSegment = int64_t{1} << 19;  // a rebuild of this many takes 10 to 20 ms
constexpr int kMaxSegmentBits = 12;
constexpr int64_t kNewKeysPerChunk = 8192, kMaxChunks = 16;  // of new keys, which are dealt to segments chunk by chunk
constexpr int64_t kHugeBytes = int64_t{2} << 20;

// Every segment without buckets points here: an empty bucket that nobody passed ends any probe at once.
const Bucket kEmptyBucket = {{}, {kNoRow, kNoRow, kNoRow, kNoRow, kNoRow}, 0};

// The low bits of Hash choose the bucket, by multiplication, so any bucket count works.
inline uint32_t Home(uint64_t hash, uint32_t num_buckets) {
  return static_cast<uint32_t>((uint64_t{static_cast<uint32_t>(hash)} * num_buckets) >> 32);
}

// Four fifths: 16 bytes a key. Above, more and more keys live outside their home bucket: 13 % here, 17 % at seven eighths.
// Growing by half leaves a segment 53 % full.
inline uint64_t MaxUsed(uint64_t num_buckets) { return num_buckets * (kPlaces - 1); }

// Seven eighths: so long a segment may wait for its turn to grow.
inline uint64_t UsedAtMost(uint64_t num_buckets) { return num_buckets * kPlaces * 7 / 8; }

// Segments fill up side by side, and would all grow in one step.
constexpr int kGrowingAtOnce = 2;

inline uint64_t BucketsFor(uint64_t n) { return n / (kPlaces - 1) + 1; }

// A large segment takes whole huge pages, lest its end lies in small ones, unless that adds more than a fifth.
inline uint64_t FillPages(uint64_t num_buckets) {
  constexpr uint64_t kPerPage = static_cast<uint64_t>(kHugeBytes) / sizeof(Bucket);
  const uint64_t filled = (num_buckets + kPerPage - 1) / kPerPage * kPerPage;
  return filled - num_buckets <= num_buckets / 5 ? filled : num_buckets;
}

// The place of key in one bucket, or -1. A free place may still hold the key that was erased from it.
inline int FindInBucket(const Bucket& bucket, uint64_t key) {
  for (int i = 0; i < kPlaces; ++i)
    if (bucket.keys[i] == key && bucket.rows[i] != kNoRow) return i;
  return -1;
}

// Looks each key up in one bucket; left[] gets those for which that bucket was not the end of the search. Has room for n + 1.
using FindInBuckets = int (*)(const uint64_t* keys, const Bucket* const* buckets, int n, uint32_t* rows, int* left);

int FindInBucketsGeneric(const uint64_t* keys, const Bucket* const* buckets, int n, uint32_t* rows, int* left) {
  int num_left = 0;
  for (int i = 0; i < n; ++i) {
    const Bucket& bucket = *buckets[i];
    uint32_t row = kNoRow;
    for (int j = 0; j < kPlaces; ++j)
      row = bucket.keys[j] == keys[i] && bucket.rows[j] != kNoRow ? bucket.rows[j] : row;
    rows[i] = row;
    left[num_left] = i;
    num_left += row == kNoRow && bucket.passed != 0;
  }
  return num_left;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) int FindInBucketsAvx2(const uint64_t* keys, const Bucket* const* buckets, int n,
                                                      uint32_t* rows, int* left) {
  int num_left = 0;
  for (int i = 0; i < n; ++i) {
    const Bucket& bucket = *buckets[i];
    const __m256i four = _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket.keys));
    const __m256i wanted = _mm256_set1_epi64x(static_cast<int64_t>(keys[i]));
    int found = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(four, wanted)));
    found |= (bucket.keys[4] == keys[i]) << 4;
    uint32_t row = kNoRow;
    for (; found != 0 && row == kNoRow; found &= found - 1)
      row = bucket.rows[__builtin_ctz(static_cast<unsigned>(found))];
    rows[i] = row;
    left[num_left] = i;
    num_left += row == kNoRow && bucket.passed != 0;
  }
  return num_left;
}

__attribute__((target("avx512f"))) int FindInBucketsAvx512(const uint64_t* keys, const Bucket* const* buckets, int n,
                                                           uint32_t* rows, int* left) {
  const __m512i no_row = _mm512_set1_epi32(-1);
  int num_left = 0;
  for (int i = 0; i < n; ++i) {
    // Keys are the 64-bit lanes 0 to 4 of the line, rows its 32-bit lanes 10 to 14.
    const __m512i line = _mm512_load_si512(buckets[i]);
    const unsigned same = _mm512_cmpeq_epi64_mask(line, _mm512_set1_epi64(static_cast<int64_t>(keys[i]))) & 0x1Fu;
    const unsigned used = (static_cast<unsigned>(_mm512_cmpneq_epi32_mask(line, no_row)) >> 10) & 0x1Fu;
    const unsigned found = same & used;
    const uint32_t at_place = buckets[i]->rows[__builtin_ctz(found | 0x10u)];
    const uint32_t row = found != 0 ? at_place : kNoRow;
    rows[i] = row;
    left[num_left] = i;
    num_left += row == kNoRow && buckets[i]->passed != 0;
  }
  return num_left;
}
#endif

// Finds the home buckets of the keys of a table and asks the memory for them.
using AskForHomes = void (*)(const Segment* segments, int bits, uint64_t seed, const uint64_t* keys, int64_t n,
                             const Bucket** homes);

void AskForHomesGeneric(const Segment* segments, int bits, uint64_t seed, const uint64_t* keys, int64_t n,
                        const Bucket** homes) {
  for (int64_t i = 0; i < n; ++i) {
    const Segment& s = segments[HashTable::SegmentNumber(keys[i], bits)];
    homes[i] = s.num_buckets == 0 ? &kEmptyBucket : s.buckets + Home(HashKey(keys[i] ^ seed), s.num_buckets);
    __builtin_prefetch(homes[i]);
  }
}

#if defined(__x86_64__)
#define SOK_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq")))

// HashKey of eight.
typedef uint64_t Eight __attribute__((vector_size(64)));
SOK_AVX512 inline Eight HashKeys(Eight x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

SOK_AVX512 void AskForHomesAvx512(const Segment* segments, int bits, uint64_t seed, const uint64_t* keys, int64_t n,
                                  const Bucket** homes) {
  if (n != 8) return AskForHomesGeneric(segments, bits, seed, keys, n, homes);
  const Eight key = (Eight)_mm512_loadu_si512(keys), hash = HashKeys(key ^ seed);
  const Eight number = bits == 0 ? Eight{} : HashKeys(key) >> (64 - bits);
  for (int i = 0; i < 8; ++i) {
    const Segment& s = segments[number[i]];
    homes[i] = s.num_buckets == 0 ? &kEmptyBucket : s.buckets + Home(hash[i], s.num_buckets);
    // Into the second cache an Intel has three times as many lines on their way as into the first.
    __builtin_prefetch(homes[i], 0, 2);
  }
}
#endif

struct Searcher {
  AskForHomes ask_for_homes;
  FindInBuckets find_in_buckets;
  int64_t blocks_ahead;  // how far before the search the memory is asked
};

Searcher ChooseSearcher() {
#if defined(__x86_64__)
  switch (ChosenIsa()) {
    case Isa::kAvx512:
      return {AskForHomesAvx512, FindInBucketsAvx512, 7};
    case Isa::kAvx2:
      return {AskForHomesGeneric, FindInBucketsAvx2, 3};
    case Isa::kGeneric:
      break;
  }
#endif
  return {AskForHomesGeneric, FindInBucketsGeneric, 3};
}

}  // namespace

HashTable::HashTable(int64_t max_keys, uint64_t seed) : seed_(seed) {
  while (segment_bits_ < kMaxSegmentBits && (kKeysPerSegment << segment_bits_) < max_keys) ++segment_bits_;
  segments_.resize(size_t{1} << segment_bits_);
}

HashTable::~HashTable() {
  for (Segment& s : segments_) FreePages(s.buckets, int64_t{s.num_buckets} * static_cast<int64_t>(sizeof(Bucket)));
}

void HashTable::Find(const uint64_t* keys, int64_t n, uint32_t* rows) const {
  static const Searcher searcher = ChooseSearcher();
  // While the buckets of one block of keys are searched, those of the next ones are on their way to the cache. Blocks
  // are small: a processor has some dozen lines on their way, and asking for more at once stops it. A key that lives
  // outside its home bucket asks for the bucket behind it, and is searched for there some blocks later.
  constexpr int64_t kBlock = 8, kRound = 32 * kBlock, kRing = 8;  // above blocks_ahead; a power of two
  const int64_t ahead = searcher.blocks_ahead * kBlock;
  const Bucket* homes[kRing][kBlock];
  int64_t left[kRound];  // positions of keys whose search goes on, and where
  uint64_t left_keys[kRound];
  const Bucket* behind[kRound];
  const Bucket* began[kRound];
  int64_t num_left = 0;
  auto go_on = [&](int64_t at, const Bucket* bucket, const Bucket* home) {
    const Segment& s = SegmentOf(keys[at]);
    const Bucket* next = bucket + 1 == s.buckets + s.num_buckets ? s.buckets : bucket + 1;
    // Each bucket of a small segment may have been passed by a key that is still there: once around is enough.
    if (next == home) return;
    __builtin_prefetch(next);
    left[num_left] = at;
    left_keys[num_left] = keys[at];
    began[num_left] = home;
    behind[num_left++] = next;
  };
  auto prepare = [&](int64_t at) {
    if (at >= n) return;
    // The processor's own prefetching loses sight of the keys between the buckets.
    __builtin_prefetch(keys + std::min(at + 16 * kBlock, n));
    searcher.ask_for_homes(segments_.data(), segment_bits_, seed_, keys + at, std::min(kBlock, n - at),
                           homes[at / kBlock & (kRing - 1)]);
  };
  for (int64_t at = 0; at < ahead; at += kBlock) prepare(at);
  for (int64_t round = 0; round < n; round += kRound) {
    for (int64_t at = round; at < std::min(n, round + kRound); at += kBlock) {
      prepare(at + ahead);
      const Bucket* const* of_block = homes[at / kBlock & (kRing - 1)];
      int left_of_block[kBlock + 1];
      const int count = searcher.find_in_buckets(keys + at, of_block, static_cast<int>(std::min(kBlock, n - at)),
                                                 rows + at, left_of_block);
      for (int i = 0; i < count; ++i) {
        const Bucket* home = of_block[left_of_block[i]];
        go_on(at + left_of_block[i], home, home);
      }
    }
    while (num_left > 0) {
      uint32_t found[kRound];
      int still_left[kRound + 1];
      const int64_t searched = std::exchange(num_left, 0);
      const int count = searcher.find_in_buckets(left_keys, behind, static_cast<int>(searched), found, still_left);
      for (int64_t i = 0; i < searched; ++i) rows[left[i]] = found[i];
      for (int i = 0; i < count; ++i) {
        const int k = still_left[i];
        go_on(left[k], behind[k], began[k]);
      }
    }
  }
}

uint32_t HashTable::Find(uint64_t key) const {
  const Segment& s = SegmentOf(key);
  if (s.num_buckets == 0) return kNoRow;
  const uint32_t* place = FindPlace(s, Hash(key), key);
  return place == nullptr ? kNoRow : *place;
}

int64_t HashTable::Probes(uint64_t key) const {
  const Segment& s = SegmentOf(key);
  if (s.num_buckets == 0) return 1;
  int64_t probes = 1;
  const uint32_t home = Home(Hash(key), s.num_buckets);
  for (uint32_t b = home; FindInBucket(s.buckets[b], key) < 0 && s.buckets[b].passed != 0; ++probes) {
    if (++b == s.num_buckets) b = 0;
    if (b == home) break;
  }
  return probes;
}

uint32_t* HashTable::FindPlace(const Segment& s, uint64_t hash, uint64_t key) {
  const uint32_t home = Home(hash, s.num_buckets);
  uint32_t b = home;
  do {
    const int place = FindInBucket(s.buckets[b], key);
    if (place >= 0) return &s.buckets[b].rows[place];
    if (s.buckets[b].passed == 0) return nullptr;
    if (++b == s.num_buckets) b = 0;
  } while (b != home);  // where keys were erased, each of few buckets may have been passed
  return nullptr;
}

uint32_t* HashTable::Place(const Segment& s, uint64_t hash, uint64_t key, uint32_t row) {
  for (uint32_t b = Home(hash, s.num_buckets);;) {
    Bucket& bucket = s.buckets[b];
    for (int i = 0; i < kPlaces; ++i) {
      if (bucket.rows[i] != kNoRow) continue;
      bucket.keys[i] = key;
      bucket.rows[i] = row;
      return &bucket.rows[i];
    }
    ++bucket.passed;
    if (++b == s.num_buckets) b = 0;
  }
}

uint32_t* HashTable::FindOrPlace(const Segment& s, uint64_t hash, uint64_t key, uint32_t row, bool* is_new) {
  const uint32_t home = Home(hash, s.num_buckets);
  Bucket* to = nullptr;  // the first with a free place
  int place = 0;
  int64_t full = 0;  // buckets before that
  bool ended = false;
  *is_new = false;
  for (uint32_t b = home; !ended || to == nullptr;) {
    Bucket& bucket = s.buckets[b];
    for (int i = 0; i < kPlaces; ++i) {
      if (bucket.rows[i] == kNoRow) {
        if (to == nullptr) {
          to = &bucket;
          place = i;
        }
      } else if (bucket.keys[i] == key) {
        return &bucket.rows[i];
      }
    }
    full += to == nullptr;
    if (++b == s.num_buckets) b = 0;
    ended = ended || bucket.passed == 0 || b == home;
  }
  for (uint32_t b = home; full > 0; --full) {
    ++s.buckets[b].passed;
    if (++b == s.num_buckets) b = 0;
  }
  to->keys[place] = key;
  to->rows[place] = row;
  *is_new = true;
  return &to->rows[place];
}

void HashTable::Rebuild(Segment* s, uint64_t num_buckets) const {
  if (num_buckets >= (uint64_t{1} << 31)) throw OutOfMemory("a hash table segment cannot hold this many keys");
  num_buckets = FillPages(num_buckets);
  Segment bigger;
  const int64_t bytes = static_cast<int64_t>(num_buckets * sizeof(Bucket));
  bigger.buckets = static_cast<Bucket*>(AllocatePages(bytes, bytes >= kHugeBytes, "the key index"));
  bigger.num_buckets = static_cast<uint32_t>(num_buckets);
  bigger.used = s->used;
  std::fill(bigger.buckets, bigger.buckets + num_buckets, kEmptyBucket);
  for (uint32_t b = 0; b < s->num_buckets; ++b) {
    for (int i = 0; i < kPlaces; ++i) {
      const Bucket& from = s->buckets[b];
      if (from.rows[i] != kNoRow) Place(bigger, Hash(from.keys[i]), from.keys[i], from.rows[i]);
    }
  }
  FreePages(s->buckets, int64_t{s->num_buckets} * static_cast<int64_t>(sizeof(Bucket)));
  *s = bigger;
}

void HashTable::InsertMissing(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t m, uint32_t* rows,
                              const std::function<void(const bool*, int64_t)>& number_rows) {
  // Stable order by segment: segments are then filled side by side, each in order of position.
  const int64_t num_segments = this->num_segments(),
                chunks = std::min(MaxWorkers(cpu, m / kNewKeysPerChunk), kMaxChunks);
  auto chunk_begin = [&](int64_t c) { return m * c / chunks; };
  uint64_t* hashes = scratch->Get<uint64_t>(m);
  uint32_t* order = scratch->Get<uint32_t>(m);
  uint32_t* next = scratch->Get<uint32_t>(chunks * num_segments);  // in `order`, of each chunk's keys of each segment
  std::fill_n(next, chunks * num_segments, 0u);
  ForTasks(cpu, chunks, m * 10, [&](int64_t, int64_t c) {
    for (int64_t k = chunk_begin(c); k < chunk_begin(c + 1); ++k) {
      hashes[k] = Hash(keys[k]);
      ++next[c * num_segments + static_cast<int64_t>(SegmentNumber(keys[k]))];
    }
  });
  struct Share {  // of a segment that gets keys: order[begin .. end)
    Segment* segment;
    uint32_t begin, end;
    uint64_t used_after() const { return uint64_t{segment->used} + (end - begin); }
  };
  Share* shares = scratch->Get<Share>(std::min(m, num_segments));
  int64_t num_shares = 0;
  uint32_t at = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    const uint32_t begin = at;
    for (int64_t c = 0; c < chunks; ++c) at += std::exchange(next[c * num_segments + s], at);
    if (at > begin) shares[num_shares++] = {&segments_[static_cast<size_t>(s)], begin, at};
  }
  ForTasks(cpu, chunks, m * 10, [&](int64_t, int64_t c) {
    for (int64_t k = chunk_begin(c); k < chunk_begin(c + 1); ++k)
      order[next[c * num_segments + static_cast<int64_t>(SegmentNumber(keys[k]))]++] = static_cast<uint32_t>(k);
  });

  // Room first, so that no bucket moves while keys are placed.
  Share** growing = scratch->Get<Share*>(num_shares);
  int64_t num_growing = 0, num_full = 0, cost = 0;
  for (const bool full : {true, false}) {
    for (Share* share = shares; share != shares + num_shares; ++share) {
      const uint64_t used = share->used_after(), num_buckets = share->segment->num_buckets;
      if (used <= MaxUsed(num_buckets) || full != (used > UsedAtMost(num_buckets))) continue;
      if (!full && num_growing >= std::max<int64_t>(num_full, kGrowingAtOnce)) break;
      growing[num_growing++] = share;
      cost += static_cast<int64_t>(used) * 50;
    }
    if (full) num_full = num_growing;
  }
  std::atomic<bool> no_memory{false};
  ForTasks(cpu, num_growing, cost, [&](int64_t, int64_t i) {
    const uint64_t num_buckets = growing[i]->segment->num_buckets;
    try {
      Rebuild(growing[i]->segment, std::max(BucketsFor(growing[i]->used_after()), num_buckets + num_buckets / 2));
    } catch (...) {  // out of memory, or too many keys
      no_memory.store(true);
    }
  });
  if (no_memory.load()) throw OutOfMemory("the system has no memory for the key index");

  // Until rows are numbered, a place holds the position of its key.
  uint32_t** places = scratch->Get<uint32_t*>(m);
  bool* first = scratch->Get<bool>(m);
  std::atomic<int64_t> num_new{0};
  ForTasks(cpu, num_shares, m * 60, [&](int64_t, int64_t i) {
    const Share& share = shares[i];
    Segment& segment = *share.segment;
    constexpr uint32_t kAhead = 12, kKeysAhead = 3 * kAhead;  // of buckets, and of what says where they are
    const uint32_t used = segment.used;
    for (uint32_t at = share.begin; at < share.end; ++at) {
      const uint32_t left = share.end - at;
      if (left > kKeysAhead) {
        const uint32_t k = order[at + kKeysAhead];
        __builtin_prefetch(&hashes[k]);
        __builtin_prefetch(&keys[k]);
        __builtin_prefetch(&places[k], 1);
      }
      if (left > kAhead) __builtin_prefetch(segment.buckets + Home(hashes[order[at + kAhead]], segment.num_buckets), 1);
      const uint32_t k = order[at];
      places[k] = FindOrPlace(segment, hashes[k], keys[k], k, &first[k]);
      segment.used += first[k];
    }
    num_new.fetch_add(segment.used - used, std::memory_order_relaxed);
  });
  size_ += num_new.load();
  try {
    number_rows(first, num_new.load());
  } catch (...) {
    for (int64_t k = 0; k < m; ++k)
      if (first[k]) Erase(keys[k]);
    throw;
  }
  cpu.executor.For(m, 20, [&](int64_t from, int64_t to) {
    for (int64_t k = from; k < to; ++k)
      if (first[k]) *places[k] = rows[k];
  });
  cpu.executor.For(m, 20, [&](int64_t from, int64_t to) {
    for (int64_t k = from; k < to; ++k)
      if (!first[k]) rows[k] = *places[k];
  });
}

uint32_t HashTable::Erase(uint64_t key) {
  Segment& s = SegmentOf(key);
  if (s.num_buckets == 0) return kNoRow;
  const uint64_t hash = Hash(key);
  uint32_t* place = FindPlace(s, hash, key);
  if (place == nullptr) return kNoRow;
  for (uint32_t b = Home(hash, s.num_buckets); place < s.buckets[b].rows || place >= s.buckets[b].rows + kPlaces;) {
    --s.buckets[b].passed;  // this key no longer lives beyond
    if (++b == s.num_buckets) b = 0;
  }
  --s.used;
  --size_;
  return std::exchange(*place, kNoRow);
}

uint64_t HashTable::BucketsToReserve(int64_t n) const {
  // Keys spread over segments like balls over bins: a few standard deviations above the mean are enough.
  const double mean = static_cast<double>(n) / static_cast<double>(segments_.size());
  return BucketsFor(segments_.size() == 1 ? static_cast<uint64_t>(n)
                                          : static_cast<uint64_t>(mean + 5.0 * __builtin_sqrt(mean) + 8.0));
}

void HashTable::Reserve(int64_t n) {
  const uint64_t wanted = BucketsToReserve(n);
  for (Segment& s : segments_)
    if (wanted > s.num_buckets) Rebuild(&s, wanted);
}

int64_t HashTable::MissingBytes(int64_t n) const {
  const uint64_t wanted = BucketsToReserve(n), filled = FillPages(wanted);
  uint64_t missing = 0;
  for (const Segment& s : segments_)
    if (wanted > s.num_buckets) missing += filled - s.num_buckets;
  return static_cast<int64_t>(missing * sizeof(Bucket));
}

int64_t HashTable::memory_bytes() const {
  int64_t bytes = static_cast<int64_t>(segments_.size() * sizeof(Segment));
  for (const Segment& s : segments_) bytes += int64_t{s.num_buckets} * static_cast<int64_t>(sizeof(Bucket));
  return bytes;
}

}  // namespace sok
