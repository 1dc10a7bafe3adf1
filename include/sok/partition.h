// Which rank owns a key. The Python twin is sok/table/placement.py.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/philox.h"
#include "sok/scratch.h"

namespace sok {

// What `owner` is, of a table whose rows are not all on the rank of that number.
inline constexpr int kByKey = -1;   // row of a key: on rank key mod world_size
inline constexpr int kByHash = -2;  // on the rank that has the bucket of the key; hashed tables only
// Below: over some ranks that follow one another, by key or by bucket. OwnerOfRanks gives the number.
inline constexpr int kByRanks = -3;
inline constexpr int kRankBits = 14;

// A bucket is on one rank at any world size, whole. There are 2^kBucketBits of them, and at most as many ranks.
inline constexpr int kBucketBits = 12;

// Files rely on this hash: it never changes. It is another one than that of hash tables, where the keys of one rank would
// crowd otherwise. (The finaliser of MurmurHash3; Appleby, 2011.)
SOK_HOST_DEVICE uint64_t BucketHash(uint64_t key) {
  key = (key ^ (key >> 33)) * 0xFF51AFD7ED558CCDull;
  key = (key ^ (key >> 33)) * 0xC4CEB9FE1A85EC53ull;
  return key ^ (key >> 33);
}
SOK_HOST_DEVICE int BucketOf(uint64_t key) { return static_cast<int>(BucketHash(key) >> (64 - kBucketBits)); }

// The inverse of BucketOf's hash, whose upper bits are the bucket.
SOK_HOST_DEVICE uint64_t KeyOfBucketHash(uint64_t hash) {
  uint64_t key = hash;
  key = (key ^ (key >> 33)) * 0x9CB4B2F8129337DBull;  // the inverses of BucketOf's factors
  key = (key ^ (key >> 33)) * 0x4F74430C22A54005ull;
  return key ^ (key >> 33);
}

// A key of the bucket: what is kept of whole buckets goes by it.
SOK_HOST_DEVICE uint64_t KeyOfBucket(int bucket) {
  return KeyOfBucketHash(static_cast<uint64_t>(bucket) << (64 - kBucketBits));
}

// Row-wise: owner = key mod world_size, never negative. Signed keys are 64-bit two's complement words.
SOK_HOST_DEVICE int Owner(uint64_t key, int world_size, bool is_unsigned) {
  const uint64_t world = static_cast<uint64_t>(world_size);
  // Powers of two divide 2^64, so the low bits say it for words of either sign, without a division.
  if ((world & (world - 1)) == 0) return static_cast<int>(key & (world - 1));
  if (is_unsigned || static_cast<int64_t>(key) >= 0) return static_cast<int>(key % world);
  const int64_t r = static_cast<int64_t>(key) % world_size;
  return static_cast<int>(r < 0 ? r + world_size : r);
}

SOK_HOST_DEVICE int OwnerOfBucket(int bucket, int world_size) {
  return static_cast<int>((static_cast<int64_t>(bucket) * world_size) >> kBucketBits);
}

// `count` ranks from `first` on, each below 2^kRankBits, as one number. Files hold it.
constexpr int OwnerOfRanks(int first, int count, bool by_hash) {
  return kByRanks - (((first << kRankBits) + count) * 2 + by_hash);
}

// How the rows of a table lie on ranks: over `num_shards` of them from `first_rank` on, each row on that of its key or of
// its bucket. Row-wise these are all ranks, table-wise one.
struct Partition {
  int world_size = 1;
  int owner = kByKey;
  bool is_unsigned = false;

  SOK_HOST_DEVICE int OwnerOf(uint64_t key) const {
    if (owner == kByKey) return Owner(key, world_size, is_unsigned);
    if (owner >= 0) return owner;
    if (owner == kByHash) return OwnerOfBucket(BucketOf(key), world_size);
    return first_rank() +
           (is_by_hash() ? OwnerOfBucket(BucketOf(key), num_shards()) : Owner(key, num_shards(), is_unsigned));
  }
  SOK_HOST_DEVICE bool is_by_hash() const { return owner == kByHash || (owner <= kByRanks && (code() & 1) != 0); }
  SOK_HOST_DEVICE int first_rank() const {
    return owner >= 0 ? owner : owner > kByRanks ? 0 : static_cast<int>(code() >> (kRankBits + 1));
  }
  // Ranks that hold rows. The row of key k in an identity table is k / num_shards.
  SOK_HOST_DEVICE int num_shards() const {
    return owner >= 0 ? 1 : owner > kByRanks ? world_size : static_cast<int>((code() >> 1) & ((1 << kRankBits) - 1));
  }
  bool Holds(int rank) const { return rank >= first_rank() && rank - first_rank() < num_shards(); }
  // Whether ranks are numbered from 0 to world_size - 1, and rows are on some of them, by bucket on no more than there are.
  bool IsValid() const {
    return world_size >= 1 && num_shards() >= 1 && first_rank() < world_size &&
           num_shards() <= world_size - first_rank() && (!is_by_hash() || num_shards() <= (1 << kBucketBits));
  }

 private:
  SOK_HOST_DEVICE int64_t code() const { return int64_t{kByRanks} - owner; }
};

// On a device: keys sorted by the rank that owns them, those of one rank in the order they came, as an all-to-all sends
// them. Nothing waits. Repeats bit for bit. Throws InvalidArgument for n >= 2^31, for a world_size below 1 and for an owner
// outside it.
void PartitionKeys(const Cuda& cuda, DeviceScratch* scratch, const Partition& partition,
                   const uint64_t* keys,  // [n]
                   int64_t n,
                   uint64_t* sorted_keys,  // [n]
                   uint32_t* positions,    // [n]: sorted_keys[k] = keys[positions[k]]
                   uint32_t* places,       // [n] or null: sorted_keys[places[i]] = keys[i]
                   int64_t* counts);       // [world_size]: how many each rank owns

}  // namespace sok
