// Rows: one contiguous record of floats each, in slabs that are there from their first row on. Slabs lie in arenas, mappings of
// one slab, then one, two, four and so on up to some 128 MiB each: a process may have 65,530 mappings by default, and far more
// slabs. The rest of an arena is address space alone until its rows are written.
//
// A record is [weights | slots of the first optimizer | slots of the second | ...]. Widening the record (AddFloats)
// moves records in memory but keeps row numbers.
//
// With a RowTier only some rows are in memory: Record is for those that were brought in.
//
// Thread safety: Record and Peek may be called at the same time from many threads; anything else needs the store to itself.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sok/device.h"
#include "sok/device_memory.h"
#include "sok/device_rows.h"
#include "sok/row_tier.h"
#include "sok/storage_config.h"

namespace sok {

// How wide records are in memory: whole 16 bytes from four floats on, so that vector loads of a record are aligned.
constexpr int64_t RecordStride(int64_t floats) { return floats < 4 ? floats : (floats + 3) / 4 * 4; }

class RowStore {
 public:
  // dim: floats per row before any slots. max_rows bounds row numbers.
  RowStore(int64_t dim, int64_t max_rows);
  // The same with rows in a file, if the configuration says so. label: of the table, for messages; file_name: see RowLog.
  RowStore(int64_t dim, int64_t max_rows, const StorageConfig& storage, const std::string& label,
           const std::string& file_name);
  ~RowStore();
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  // Allocates the slab of `row` if it has none. New memory reads as zero. Throws OutOfMemory.
  void Touch(int64_t row);

  // Has the system back every page of a slab now, not when it is first written. The slab must have been allocated.
  void TakePages(int64_t slab);

  bool Has(int64_t row) const { return slabs_[row >> shift_] != nullptr; }

  // [floats()], valid until the next AddFloats; with a tier, until the next Bring.
  float* Record(int64_t row) { return slabs_[row >> shift_] + (row & mask_) * stride_; }
  const float* Record(int64_t row) const { return slabs_[row >> shift_] + (row & mask_) * stride_; }

  // Null: all rows are in memory.
  RowTier* tier() const { return tier_.get(); }
  bool IsHere(int64_t row) const { return tier_ == nullptr || tier_->IsHere(row); }
  // To read a record wherever it is: see RowTier.
  const float* Peek(int64_t row, RowTier::Failure* failure) const {
    return tier_ == nullptr ? Record(row) : tier_->Peek(row, failure);
  }

  // Widens every record by the floats `fresh`; gives the offset of the first. While rows move, their new places are
  // taken one by one as the old ones are given back. facts: of a tier with versions. Throws OutOfMemory, then nothing changed.
  int64_t AddFloats(const std::vector<float>& fresh, const RowTier::Facts& facts = {});

  // The tier has versions from now on. Throws what RowTier::Widened does.
  void KeepVersions(RowTier::Facts facts);

  void Swap(RowStore* other);

  int64_t floats() const { return floats_; }
  // The parts of Record, for loops that cannot call it.
  float* const* slabs() const { return slabs_; }
  int shift() const { return shift_; }
  int64_t mask() const { return mask_; }
  int64_t stride() const { return stride_; }

  // Touch makes so many rows at a time; with a tier, whose slabs are places of single rows, as many as elsewhere.
  int slab_shift() const { return tier_ == nullptr ? shift_ : RowTier::kSlabShift; }
  int64_t rows_per_slab() const { return int64_t{1} << slab_shift(); }
  int64_t num_slabs() const { return num_slabs_; }
  int64_t memory_bytes() const;
  // How many slabs Touch would add for rows 0 .. n - 1, and what one takes; none with a tier.
  int64_t MissingSlabs(int64_t n) const;
  int64_t slab_bytes() const { return SlabFloats() * static_cast<int64_t>(sizeof(float)); }

 private:
  struct Arena {
    float* data;
    int64_t bytes;
  };

