#include "output_pool.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "guard.h"
#include "sok/pages.h"
#include "tensorflow/core/framework/allocation_description.pb.h"

namespace sok {
namespace {

constexpr int64_t kMinBytes = int64_t{1} << 20;  // below, the system's allocator reuses memory well enough

struct Idle {
  char* data;
  int64_t bytes;
};

struct OutputPool {
  std::mutex mutex;
  std::vector<Idle> idle;  // oldest first
  struct {
    int64_t in_use = 0;
    int64_t idle = 0;
  } bytes;
  int64_t peak = 0;  // of bytes in use
};

// Leaked on purpose: tensors may outlive everything else in the process.
OutputPool& TheOutputPool() {
  static OutputPool* pool = new OutputPool;
  return *pool;
}

class OwnedBuffer final : public tensorflow::TensorBuffer {
 public:
  OwnedBuffer(std::shared_ptr<char> memory, size_t size, bool alone)
      : TensorBuffer(memory.get()), memory_(std::move(memory)), size_(size), alone_(alone) {}
  size_t size() const override { return size_; }
  // What TensorFlow asks before it lets a kernel write its output over its input.
  bool OwnsMemory() const override { return alone_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription* proto) const override {
    proto->set_requested_bytes(static_cast<int64_t>(size_));
    proto->set_allocator_name("sok");
  }

 private:
  const std::shared_ptr<char> memory_;
  const size_t size_;
  const bool alone_;
};

tensorflow::Tensor TensorOf(std::shared_ptr<char> memory, tensorflow::DataType dtype,
                            const tensorflow::TensorShape& shape, bool alone) {
  const size_t size = static_cast<size_t>(shape.num_elements()) * tensorflow::DataTypeSize(dtype);
  auto* buffer = new OwnedBuffer(std::move(memory), size, alone);
  tensorflow::Tensor tensor(dtype, shape, buffer);
  buffer->Unref();  // the tensor holds it now
  return tensor;
}

}  // namespace

std::shared_ptr<PooledBlock> PooledBlock::Take(int64_t bytes) {
  bytes = SharedSize(bytes, kMinBytes);
  OutputPool& pool = TheOutputPool();
  char* data = nullptr;
  std::vector<Idle> drop;
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    auto best = pool.idle.end();
    for (auto it = pool.idle.begin(); it != pool.idle.end(); ++it) {
      if (it->bytes < bytes || it->bytes > bytes + bytes / 4) continue;
      if (best == pool.idle.end() || it->bytes <= best->bytes) best = it;  // of equal ones the last used: it is warm
    }
    if (best != pool.idle.end()) {
      data = best->data;
      bytes = best->bytes;
      pool.idle.erase(best);
      pool.bytes.idle -= bytes;
    }
    pool.bytes.in_use += bytes;
    pool.peak = std::max(pool.peak, pool.bytes.in_use);
    size_t dropped = 0;
    while (dropped < pool.idle.size() && pool.bytes.in_use + pool.bytes.idle > 2 * pool.peak) {
      pool.bytes.idle -= pool.idle[dropped].bytes;
      drop.push_back(pool.idle[dropped++]);
    }
    pool.idle.erase(pool.idle.begin(), pool.idle.begin() + static_cast<int64_t>(dropped));
  }
  for (const Idle& old : drop) FreePages(old.data, old.bytes);
  if (data == nullptr) {
    try {
      data = static_cast<char*>(AllocatePages(bytes, true, "an output"));
    } catch (...) {
      std::lock_guard<std::mutex> lock(pool.mutex);
      pool.bytes.in_use -= bytes;
      throw;
    }
  }
  return std::shared_ptr<PooledBlock>(new PooledBlock(data, bytes));
}

PooledBlock::~PooledBlock() {
  OutputPool& pool = TheOutputPool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  pool.bytes.in_use -= bytes_;
  pool.bytes.idle += bytes_;
  pool.idle.push_back({data_, bytes_});
}

tensorflow::Tensor TensorInBlock(std::shared_ptr<PooledBlock> block, int64_t offset, tensorflow::DataType dtype,
                                 const tensorflow::TensorShape& shape) {
  char* const data = block->data() + offset;
  return TensorOf({std::move(block), data}, dtype, shape, true);
}

tensorflow::Tensor TensorOthersRead(std::shared_ptr<char> memory, tensorflow::DataType dtype,
                                    const tensorflow::TensorShape& shape) {
  return TensorOf(std::move(memory), dtype, shape, false);
}

tensorflow::Tensor* AllocateOutput(tensorflow::OpKernelContext* ctx, int index, const tensorflow::TensorShape& shape) {
  const tensorflow::DataType dtype = ctx->expected_output_dtype(index);
  const int64_t bytes = shape.num_elements() * tensorflow::DataTypeSize(dtype);
  if (bytes >= kMinBytes) {
    ctx->set_output(index, TensorInBlock(PooledBlock::Take(bytes), 0, dtype, shape));
    return ctx->mutable_output(index);
  }
  tensorflow::Tensor* output;
  Check(ctx->allocate_output(index, shape, &output));
  return output;
}

std::vector<tensorflow::Tensor> AllocateTogether(tensorflow::OpKernelContext* ctx, const std::vector<Wanted>& wanted) {
  auto bytes_of = [](const Wanted& one) { return one.shape.num_elements() * tensorflow::DataTypeSize(one.dtype); };
  auto place_of = [](int64_t bytes) { return (bytes + 63) & ~int64_t{63}; };
  int64_t together = 0;
  for (const Wanted& one : wanted)
    if (bytes_of(one) < kMinBytes) together += place_of(bytes_of(one));
  const std::shared_ptr<PooledBlock> block = together < kMinBytes ? nullptr : PooledBlock::Take(together);
  std::vector<tensorflow::Tensor> tensors(wanted.size());
  int64_t used = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const int64_t bytes = bytes_of(wanted[i]);
    if (bytes >= kMinBytes) {
      tensors[i] = TensorInBlock(PooledBlock::Take(bytes), 0, wanted[i].dtype, wanted[i].shape);
    } else if (block) {
      tensors[i] = TensorInBlock(block, used, wanted[i].dtype, wanted[i].shape);
      used += place_of(bytes);
    } else {
      Check(ctx->allocate_temp(wanted[i].dtype, wanted[i].shape, &tensors[i]));
    }
  }
  return tensors;
}

tensorflow::Tensor SharedBlocks::Allocate(tensorflow::DataType dtype, const tensorflow::TensorShape& shape) {
  const int64_t bytes = (shape.num_elements() * tensorflow::DataTypeSize(dtype) + 63) & ~int64_t{63};
  if (bytes >= kMinBytes) return TensorInBlock(PooledBlock::Take(bytes), 0, dtype, shape);
  if (block_ == nullptr || used_ + bytes > block_->bytes()) {
    // The next block is larger: few tables of few rows need one of the smallest, a thousand tables some large ones.
    block_ = PooledBlock::Take(block_ == nullptr ? kMinBytes : std::min(2 * block_->bytes(), 16 * kMinBytes));
    used_ = 0;
  }
  used_ += bytes;
  return TensorInBlock(block_, used_ - bytes, dtype, shape);
}

}  // namespace sok
