#include "sok/scratch.h"

#include "pages.h"

namespace sok {

void Scratch::AddBlock(size_t bytes) {
  blocks_.reserve(blocks_.size() + 1);
  char* data = static_cast<char*>(AllocatePages(static_cast<int64_t>(bytes), true, "scratch"));
  blocks_.push_back({data, bytes});
  used_ = 0;
}

Scratch::~Scratch() {
  for (const Block& block : blocks_) FreePages(block.data, static_cast<int64_t>(block.bytes));
}

}  // namespace sok
