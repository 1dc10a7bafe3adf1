#include "sok/scratch.h"

#include <string>

#include "pages.h"
#include "sok/error.h"

namespace sok {

void Scratch::AddBlock(size_t bytes) {
  blocks_.reserve(blocks_.size() + 1);
  char* data = static_cast<char*>(AllocatePages(static_cast<int64_t>(bytes), true, "scratch"));
  blocks_.push_back({data, bytes});
  used_ = 0;
}

void Scratch::Refuse(int64_t n) { throw OutOfMemory("no memory holds " + std::to_string(n) + " temporary values"); }

Scratch::~Scratch() {
  for (const Block& block : blocks_) FreePages(block.data, static_cast<int64_t>(block.bytes));
}

}  // namespace sok
