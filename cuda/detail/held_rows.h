// Rows of a device table in the memory of this process, on their way to a file: what an asynchronous save writes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "sok/table_store.h"

namespace sok {

class HeldRows final : public TableStore::RowSink {
 public:
  explicit HeldRows(int64_t dim) : dim_(dim) {}

  // Takes what a table gives. Throws std::bad_alloc.
  int64_t Begin(int64_t num_rows, const std::vector<TableStore::SlotSetInfo>& sets) override;
  void Erased(const std::vector<uint64_t>& keys) override;
  TableStore::RowTarget Allocate(int64_t n) override;
  void Commit() override {}

  // Whether nobody has asked before: then GiveTo may be called, once.
  bool IsFirst() { return !is_taken_.exchange(true); }
  // Passes all of it on, and gives memory back on the way.
  void GiveTo(TableStore::RowSink* sink);

  // May be asked meanwhile.
  int64_t bytes() const { return bytes_.load(); }

 private:
  struct Block {
    int64_t n = 0;
    std::unique_ptr<uint64_t[]> keys;  // [n]
    std::unique_ptr<float[]> values;   // rows [n, dim], then the slots of each set [n, slot_floats]
  };

  TableStore::RowTarget TargetOf(const Block& block, int64_t first) const;
  int64_t BytesOf(const Block& block) const;

  const int64_t dim_;
  int64_t num_rows_ = 0;
  int64_t row_floats_ = 0;
  std::vector<TableStore::SlotSetInfo> sets_;
  bool is_delta_ = false;
  std::vector<uint64_t> erased_;
  std::vector<Block> blocks_;
  std::atomic<int64_t> bytes_{0};
  std::atomic<bool> is_taken_{false};
};

}  // namespace sok
