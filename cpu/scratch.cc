#include "sok/scratch.h"

#include <string>

#include "sok/error.h"
#include "sok/pages.h"

namespace sok {

void Scratch::AddBlock(size_t bytes) {
  blocks_.reserve(blocks_.size() + 1);
  char* data = static_cast<char*>(AllocatePages(static_cast<int64_t>(bytes), true, "scratch"));
  blocks_.push_back({data, bytes});
  used_ = 0;
}

void Scratch::Refuse(int64_t n) { throw OutOfMemory("no memory holds " + std::to_string(n) + " temporary values"); }

// A new block is at most twice the largest before, so blocks that a use made anew are at most three times what it needed.
void Scratch::Trim() {
  int64_t needed = static_cast<int64_t>(used_);
  for (size_t i = 0; i < block_; ++i) needed += static_cast<int64_t>(blocks_[i].bytes);
  needed_.Add(needed);
  if (needed_.Get() < memory_bytes() / 4 && memory_bytes() > kKeptBytes) Free();
}

int64_t Scratch::memory_bytes() const {
  int64_t bytes = 0;
  for (const Block& block : blocks_) bytes += static_cast<int64_t>(block.bytes);
  return bytes;
}

void Scratch::Free() {
  for (const Block& block : blocks_) FreePages(block.data, static_cast<int64_t>(block.bytes));
  blocks_.clear();
}

Scratch::~Scratch() { Free(); }

}  // namespace sok
