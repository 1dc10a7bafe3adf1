#include "scratch_tf.h"

#include <utility>

#include "sok/recent_max.h"

namespace sok {
namespace {

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Scratch>> idle;  // longest idle first
  int64_t lent = 0;
  RecentMax at_once;  // lent, at each loan
};

// Leaked on purpose: kernels may still run while the process ends.
Pool& ThePool() {
  static Pool* pool = new Pool;
  return *pool;
}

}  // namespace

ScratchLease::ScratchLease() {
  Pool& pool = ThePool();
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    pool.at_once.Add(++pool.lent);
    if (!pool.idle.empty()) {
      scratch_ = std::move(pool.idle.back());
      pool.idle.pop_back();
    }
  }
  if (!scratch_) scratch_ = std::make_unique<Scratch>();
}

ScratchLease::~ScratchLease() {
  scratch_->Reset();
  Pool& pool = ThePool();
  std::unique_ptr<Scratch> unneeded;  // freed without the lock
  std::lock_guard<std::mutex> lock(pool.mutex);
  --pool.lent;
  pool.idle.push_back(std::move(scratch_));
  // As many as were lent at the same time of late are enough.
  if (pool.lent + static_cast<int64_t>(pool.idle.size()) <= pool.at_once.Get()) return;
  unneeded = std::move(pool.idle.front());
  pool.idle.erase(pool.idle.begin());
}

}  // namespace sok
