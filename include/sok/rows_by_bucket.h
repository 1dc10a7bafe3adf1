// The rows of a table by the buckets of their keys (partition.h), for what looks at one bucket and not at all rows.
#pragma once

#include <cstdint>
#include <vector>

#include "sok/partition.h"
#include "sok/row_column.h"

namespace sok {

// Chains of row numbers, doubly linked: 8 bytes a row. Not thread-safe.
class RowsByBucket {
 public:
  explicit RowsByBucket(const RowStore& rows) : links_(rows), first_(kBuckets, kEnd), sizes_(kBuckets, 0) {}

  // Before Add of this row or a neighbour. Throws std::bad_alloc.
  void Touch(int64_t row) { links_.Touch(row); }
  void Add(int bucket, uint32_t row) {
    uint32_t& first = first_[static_cast<size_t>(bucket)];
    *links_.At(row) = {first, kEnd};
    if (first != kEnd) links_.At(first)->before = row;
    first = row;
    ++sizes_[static_cast<size_t>(bucket)];
  }
  void Remove(int bucket, uint32_t row) {
    const Link link = *links_.At(row);
    (link.before == kEnd ? first_[static_cast<size_t>(bucket)] : links_.At(link.before)->next) = link.next;
    if (link.next != kEnd) links_.At(link.next)->before = link.before;
    --sizes_[static_cast<size_t>(bucket)];
  }

  int64_t size(int64_t bucket) const { return sizes_[static_cast<size_t>(bucket)]; }
  template <class F>
  void ForEach(int64_t bucket, F&& f) const {
    for (uint32_t row = first_[static_cast<size_t>(bucket)]; row != kEnd; row = links_.At(row)->next) f(row);
  }

  int64_t memory_bytes() const { return links_.memory_bytes() + static_cast<int64_t>(kBuckets * 12); }

 private:
  static constexpr size_t kBuckets = size_t{1} << kBucketBits;
  static constexpr uint32_t kEnd = 0xFFFFFFFFu;
  struct Link {
    uint32_t next, before;
  };
  RowColumn<Link> links_;
  std::vector<uint32_t> first_;
  std::vector<int64_t> sizes_;
};

}  // namespace sok
