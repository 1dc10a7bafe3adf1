#include "scratch_tf.h"

#include <utility>

namespace sok {
namespace {

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Scratch>> idle;
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
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.idle.push_back(std::move(scratch_));
}

}  // namespace sok
