#include "sok/hash_table.h"

#include <algorithm>
#include <utility>

#include "detail/elect.h"
#include "detail/find_row.h"
#include "detail/launch.h"
#include "detail/place_key.h"
#include "detail/primitives.h"
#include "sok/error.h"

namespace sok {

namespace {

constexpr uint32_t kNone = HashTable::kNoRow;

// Eight of ten: a find of a key that is there then reads 1.1 buckets on average, of one that is not 1.7. Of nine it would be
// 1.3 and 4.9. A table grows to what makes it three fifths full.
constexpr int64_t kPlaces = DeviceBucket::kPlaces;
constexpr int64_t kKeysInBucket = 8;
constexpr int64_t kLeastKeys = 4096;
int64_t KeysIn(uint64_t num_buckets) { return static_cast<int64_t>(num_buckets) * kKeysInBucket; }
uint64_t BucketsFor(int64_t keys) { return static_cast<uint64_t>((keys + kKeysInBucket - 1) / kKeysInBucket); }

__global__ void ClearKernel(HashTableView table) {
  // Keys may be anything where no row is, but whole lines are written faster than parts of them.
  constexpr uint64_t kNobody = ~uint64_t{0};  // two rows that are none
  ulonglong2* parts = reinterpret_cast<ulonglong2*>(table.buckets);
  for (int64_t i = GlobalThread(); i < static_cast<int64_t>(table.num_buckets) * kBucketLanes; i += GlobalThreads()) {
    const int64_t part = i % kBucketLanes;  // LoadPart
    parts[i] = make_ulonglong2(part < 5 ? 0 : kNobody, part < 5 || part == kBucketLanes - 1 ? 0 : kNobody);
  }
}

__global__ void FindKernel(HashTableView table, const uint64_t* keys, int64_t n, uint32_t* rows) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) rows[i] = FindRow(table, keys[i]);
}

__global__ void RebuildKernel(HashTableView from, HashTableView to) {
  for (int64_t i = GlobalThread(); i < static_cast<int64_t>(from.num_buckets) * kPlaces; i += GlobalThreads()) {
    const DeviceBucket& bucket = from.buckets[i / kPlaces];
    const uint32_t row = bucket.rows[i % kPlaces];
    if (row != kNone) Place(to, bucket.keys[i % kPlaces], row);
  }
}

__global__ void SetNumNewKernel(const uint32_t* before, int64_t n, DeviceHashCounters* counters) {
  counters->num_new = before[n];
}

// The key of the position that is the first to have no room.
__global__ void KeyWithoutRoomKernel(const uint64_t* keys, const uint32_t* leaders, const uint32_t* before, int64_t n,
                                     int64_t room, DeviceHashCounters* counters) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads())
    if (leaders[i] == static_cast<uint32_t>(i) && before[i] == room) counters->key = keys[i];
}

__global__ void PlaceNewKernel(HashTableView table, const uint64_t* keys, const uint32_t* leaders,
                               const uint32_t* before, int64_t n, const uint32_t* free_rows,
                               const DeviceHashCounters* counters, uint32_t* rows) {
  if (counters->num_new == 0) return;
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    if (leaders[i] != static_cast<uint32_t>(i)) continue;
    const uint32_t row = RowOfNew(*counters, free_rows, before[i]);
    Place(table, keys[i], row);
    rows[i] = row;
  }
}

__global__ void FollowLeadersKernel(const uint32_t* leaders, int64_t n, const DeviceHashCounters* counters,
                                    uint32_t* rows) {
  if (counters->num_new == 0) return;
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads())
    if (leaders[i] != kNone && leaders[i] != static_cast<uint32_t>(i)) rows[i] = rows[leaders[i]];
}

__global__ void CountInsertedKernel(DeviceHashCounters* counters) { CountInserted(counters->num_new, counters); }

