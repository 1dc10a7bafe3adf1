// When a key gets a row of its own, and when a row leaves: docs/policies.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "sok/hash_key.h"
#include "sok/partition.h"

namespace sok {

struct TableConfig;

// What a row with a policy has seen: beside its record, and in files the two scalars of the slot set kHistorySet. A count stops at
// its largest value.
struct [[gnu::may_alias]] alignas(8) RowHistory {
  uint32_t count = 0;  // steps whose batches held the key
  uint32_t last = 0;   // updates of the table after the last of them; 0: no batch held it
};
inline constexpr char kHistorySet[] = "history", kHistoryRule[] = "history(;count,last)";

struct Policies {
  // A key gets its row in the step that is its `after`-th; 0: in the first, and nothing is counted for that.
  int64_t after = 0;
  // Counted are keys by a Bloom filter of so many cells of 8 bits for each bucket of keys, a multiple of 4; 0: each key by itself.
  int64_t bloom_cells = 0;
  int64_t bloom_hashes = 0;
  // A key gets a row only if a hash of it is below; 0: every key.
  uint64_t admit_below = 0;
  uint64_t chance_seed = 0;
  // Keys without rows of their own share so many, a multiple of 2^kBucketBits, those of a bucket with each other; 0: none.
  int64_t shared_rows = 0;
  // What keys without rows read: their initial rows, or a constant.
  bool reads_constant = false;
  float constant = 0.0f;
  // A pass follows each update whose number is a multiple of `every`. In it rows leave that no batch has held for `older_than`
  // steps, and those whose L2 norm is below `norm_below`; 0: none.
  int64_t older_than = 0;
  float norm_below = 0.0f;
  // Rows that are left of all workers after a pass, at most; 0: any number. Each bucket of keys (partition.h) has its part of them,
  // and keeps those that were held last, or most often: a count is worth half of itself for each `half_life` steps since the
  // last, or all of it where that is 0.
  int64_t max_rows = 0;
  bool keeps_frequent = false;
  int64_t half_life = 0;
  // A bucket gives up rows at the end of every step that leaves it with more than its part, until it has LeftOf that: not in passes.
  bool when_full = false;
  int64_t every = 1;
  // Keys whose rows never leave, ascending, each once.
  std::vector<uint64_t> kept;

  bool admits() const { return after > 0 || admit_below > 0; }
  bool evicts() const { return older_than > 0 || norm_below > 0.0f || max_rows > 0; }
  bool any() const { return admits() || evicts(); }
  bool passes() const { return older_than > 0 || norm_below > 0.0f || (max_rows > 0 && !when_full); }
  bool IsPassAt(int64_t step) const { return passes() && step % every == 0; }

  // Throws InvalidArgument if they make no sense, or do not go with the table.
  void Check(const TableConfig& table) const;

  // Where a key is counted in the cells of its bucket, `i` in [0, bloom_hashes). Files rely on it: it never changes.
  int64_t CellOf(uint64_t key, int64_t i) const {
    constexpr uint64_t kFirst = 0x626C6F6F6D31, kSecond = 0x626C6F6F6D32;
    const uint64_t step = HashKey(key ^ kSecond) | 1;
    return static_cast<int64_t>((HashKey(key ^ kFirst) + static_cast<uint64_t>(i) * step) %
                                static_cast<uint64_t>(bloom_cells));
  }
  // Rows that are left of a bucket.
  int64_t MaxRowsOf(int64_t bucket) const {
    const int64_t whole = max_rows >> kBucketBits, rest = max_rows & ((1 << kBucketBits) - 1);
    return whole + ((rest * (bucket + 1)) >> kBucketBits) - ((rest * bucket) >> kBucketBits);
  }
  // How many rows a full bucket is left with: it is not full again at once.
  static constexpr int kFreedShift = 4;
  int64_t LeftOf(int64_t bucket) const { return MaxRowsOf(bucket) - (MaxRowsOf(bucket) >> kFreedShift); }

  // The key of the row that a key shares; and whether a key is one of these. Files rely on them: they never change.
  uint64_t SharedKey(uint64_t key) const {
    constexpr uint64_t kOfShared = 0x736861726564;
    const uint64_t number = HashKey(key ^ kOfShared) % static_cast<uint64_t>(shared_rows >> kBucketBits);
    return KeyOfBucketHash((BucketHash(key) & ~kInBucket) | (kFirstShared + number));
  }
  bool IsShared(uint64_t key) const {
    return shared_rows > 0 &&
           (BucketHash(key) & kInBucket) - kFirstShared < static_cast<uint64_t>(shared_rows >> kBucketBits);
  }
  bool NeverLeaves(uint64_t key) const {
    return IsShared(key) || (!kept.empty() && std::binary_search(kept.begin(), kept.end(), key));
  }

  // What stays rather than what has less, in a pass after update `now`.
  double Score(uint32_t count, uint32_t last, int64_t now) const {
    if (!keeps_frequent) return last;
    const double age = half_life > 0 ? static_cast<double>(now - last) / static_cast<double>(half_life) : 0.0;
    return std::log2(static_cast<double>(count)) - age;
  }

  // Files and other workers rely on it: it never changes.
  bool HasLuck(uint64_t key) const {
    constexpr uint64_t kOfAdmission = 0x61646D6974;
    return admit_below == 0 || HashKey(key ^ HashKey(chance_seed ^ kOfAdmission)) < admit_below;
  }

  bool operator==(const Policies& other) const {
    return after == other.after && bloom_cells == other.bloom_cells && bloom_hashes == other.bloom_hashes &&
           admit_below == other.admit_below && chance_seed == other.chance_seed && older_than == other.older_than &&
           norm_below == other.norm_below && max_rows == other.max_rows && keeps_frequent == other.keeps_frequent &&
           half_life == other.half_life && when_full == other.when_full && every == other.every &&
           shared_rows == other.shared_rows && reads_constant == other.reads_constant && constant == other.constant &&
           kept == other.kept;
  }

 private:
  static constexpr uint64_t kInBucket = (uint64_t{1} << (64 - kBucketBits)) - 1, kFirstShared = 0x5A3C1E96D2000;
};

// What policies have done to a shard since it was made.
struct PolicyCounts {
  int64_t candidates = 0;  // keys that are counted and have no row, now
  int64_t made = 0;        // rows
  int64_t refused = 0;     // keys of lookups that make rows, repeats included, that got none
  int64_t evicted = 0;     // rows
};

}  // namespace sok
