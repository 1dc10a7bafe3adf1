// What has changed in a table since it was last saved: one bit a row, and the keys that were erased.
//
// Notes are kept in two halves: those of the save under way, and those of the time since it began. A save that fails
// puts them together again, so that no change is forgotten before a file has it.
//
// Thread safety: Mark may be called at the same time from many threads; anything else needs the object to itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace sok {

class RowChanges {
 public:
  // Nothing is noted, and nothing is paid for, before the first Begin.
  bool is_on() const { return is_on_; }

  // The save that changes are counted from; empty: none, so that every row has to be saved.
  const std::string& base() const { return base_; }

  // Rows below num_rows can be marked.
  void MakeRoom(int64_t num_rows);

  void Mark(int64_t row) {
    uint64_t* word = &since_[static_cast<size_t>(row >> 6)];
    const uint64_t bit = uint64_t{1} << (row & 63);
    // Most rows of a step were marked by an earlier one: reading is cheaper than a locked write.
    if ((__atomic_load_n(word, __ATOMIC_RELAXED) & bit) == 0) __atomic_fetch_or(word, bit, __ATOMIC_RELAXED);
  }
  // As if it had not changed. For one thread alone.
  void Unmark(int64_t row) { since_[static_cast<size_t>(row >> 6)] &= ~(uint64_t{1} << (row & 63)); }
  void MarkErased(uint64_t key);
  // Room for as many of these: marking then takes no memory.
  void ReserveErased(size_t more);

  // Changes so far belong to a save that begins; `is_there` says whether a key that was erased has a row again. After a
  // save that was not ended they belong to this one.
  void Begin(int64_t num_rows, const std::function<bool(uint64_t)>& is_there);
  bool is_saving() const { return is_saving_; }

  // Of the save under way. A row that was erased since may be among them, and one number may be another key's now.
  bool IsSaved(int64_t row) const {
    const size_t word = static_cast<size_t>(row >> 6);
    return word < saving_.size() && ((saving_[word] >> (row & 63)) & 1) != 0;
  }
  const std::vector<uint64_t>& saved_erased() const { return saving_erased_; }  // ascending, each once
  // Not of it; in any order, some of them more than once.
  const std::vector<uint64_t>& erased() const { return since_erased_; }

  // The save is complete under this name: later changes are counted from it. Empty: it failed.
  void End(const std::string& base);

  // How many rows are marked; of erased keys, how many at most.
  int64_t num_rows() const;
  int64_t num_erased() const { return static_cast<int64_t>(since_erased_.size()); }

  void TurnOff() { *this = RowChanges(); }

  int64_t memory_bytes() const {
    return static_cast<int64_t>((since_.size() + saving_.size() + since_erased_.size() + saving_erased_.size()) * 8);
  }

 private:
  bool is_on_ = false;
  bool is_saving_ = false;
  std::string base_;
  std::vector<uint64_t> since_, saving_;  // one bit per row
  std::vector<uint64_t> since_erased_, saving_erased_;
  size_t sorted_ = 0;  // of since_erased_: the first so many are ascending, each once
};

}  // namespace sok
