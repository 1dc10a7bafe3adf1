#include "sok/table_mutex.h"

#include <algorithm>
#include <cassert>
#include <vector>

namespace sok {
namespace {

#ifdef NDEBUG
void Hold(const TableMutex*) {}
void Release(const TableMutex*) {}
#else
thread_local std::vector<const TableMutex*> held;
void Hold(const TableMutex* mutex) {
  assert(std::find(held.begin(), held.end(), mutex) == held.end() && "a thread takes the lock of a table twice");
  held.push_back(mutex);
}
void Release(const TableMutex* mutex) {
  const auto at = std::find(held.begin(), held.end(), mutex);
  assert(at != held.end() && "a thread gives back the lock of a table that another took");
  held.erase(at);
}
#endif

}  // namespace

void TableMutex::lock() {
  Hold(this);
  std::unique_lock<std::mutex> lock(mutex_);
  turn_.wait(lock, [this] { return !writer_; });
  writer_ = true;
  all_left_.wait(lock, [this] { return readers_ == 0; });
}

bool TableMutex::try_lock() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (writer_ || readers_ > 0) return false;
  Hold(this);
  return writer_ = true;
}

void TableMutex::unlock() {
  Release(this);
  const std::lock_guard<std::mutex> lock(mutex_);
  writer_ = false;
  ++writes_;
  readers_ += waiting_;
  waiting_ = 0;
  turn_.notify_all();
}

void TableMutex::lock_shared() {
  Hold(this);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!writer_) {
    ++readers_;
    return;
  }
  ++waiting_;
  const uint64_t writes = writes_;
  turn_.wait(lock, [this, writes] { return writes_ != writes; });  // unlock has counted this reader in
}

bool TableMutex::try_lock_shared() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (writer_) return false;
  Hold(this);
  ++readers_;
  return true;
}

void TableMutex::unlock_shared() {
  Release(this);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--readers_ == 0 && writer_) all_left_.notify_one();
}

}  // namespace sok
