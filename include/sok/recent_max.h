// The largest of the last numbers, roughly: of the last hundred for sure, of the last two hundred at most.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sok {

// Numbers are not negative.
class RecentMax {
 public:
  void Add(int64_t x) {
    if (++count_ > kWindow) {
      count_ = 1;
      before_ = now_;
      now_ = 0;
    }
    now_ = std::max(now_, x);
  }
  int64_t Get() const { return std::max(before_, now_); }

 private:
  static constexpr int kWindow = 100;

  int64_t before_ = INT64_MAX, now_ = 0;  // of the window before, and of this one; nothing is known before the first
  int count_ = 0;
};

}  // namespace sok
