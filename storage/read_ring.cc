#include "sok/read_ring.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "sok/file_error.h"

namespace sok {

std::unique_ptr<ReadRing> ReadRing::Make(unsigned depth) {
#ifdef __NR_io_uring_setup
  io_uring_params params;
  std::memset(&params, 0, sizeof(params));
  const long made = syscall(__NR_io_uring_setup, depth, &params);
  if (made < 0) return nullptr;
  std::unique_ptr<ReadRing> ring(new ReadRing());
  ring->ring_ = static_cast<int>(made);
  if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) return nullptr;  // before Linux 5.4
  ring->depth_ = depth;
  ring->free_tags_.reserve(depth);
  auto map = [&](int64_t bytes, off_t what) -> void* {
    void* p =
        mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->ring_, what);
    return p == MAP_FAILED ? nullptr : p;
  };
  const int64_t bytes = std::max<int64_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                          params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  ring->memory_ = map(bytes, IORING_OFF_SQ_RING);
  ring->memory_bytes_ = bytes;
  const int64_t entries_bytes = static_cast<int64_t>(params.sq_entries * sizeof(io_uring_sqe));
  ring->entries_ = map(entries_bytes, IORING_OFF_SQES);
  ring->entries_bytes_ = entries_bytes;
  if (ring->memory_ == nullptr || ring->entries_ == nullptr) return nullptr;
  char* base = static_cast<char*>(ring->memory_);
  auto word = [&](unsigned offset) { return reinterpret_cast<unsigned*>(base + offset); };
  ring->submit_tail_ = word(params.sq_off.tail);
  ring->submit_mask_ = word(params.sq_off.ring_mask);
  ring->submit_array_ = word(params.sq_off.array);
  ring->done_head_ = word(params.cq_off.head);
  ring->done_tail_ = word(params.cq_off.tail);
  ring->done_mask_ = word(params.cq_off.ring_mask);
  ring->done_entries_ = base + params.cq_off.cqes;
  return ring;
#else
  (void)depth;
  return nullptr;
#endif
}

ReadRing::~ReadRing() {
  if (entries_ != nullptr) munmap(entries_, static_cast<size_t>(entries_bytes_));
  if (memory_ != nullptr) munmap(memory_, static_cast<size_t>(memory_bytes_));
  if (ring_ >= 0) close(ring_);
}

void ReadRing::Run(int file, Reader* reader) {
#ifdef __NR_io_uring_setup
  io_uring_sqe* const entries = static_cast<io_uring_sqe*>(entries_);
  const io_uring_cqe* const completions = static_cast<const io_uring_cqe*>(done_entries_);
  std::vector<unsigned>& free_tags = free_tags_;
  free_tags.clear();
  for (unsigned tag = depth_; tag-- > 0;) free_tags.push_back(tag);
  unsigned in_flight = 0, waiting = 0;  // waiting: put into the queue, and the kernel has not taken them
  for (bool more = true;;) {
    unsigned tail = *submit_tail_;
    while (more && !free_tags.empty()) {
      const unsigned tag = free_tags.back();
      Request request;
      if (!reader->Next(tag, &request)) {
        more = false;
        break;
      }
      free_tags.pop_back();
      const unsigned at = tail & *submit_mask_;
      io_uring_sqe* entry = entries + at;
      std::memset(entry, 0, sizeof(*entry));
      entry->opcode = IORING_OP_READ;
      entry->fd = file;
      entry->addr = reinterpret_cast<uintptr_t>(request.to);
      entry->len = request.bytes;
      entry->off = static_cast<uint64_t>(request.offset);
      entry->user_data = tag;
      submit_array_[at] = at;
      ++tail;
      ++waiting;
      ++in_flight;
    }
    __atomic_store_n(submit_tail_, tail, __ATOMIC_RELEASE);
    if (in_flight == 0) return;
    const long taken = syscall(__NR_io_uring_enter, ring_, waiting, 1u, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken > 0) waiting -= std::min(waiting, static_cast<unsigned>(taken));
    // What the kernel has not taken it will never write to.
    const bool may_repeat = taken >= 0 || errno == EINTR || errno == EAGAIN || errno == EBUSY;
    if (!may_repeat && in_flight == waiting) throw FileError(errno, "read", "io_uring");
    unsigned head = *done_head_;
    while (head != __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE)) {
      const io_uring_cqe& completion = completions[head & *done_mask_];
      const unsigned tag = static_cast<unsigned>(completion.user_data);
      const int result = completion.res;
      ++head;
      __atomic_store_n(done_head_, head, __ATOMIC_RELEASE);
      --in_flight;
      free_tags.push_back(tag);
      reader->Done(tag, result);
    }
  }
#else
  (void)file, (void)reader;
#endif
}

}  // namespace sok
