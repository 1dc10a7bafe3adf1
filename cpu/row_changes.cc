#include "sok/row_changes.h"

#include <algorithm>

#include "sok/reserve_more.h"

namespace sok {
namespace {

constexpr size_t kSortAt = 1 << 16;

void SortOnce(std::vector<uint64_t>* keys) {
  std::sort(keys->begin(), keys->end());
  keys->erase(std::unique(keys->begin(), keys->end()), keys->end());
}

}  // namespace

void RowChanges::MakeRoom(int64_t num_rows) {
  const size_t words = static_cast<size_t>((num_rows + 63) >> 6);
  if (!is_on_ || words <= since_.size()) return;
  since_.resize(std::max(words, since_.size() + since_.size() / 4));
}

void RowChanges::ReserveErased(size_t more) { ReserveMore(&since_erased_, more); }

void RowChanges::MarkErased(uint64_t key) {
  since_erased_.push_back(key);
  // A key may come and go many times between two saves: the list stays within twice the distinct ones.
  if (since_erased_.size() < kSortAt || since_erased_.size() < 2 * sorted_) return;
  SortOnce(&since_erased_);
  sorted_ = since_erased_.size();
}

void RowChanges::Begin(int64_t num_rows, const std::function<bool(uint64_t)>& is_there) {
  if (is_saving_) End("");
  const size_t words = std::max(since_.size(), static_cast<size_t>((num_rows + 63) >> 6));
  std::vector<uint64_t> fresh(words);
  since_.resize(words);
  is_on_ = is_saving_ = true;
  SortOnce(&since_erased_);
  since_erased_.erase(std::remove_if(since_erased_.begin(), since_erased_.end(), is_there), since_erased_.end());
  saving_.swap(since_);
  since_.swap(fresh);
  saving_erased_.clear();
  saving_erased_.swap(since_erased_);
  sorted_ = 0;
}

void RowChanges::End(const std::string& base) {
  if (!is_saving_) return;
  if (base.empty()) {
    if (since_erased_.empty()) since_erased_.swap(saving_erased_);
    ReserveMore(&since_erased_, saving_erased_.size());
    since_erased_.insert(since_erased_.end(), saving_erased_.begin(), saving_erased_.end());
    for (size_t i = 0; i < saving_.size(); ++i) since_[i] |= saving_[i];  // since_ never shrinks
    is_on_ = !base_.empty();
  } else {
    base_ = base;
  }
  is_saving_ = false;
  saving_ = {};
  saving_erased_ = {};
  if (!is_on_) TurnOff();
}

int64_t RowChanges::num_rows() const {
  int64_t count = 0;
  for (const uint64_t word : since_) count += __builtin_popcountll(word);
  return count;
}

}  // namespace sok
