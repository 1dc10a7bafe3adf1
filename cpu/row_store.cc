#include "sok/row_store.h"

#include <algorithm>
#include <cstring>

#include "pages.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kSlabBytes = int64_t{2} << 20;  // one huge page of weights
constexpr int64_t kMinRowsPerSlab = 64;

}  // namespace

RowStore::RowStore(int64_t dim, int64_t max_rows) : floats_(dim), stride_(RecordStride(dim)) {
  int64_t rows = kMinRowsPerSlab;
  shift_ = 6;
  while (rows * 2 * stride_ * static_cast<int64_t>(sizeof(float)) <= kSlabBytes) {
    rows *= 2;
    ++shift_;
  }
  mask_ = rows - 1;
  slabs_.assign(static_cast<size_t>((max_rows + rows - 1) >> shift_), nullptr);
}

RowStore::~RowStore() {
  for (float* slab : slabs_) FreePages(slab, SlabBytes());
}

void RowStore::Swap(RowStore* other) {
  std::swap(floats_, other->floats_);
  std::swap(stride_, other->stride_);
  std::swap(shift_, other->shift_);
  std::swap(mask_, other->mask_);
  slabs_.swap(other->slabs_);
}

void RowStore::Touch(int64_t row) {
  const size_t number = static_cast<size_t>(row >> shift_);
  float*& slab = slabs_[number];
  if (slab != nullptr) return;
  // A job may have a thousand tables of a few rows: the first slab stays in small pages until there is a second one.
  slab = static_cast<float*>(AllocatePages(SlabBytes(), number != 0, "embedding rows"));
  if (number == 1 && slabs_[0] != nullptr) MakeHuge(slabs_[0], SlabBytes());
}

void RowStore::TakePages(int64_t slab) {
  volatile char* memory = reinterpret_cast<volatile char*>(slabs_[static_cast<size_t>(slab)]);
  for (int64_t at = 0; at < SlabBytes(); at += 4096) memory[at] = memory[at];
}

int64_t RowStore::AddFloats(int64_t count, float init) {
  const int64_t old_floats = floats_, old_stride = stride_, old_bytes = SlabBytes();
  const int64_t new_stride = RecordStride(old_floats + count);
  const int64_t new_bytes = (mask_ + 1) * new_stride * static_cast<int64_t>(sizeof(float));
  std::vector<float*> moved(slabs_.size(), nullptr);
  try {
    for (size_t i = 0; i < slabs_.size(); ++i) {
      if (slabs_[i] == nullptr) continue;
      moved[i] = static_cast<float*>(
          AllocatePages(new_bytes, i != 0 || (slabs_.size() > 1 && slabs_[1] != nullptr), "embedding rows"));
    }
  } catch (...) {
    for (float* slab : moved) FreePages(slab, new_bytes);
    throw;
  }
  for (size_t i = 0; i < slabs_.size(); ++i) {
    if (slabs_[i] == nullptr) continue;
    for (int64_t r = 0; r <= mask_; ++r) {
      float* to = moved[i] + r * new_stride;
      std::memcpy(to, slabs_[i] + r * old_stride, static_cast<size_t>(old_floats) * sizeof(float));
      if (init != 0.0f) std::fill(to + old_floats, to + old_floats + count, init);
    }
    FreePages(slabs_[i], old_bytes);  // slab by slab, so that the old copy's pages go as the new one's come
  }
  slabs_ = std::move(moved);
  floats_ += count;
  stride_ = new_stride;
  return old_floats;
}

int64_t RowStore::memory_bytes() const {
  const int64_t used = std::count_if(slabs_.begin(), slabs_.end(), [](const float* s) { return s != nullptr; });
  return used * SlabBytes() + static_cast<int64_t>(slabs_.size() * sizeof(float*));
}

}  // namespace sok
