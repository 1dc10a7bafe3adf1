// One value beside the record of every row, such as when it was last erased.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "sok/row_store.h"

namespace sok {

// Values lie in slabs of as many rows as those of the records, so that whoever makes room for a row makes it in both. A column
// without any value takes no memory.
//
// Thread safety: that of the RowStore. Values of different rows may be written at the same time.
template <class T>
class RowColumn {
 public:
  RowColumn() = default;
  explicit RowColumn(const RowStore& rows)
      : shift_(rows.slab_shift()), num_slabs_(static_cast<size_t>(rows.num_slabs())) {}

  // Makes the value of `row`, and of its neighbours, if it is not there: zero. Throws std::bad_alloc, then nothing changed.
  void Touch(int64_t row) {
    if (slabs_.empty()) slabs_.resize(num_slabs_);
    auto& slab = slabs_[SlabOf(row)];
    if (!slab) slab = std::make_unique<T[]>(size_t{1} << shift_);
  }

  // The same for every row that the store has.
  void TouchAll(const RowStore& rows) {
    for (size_t i = 0; i < num_slabs_; ++i)
      if (const int64_t row = static_cast<int64_t>(i) << shift_; rows.Has(row)) Touch(row);
  }

  // The row must have been touched.
  T* At(int64_t row) const { return slabs_[SlabOf(row)].get() + (row & ((int64_t{1} << shift_) - 1)); }

  // At, for loops that look at many rows.
  struct View {
    const std::unique_ptr<T[]>* slabs;
    int shift;
    T* At(uint32_t row) const { return slabs[row >> shift].get() + (row & ((uint32_t{1} << shift) - 1)); }
  };
  View view() const { return {slabs_.data(), shift_}; }

  // Zero for a row that was not.
  T Get(int64_t row) const { return slabs_.empty() || !slabs_[SlabOf(row)] ? T() : *At(row); }

  void Clear() { std::vector<std::unique_ptr<T[]>>().swap(slabs_); }

  int64_t memory_bytes() const {
    const int64_t made = std::count_if(slabs_.begin(), slabs_.end(), [](const auto& slab) { return slab != nullptr; });
    return made * static_cast<int64_t>(sizeof(T) << shift_) + static_cast<int64_t>(slabs_.size() * sizeof(slabs_[0]));
  }

 private:
  size_t SlabOf(int64_t row) const { return static_cast<size_t>(row >> shift_); }

  int shift_ = 0;
  size_t num_slabs_ = 0;
  std::vector<std::unique_ptr<T[]>> slabs_;
};

}  // namespace sok