// Distinct keys that the table has: no other tile looks for the same, and none writes keys.
__global__ void EraseKernel(HashTableView table, const uint64_t* keys, const uint32_t* leaders, const uint32_t* before,
                            int64_t n, const DeviceHashCounters* counters, uint32_t* free_rows, uint32_t* erased) {
  const BucketTile tile;
  const int64_t num_free = counters->num_free;
  for (int64_t i = GlobalThread() / kBucketLanes; i < n; i += GlobalThreads() / kBucketLanes) {
    if (leaders[i] != static_cast<uint32_t>(i)) {
      if (tile.lane == 0) erased[i] = kNone;
      continue;
    }
    for (uint64_t b = HomeBucket(table, keys[i]);;) {
      DeviceBucket* bucket = table.buckets + b;
      unsigned places = 0;
      for (int half = 0; half < 2; ++half) {
        const int place = half * kBucketLanes + tile.lane;
        const bool here =
            place < kPlaces && bucket->keys[place] == keys[i] && LoadRelaxed(&bucket->rows[place]) != kNone;
        places |= tile.Ballot(here) << (half * kBucketLanes);
      }
      if (places != 0) {
        if (tile.lane == 0) {
          const int place = __ffs(static_cast<int>(places)) - 1;
          erased[i] = LoadRelaxed(&bucket->rows[place]);
          free_rows[num_free + before[i]] = erased[i];
          StoreRelaxed(&bucket->rows[place], kNone);
        }
        break;
      }
      if (tile.lane == 0) atomicSub(&bucket->passed, 1u);
      if (++b == table.num_buckets) b = 0;
    }
  }
}

__global__ void CountErasedKernel(const uint32_t* before, int64_t n, DeviceHashCounters* counters) {
  counters->size -= before[n];
  counters->num_free += before[n];
}

// Of the rows first .. first + count - 1.
__global__ void ListRowsKernel(HashTableView table, int64_t first, int64_t count, RowFilter filter,
                               uint64_t* key_of_row, uint32_t* is_used) {
  for (int64_t i = GlobalThread(); i < static_cast<int64_t>(table.num_buckets) * kPlaces; i += GlobalThreads()) {
    const DeviceBucket& bucket = table.buckets[i / kPlaces];
    const uint32_t row = bucket.rows[i % kPlaces];
    if (row == kNone || row < first || row >= first + count || !filter.Has(row)) continue;
    key_of_row[row - first] = bucket.keys[i % kPlaces];
    is_used[row - first] = 1;
  }
}

__global__ void PackRowsKernel(const uint64_t* key_of_row, const uint32_t* is_used, const uint32_t* before,
                               int64_t first, int64_t count, uint64_t* keys, uint32_t* rows) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    if (is_used[i] == 0) continue;
    keys[before[i]] = key_of_row[i];
    rows[before[i]] = static_cast<uint32_t>(first + i);
  }
}

void CheckSize(const std::string& label, int64_t n) {
  if (n < 0 || n >= INT64_C(0x7FFFFFFF)) {
    throw InvalidArgument(label + ": takes fewer than 2^31 - 1 keys at a time. Received: " + std::to_string(n) + ".");
  }
}

}  // namespace

DeviceHashTable::DeviceHashTable(std::string label, int64_t capacity, DeviceMemory* memory)
    : label_(std::move(label)), capacity_(capacity), memory_(memory) {}

DeviceHashTable::~DeviceHashTable() {
  memory_->Free(view_.buckets, static_cast<int64_t>(view_.num_buckets * sizeof(DeviceBucket)));
  memory_->Free(free_rows_, free_capacity_ * static_cast<int64_t>(sizeof(uint32_t)));
  memory_->Free(counters_, sizeof(DeviceHashCounters));
  if (on_host_ != nullptr) Ignore(cudaFreeHost(on_host_));
}

int64_t DeviceHashTable::Room() const { return KeysIn(view_.num_buckets); }

void DeviceHashTable::MakeCounters(const Cuda& cuda) {
  if (counters_ != nullptr) return;
  if (on_host_ == nullptr)
    SOK_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&on_host_), sizeof(DeviceHashCounters), cudaHostAllocDefault));
  counters_ = static_cast<DeviceHashCounters*>(
      memory_->Allocate(cuda, sizeof(DeviceHashCounters), "the counters of the key index"));
  SOK_CUDA(cudaMemsetAsync(counters_, 0, sizeof(DeviceHashCounters), cuda.stream));
}

void DeviceHashTable::Refresh(const Cuda& cuda) {
  MakeCounters(cuda);
  SOK_CUDA(cudaMemcpyAsync(on_host_, counters_, sizeof(DeviceHashCounters), cudaMemcpyDeviceToHost, cuda.stream));
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  Learn(*on_host_);
}

void DeviceHashTable::Learn(const DeviceHashCounters& counters) {
  size_bound_ = counters.size;
  rows_bound_ = counters.next_row;
  free_bound_ = counters.num_free;
}