  RowStore(const RowStore& shape, int64_t floats);  // none of its rows, and wider
  int64_t SlabFloats() const { return (mask_ + 1) * stride_; }

  int64_t floats_;
  int64_t stride_;  // floats_ rounded up to 16 bytes, so that vector loads of a record are aligned
  int shift_;
  int64_t mask_;
  int64_t num_slabs_;
  float** slabs_;  // of own_slabs_, or the places of the tier
  std::vector<float*> own_slabs_;
  std::vector<Arena> arenas_;
  std::unique_ptr<RowTier> tier_;
};

// ---- On a device

// The same records in device memory. Slabs are larger, so that there are at most about a thousand. Not thread-safe on the
// host; calls on several streams are the caller's to order.
class DeviceRowStore {
 public:
  // A slab has `least_slab_bytes` or nearly, unless all rows together have less, or there would be too many slabs. The last one ends
  // with the rows.
  DeviceRowStore(int64_t dim, int64_t max_rows, DeviceMemory* memory, int64_t least_slab_bytes = int64_t{2} << 20);
  ~DeviceRowStore();
  DeviceRowStore(const DeviceRowStore&) = delete;
  DeviceRowStore& operator=(const DeviceRowStore&) = delete;

  // What kernels see. Valid until the next AddFloats.
  DeviceRows view() const;

  // Slabs for rows 0 .. num_rows - 1; new memory holds anything. Nothing waits. Throws OutOfMemory, then slabs that were
  // there still are.
  void Reserve(const Cuda& cuda, int64_t num_rows);
  int64_t num_rows() const { return std::min(num_slabs_ << shift_, max_rows_); }  // that have a slab

  // Widens every record by `count` floats, fresh [count] on the device; gives the offset of the first. Slab by
  // slab: while rows move, two slabs are there twice. Nothing waits. Throws OutOfMemory, then no row has changed.
  int64_t AddFloats(const Cuda& cuda, int64_t count, const float* fresh);

  // Exchanges the rows with a store of the same dim and max_rows, whose memory the caller accounts for.
  void Swap(DeviceRowStore* other);

  int64_t floats() const { return floats_; }

 private:
  int64_t RowsOfSlab(size_t number) const {
    return std::min(mask_ + 1, max_rows_ - (static_cast<int64_t>(number) << shift_));
  }
  int64_t SlabBytes(size_t number, int64_t stride) const {
    return RowsOfSlab(number) * stride * static_cast<int64_t>(sizeof(float));
  }

  struct Slab {
    float* data = nullptr;
    int64_t bytes = 0;  // more than its rows take where a widening was given up
  };
  void SetSlab(const Cuda& cuda, size_t number, Slab slab);
  // Records of another stride, with `count` floats of `fresh` behind them.
  void Widen(const Cuda& cuda, int64_t num_rows, const Slab& from, int64_t from_stride, int64_t count,
             const float* fresh, int64_t to_stride, const Slab& to) const;

  DeviceMemory* const memory_;
  const int64_t max_rows_;
  int64_t floats_, stride_;
  int shift_;
  int64_t mask_;
  int64_t max_slabs_;
  int64_t num_slabs_ = 0;
  std::vector<Slab> slabs_;         // as the host knows them
  float** device_slabs_ = nullptr;  // [max_slabs]
};

// out[i] = floats first .. first + count - 1 of the record of rows[i]; zeros for kNoRow. Nothing waits.
void GatherRecords(const Cuda& cuda, const DeviceRows& records, const uint32_t* rows, int64_t n, int64_t first,
                   int64_t count,
                   float* out);  // [n, count]
// The other way. Rows may repeat: then one of their values is stored, unspecified which.
void ScatterRecords(const Cuda& cuda, const DeviceRows& records, const uint32_t* rows, int64_t n, int64_t first,
                    int64_t count,
                    const float* values);  // [n, count]

}  // namespace sok
