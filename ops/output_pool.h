// Large outputs of kernels, in memory that is used again.
//
// A lookup may write a hundred megabytes per step. Fresh from the system, that memory costs more to clear, page by page,
// than the lookup itself, and small pages cost it again in address translation. So large outputs come from a pool of
// huge pages: a tensor gives its memory back when the last reference to it dies. All of the pool, in use and kept for later,
// is at most twice what was in use at the same time at some point. (Not less: what a step needs one after the other, in blocks
// of several sizes, is more than it needs at once, and what is given up between two steps is cleared again in each.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace sok {

// One stretch of pooled memory; goes back to the pool with the last owner.
class PooledBlock {
 public:
  // Throws OutOfMemory.
  static std::shared_ptr<PooledBlock> Take(int64_t bytes);
  ~PooledBlock();
  PooledBlock(const PooledBlock&) = delete;
  PooledBlock& operator=(const PooledBlock&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  PooledBlock(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  char* const data_;
  const int64_t bytes_;
};

// A tensor in memory that others read, also after this process has let go of it: no kernel writes its output over it.
tensorflow::Tensor TensorOthersRead(std::shared_ptr<char> memory, tensorflow::DataType dtype,
                                    const tensorflow::TensorShape& shape);

// A tensor in part of a block, from `offset` on (a multiple of 64).
tensorflow::Tensor TensorInBlock(std::shared_ptr<PooledBlock> block, int64_t offset, tensorflow::DataType dtype,
                                 const tensorflow::TensorShape& shape);

// As ctx->allocate_output, from the pool where the output is large. Throws OutOfMemory.
tensorflow::Tensor* AllocateOutput(tensorflow::OpKernelContext* ctx, int index, const tensorflow::TensorShape& shape);

// Tensors of these shapes. The small ones lie side by side in one block of the pool if together they are large: a thousand
// outputs of 64 KiB are as dear, fresh from the system, as one of 64 MiB. Such a block goes back with the last of them.
// Throws OutOfMemory.
struct Wanted {
  tensorflow::DataType dtype;
  tensorflow::TensorShape shape;
};
std::vector<tensorflow::Tensor> AllocateTogether(tensorflow::OpKernelContext* ctx, const std::vector<Wanted>& wanted);

// Tensors whose shapes come one after the other, from the pool: small ones side by side in blocks that they share.
class SharedBlocks {
 public:
  // Throws OutOfMemory.
  tensorflow::Tensor Allocate(tensorflow::DataType dtype, const tensorflow::TensorShape& shape);

 private:
  std::shared_ptr<PooledBlock> block_;
  int64_t used_ = 0;
};

}  // namespace sok
