#include "sok/row_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "sok/error.h"
#include "sok/pages.h"

namespace sok {
namespace {

constexpr int64_t kSlabBytes = int64_t{2} << 20;  // one huge page of weights
constexpr int64_t kMinRowsPerSlab = 64;
constexpr int64_t kArenaBytes = int64_t{128} << 20;

}  // namespace

RowStore::RowStore(int64_t dim, int64_t max_rows) : floats_(dim), stride_(RecordStride(dim)) {
  int64_t rows = kMinRowsPerSlab;
  shift_ = 6;
  while (rows * 2 * stride_ * static_cast<int64_t>(sizeof(float)) <= kSlabBytes) {
    rows *= 2;
    ++shift_;
  }
  mask_ = rows - 1;
  own_slabs_.assign(static_cast<size_t>((max_rows + rows - 1) >> shift_), nullptr);
  slabs_ = own_slabs_.data();
  num_slabs_ = static_cast<int64_t>(own_slabs_.size());
}

RowStore::RowStore(int64_t dim, int64_t max_rows, const StorageConfig& storage, const std::string& label,
                   const std::string& file_name)
    : RowStore(dim, storage.has_file() ? 0 : max_rows) {
  if (!storage.has_file()) return;
  tier_ = std::make_unique<RowTier>(storage, label, file_name, dim, max_rows);
  slabs_ = tier_->places();
  shift_ = 0;
  mask_ = 0;
  num_slabs_ = (max_rows + rows_per_slab() - 1) >> slab_shift();
}

RowStore::RowStore(const RowStore& shape, int64_t floats)
    : floats_(floats),
      stride_(RecordStride(floats)),
      shift_(shape.shift_),
      mask_(shape.mask_),
      num_slabs_(shape.num_slabs_),
      own_slabs_(shape.own_slabs_.size(), nullptr) {
  slabs_ = own_slabs_.data();
}

RowStore::~RowStore() {
  for (const Arena& arena : arenas_) FreePages(arena.data, arena.bytes);
}

void RowStore::Swap(RowStore* other) {
  std::swap(floats_, other->floats_);
  std::swap(stride_, other->stride_);
  std::swap(shift_, other->shift_);
  std::swap(mask_, other->mask_);
  std::swap(num_slabs_, other->num_slabs_);
  std::swap(slabs_, other->slabs_);
  own_slabs_.swap(other->own_slabs_);
  arenas_.swap(other->arenas_);
  tier_.swap(other->tier_);
}

void RowStore::Touch(int64_t row) {
  if (tier_ != nullptr) return tier_->Touch(row);
  const int64_t slab = row >> shift_;
  if (slabs_[slab] != nullptr) return;
  // The arena begins at slab 0, or at the largest power of two below, or at a multiple of the most that an arena holds.
  int64_t size = 1;
  while (size * 2 <= slab && size * 2 * slab_bytes() <= kArenaBytes) size *= 2;
  const int64_t first = slab / size * size, end = std::min(first + size, num_slabs());
  float* data = nullptr;
  for (int64_t i = first; i < end && data == nullptr; ++i)
    if (Has(i << shift_)) data = slabs_[i] - (i - first) * SlabFloats();
  if (data == nullptr) {
    if (arenas_.size() == arenas_.capacity()) arenas_.reserve(2 * arenas_.size() + 4);  // or it might fail later
    // A job may have a thousand tables of a few rows: the first slab stays in small pages until there is a second one.
    const int64_t bytes = (end - first) * slab_bytes();
    data = static_cast<float*>(AllocatePages(bytes, slab != 0, "embedding rows"));
    arenas_.push_back({data, bytes});
    if (slab == 1 && slabs_[0] != nullptr) MakeHuge(slabs_[0], slab_bytes());
  }
  slabs_[slab] = data + (slab - first) * SlabFloats();
}

void RowStore::TakePages(int64_t slab) {
  volatile char* memory = reinterpret_cast<volatile char*>(slabs_[slab]);
  for (int64_t at = 0; at < slab_bytes(); at += 4096) memory[at] = memory[at];
}

int64_t RowStore::AddFloats(const std::vector<float>& fresh, const RowTier::Facts& facts) {
  const int64_t offset = floats_, count = static_cast<int64_t>(fresh.size());
  if (tier_ != nullptr) {
    tier_ = tier_->Widened(fresh, facts);
    slabs_ = tier_->places();
    floats_ = tier_->floats();
    stride_ = RecordStride(floats_);
    return offset;
  }
  const bool zeros = std::count(fresh.begin(), fresh.end(), 0.0f) == count;
  RowStore wider(*this, floats_ + count);
  for (int64_t slab = 0; slab < num_slabs(); ++slab)
    if (slabs_[slab] != nullptr) wider.Touch(slab << shift_);
  for (int64_t slab = 0; slab < num_slabs(); ++slab) {
    if (slabs_[slab] == nullptr) continue;
    for (int64_t r = 0; r <= mask_; ++r) {
      float* to = wider.slabs_[slab] + r * wider.stride_;
      std::memcpy(to, slabs_[slab] + r * stride_, static_cast<size_t>(offset) * sizeof(float));
      if (!zeros) std::copy(fresh.begin(), fresh.end(), to + offset);
    }
    DropPages(slabs_[slab], slab_bytes());
  }
  Swap(&wider);
  return offset;
}

void RowStore::KeepVersions(RowTier::Facts facts) {
  tier_ = tier_->Widened({}, std::move(facts));
  slabs_ = tier_->places();
}

int64_t RowStore::memory_bytes() const {
  if (tier_ != nullptr) return tier_->memory_bytes();
  const int64_t used = std::count_if(own_slabs_.begin(), own_slabs_.end(), [](const float* s) { return s != nullptr; });
  return used * slab_bytes() + num_slabs() * static_cast<int64_t>(sizeof(float*));
}

int64_t RowStore::MissingSlabs(int64_t n) const {
  return tier_ != nullptr ? 0 : std::count(slabs_, slabs_ + ((n + mask_) >> shift_), nullptr);
}

}  // namespace sok