bool DeviceHashTable::MayNotFit(int64_t n, int64_t room) const {
  const int64_t rows = rows_bound_ + n - std::min(n, free_bound_);
  return size_bound_ + n > std::min(Room(), capacity_) || rows > std::min(room, capacity_);
}

int64_t DeviceHashTable::RowsAfter(int64_t num_new) const {
  // Numbers on the free list go first. There may be more of them than the host knows, and fewer new keys than it fears, so this may
  // be more than are needed, but never more than there are.
  return std::min(rows_bound_ + num_new - std::min(num_new, free_bound_), capacity_);
}

int64_t DeviceHashTable::SpareRows(int64_t num_new, int64_t n) const {
  // A part of the table, so that a large one seldom waits; a batch, so that a small one does not wait each time.
  constexpr int64_t kMostOfABatch = int64_t{1} << 18;
  const int64_t rows = RowsAfter(num_new);
  if (!takes_spare_rows_) return rows;
  return std::min(rows + std::max(rows / 8, std::min(n, kMostOfABatch)), capacity_);
}

void DeviceHashTable::MakeKeyRoom(const Cuda& cuda, int64_t num_new) {
  const int64_t keys = size_bound_ + num_new;
  if (keys > Room()) Rebuild(cuda, std::min(capacity_, std::max({keys + keys / 3, Room() + Room() / 2, kLeastKeys})));
}

void DeviceHashTable::AddToBounds(int64_t num_new) {
  size_bound_ += num_new;
  rows_bound_ = RowsAfter(num_new);
  free_bound_ -= std::min(num_new, free_bound_);
}

void DeviceHashTable::Rebuild(const Cuda& cuda, int64_t keys) {
  if (BucketsFor(keys) >= (uint64_t{1} << 32)) {
    throw OutOfMemory(label_ + ": the key index cannot hold " + std::to_string(keys) + " keys.");
  }
  HashTableView bigger;
  bigger.num_buckets = BucketsFor(keys);
  bigger.seed = HashSeed();
  const int64_t bytes = static_cast<int64_t>(bigger.num_buckets * sizeof(DeviceBucket));
  bigger.buckets = static_cast<DeviceBucket*>(memory_->Allocate(
      cuda, bytes,
      view_.buckets == nullptr ? "the key index"
                               : "a larger key index (while keys move, both are there; Reserve avoids that)"));
  Launch(ClearKernel, GridOf(static_cast<int64_t>(bigger.num_buckets) * kBucketLanes), kThreads, 0, cuda, bigger);
  Launch(RebuildKernel, GridOf(static_cast<int64_t>(view_.num_buckets) * kPlaces), kThreads, 0, cuda, view_, bigger);
  memory_->Free(cuda, view_.buckets, static_cast<int64_t>(view_.num_buckets * sizeof(DeviceBucket)));
  view_ = bigger;
}

void DeviceHashTable::Reserve(const Cuda& cuda, int64_t n) {
  if (counters_ == nullptr) Refresh(cuda);
  if (n > Room()) Rebuild(cuda, n);
}

int64_t DeviceHashTable::SizeToHost(const Cuda& cuda) {
  Refresh(cuda);
  return size_bound_;
}

void DeviceHashTable::Find(const Cuda& cuda, const uint64_t* keys, int64_t n, uint32_t* rows) const {
  Launch(FindKernel, GridOf(n), kThreads, 0, cuda, view_, keys, n, rows);
}

void DeviceHashTable::InsertMissing(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n,
                                    uint32_t* rows, uint32_t* leaders, int64_t room,
                                    const std::function<void(int64_t)>& make_room,
                                    const std::function<void(uint64_t)>& throw_full) {
  CheckSize(label_, n);
  if (n == 0) return;
  MakeCounters(cuda);
  const uint32_t* before = Elect<Speaker::kFirst>(cuda, scratch, keys, n, rows, /*missing=*/true, leaders).before;
  Launch(SetNumNewKernel, 1, 1, 0, cuda, before, n, counters_);
  // Were all of them new, would they fit? Then nobody has to wait for how many are. Else ask.
  int64_t num_new = n;
  const bool may_not_fit = MayNotFit(n, room);
  if (may_not_fit) {
    Refresh(cuda);
    num_new = on_host_->num_new;
    if (!HasRowsFor(num_new)) {
      Launch(KeyWithoutRoomKernel, GridOf(n), kThreads, 0, cuda, keys, leaders, before, n, rows_left(), counters_);
      Refresh(cuda);
      throw_full(on_host_->key);
    }
  }
  make_room(RowsAfter(num_new));
  MakeKeyRoom(cuda, num_new);
  if (may_not_fit) {
    try {
      make_room(SpareRows(num_new, n));
    } catch (const OutOfMemory&) {  // these keys have their rows
    }
  }
  Launch(PlaceNewKernel, GridOf(n), kThreads, 0, cuda, view_, keys, leaders, before, n, free_rows_, counters_, rows);
  Launch(FollowLeadersKernel, GridOf(n), kThreads, 0, cuda, leaders, n, counters_, rows);
  Launch(CountInsertedKernel, 1, 1, 0, cuda, counters_);
  AddToBounds(num_new);
}

