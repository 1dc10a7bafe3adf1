// Rows: one contiguous record of floats each, in slabs that are allocated when their first row appears.
//
// A record is [weights | slots of the first optimizer | slots of the second | ...]. Widening the record (AddFloats)
// moves records in memory but keeps row numbers.
//
// Thread safety: Record may be called at the same time from many threads; anything else needs the store to itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sok {

class RowStore {
 public:
  // dim: floats per row before any slots. max_rows bounds row numbers.
  RowStore(int64_t dim, int64_t max_rows);
  ~RowStore();
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  // Allocates the slab of `row` if it has none. New memory reads as zero. Throws OutOfMemory.
  void Touch(int64_t row);

  // Has the system back every page of a slab now, not when it is first written. The slab must have been allocated.
  void TakePages(int64_t slab);

  bool Has(int64_t row) const { return slabs_[static_cast<size_t>(row >> shift_)] != nullptr; }

  // [floats()], valid until the next AddFloats.
  float* Record(int64_t row) { return slabs_[static_cast<size_t>(row >> shift_)] + (row & mask_) * stride_; }
  const float* Record(int64_t row) const {
    return slabs_[static_cast<size_t>(row >> shift_)] + (row & mask_) * stride_;
  }

  // Widens every record by `count` floats of value `init`; gives the offset of the first. Throws OutOfMemory, then
  // nothing changed.
  int64_t AddFloats(int64_t count, float init);

  void Swap(RowStore* other);

  int64_t floats() const { return floats_; }
  // The parts of Record, for loops that cannot call it.
  float* const* slabs() const { return slabs_.data(); }
  int shift() const { return shift_; }
  int64_t stride() const { return stride_; }

  int64_t rows_per_slab() const { return mask_ + 1; }
  int64_t num_slabs() const { return static_cast<int64_t>(slabs_.size()); }
  int64_t memory_bytes() const;

 private:
  int64_t SlabBytes() const { return (mask_ + 1) * stride_ * static_cast<int64_t>(sizeof(float)); }

  int64_t floats_;
  int64_t stride_;  // floats_ rounded up to 16 bytes, so that vector loads of a record are aligned
  int shift_;
  int64_t mask_;
  std::vector<float*> slabs_;
};

}  // namespace sok
