// The lock of a table: readers side by side or one writer, and neither can starve the other.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace sok {

// For std::unique_lock and std::shared_lock. A writer that waits lets no more readers in; when it leaves, those that came
// meanwhile go before the next writer. So a writer waits for the readers that are in, and a reader for one writer.
// (std::shared_mutex of the GNU library prefers readers: a writer waits for as long as they overlap.)
//
// A thread must not take it twice, not even shared: it would wait for a writer that waits for it. Debug builds assert that.
class TableMutex {
 public:
  TableMutex() = default;
  TableMutex(const TableMutex&) = delete;
  TableMutex& operator=(const TableMutex&) = delete;

  void lock();
  bool try_lock();
  void unlock();
  void lock_shared();
  bool try_lock_shared();
  void unlock_shared();

 private:
  std::mutex mutex_;                  // of what follows
  std::condition_variable turn_;      // a writer has left
  std::condition_variable all_left_;  // the last reader has
  bool writer_ = false;               // one is in, or waits for the readers to leave
  int64_t readers_ = 0;
  int64_t waiting_ = 0;  // readers that go in when the writer leaves
  uint64_t writes_ = 0;  // that have ended
};

}  // namespace sok