void DeviceHashTable::MakeFreeRoom(const Cuda& cuda, int64_t num_rows) {
  if (num_rows <= free_capacity_) return;
  Refresh(cuda);
  const int64_t word = sizeof(uint32_t);
  auto* longer = static_cast<uint32_t*>(memory_->Allocate(cuda, num_rows * word, "the list of free row numbers"));
  if (on_host_->num_free > 0) {
    SOK_CUDA(cudaMemcpyAsync(longer, free_rows_, static_cast<size_t>(on_host_->num_free * word),
                             cudaMemcpyDeviceToDevice, cuda.stream));
  }
  memory_->Free(cuda, free_rows_, free_capacity_ * word);
  free_rows_ = longer;
  free_capacity_ = num_rows;
}

void DeviceHashTable::Erase(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n,
                            uint32_t* erased) {
  CheckSize(label_, n);
  if (n == 0) return;
  if (counters_ == nullptr) Refresh(cuda);
  // At most every number given out so far is on the list.
  if (free_capacity_ < rows_bound_) MakeFreeRoom(cuda, std::min(capacity_, rows_bound_ + rows_bound_ / 2));
  uint32_t* rows = scratch->Get<uint32_t>(n);
  Find(cuda, keys, n, rows);
  const Elected elected = Elect<Speaker::kFirst>(cuda, scratch, keys, n, rows, /*missing=*/false, nullptr);
  Launch(EraseKernel, GridOfTiles(n), kThreads, 0, cuda, view_, keys, elected.leaders, elected.before, n, counters_,
         free_rows_, erased);
  Launch(CountErasedKernel, 1, 1, 0, cuda, elected.before, n, counters_);
}

void DeviceHashTable::Export(const Cuda& cuda, DeviceScratch* scratch, uint64_t* keys, uint32_t* rows) const {
  Export(cuda, scratch, 0, rows_bound_, keys, rows);
}

const uint32_t* DeviceHashTable::Export(const Cuda& cuda, DeviceScratch* scratch, int64_t first, int64_t count,
                                        uint64_t* keys, uint32_t* rows, const RowFilter& filter) const {
  uint64_t* key_of_row = scratch->Get<uint64_t>(count);
  uint32_t* is_used = scratch->Get<uint32_t>(count + 1);  // and a last one that is not
  uint32_t* before = scratch->Get<uint32_t>(count + 1);
  SOK_CUDA(cudaMemsetAsync(is_used, 0, static_cast<size_t>(count + 1) * sizeof(uint32_t), cuda.stream));
  Launch(ListRowsKernel, GridOf(static_cast<int64_t>(view_.num_buckets) * kPlaces), kThreads, 0, cuda, view_, first,
         count, filter, key_of_row, is_used);
  ExclusiveSum(cuda, scratch, is_used, before, count + 1);
  Launch(PackRowsKernel, GridOf(count), kThreads, 0, cuda, key_of_row, is_used, before, first, count, keys, rows);
  return before + count;
}

int64_t DeviceHashTable::CountToHost(const Cuda& cuda) const {
  if (counters_ == nullptr) return 0;
  DeviceHashCounters counters;
  SOK_CUDA(cudaMemcpyAsync(&counters, counters_, sizeof(counters), cudaMemcpyDeviceToHost, cuda.stream));
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  return counters.size;
}

void DeviceHashTable::Swap(DeviceHashTable* other) {
  std::swap(view_, other->view_);
  std::swap(counters_, other->counters_);
  std::swap(on_host_, other->on_host_);
  std::swap(free_rows_, other->free_rows_);
  std::swap(free_capacity_, other->free_capacity_);
  std::swap(size_bound_, other->size_bound_);
  std::swap(rows_bound_, other->rows_bound_);
  std::swap(free_bound_, other->free_bound_);
}

}  // namespace sok
