// A second stack on a thread of the host, and switches between stacks that the sanitizers can follow.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace sok_emulator {

#if defined(__x86_64__)
// Keeps what a function must keep on the stack that is left, and takes it from the one that is entered.
extern "C" void SokSwitchStack(void** from, void* to);
#endif

// What runs between two stacks. ThreadSanitizer would take the accesses for races, and calls that are left for good for its stack.
#define SOK_UNSEEN __attribute__((no_sanitize("thread")))

// Either a stack of its own that waits in `entry`, or, without one, the stack that the thread came with.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (stack_ == nullptr) return;
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(tsan_);
#endif
    munmap(stack_, kStackBytes + kGuardBytes);
  }

  // entry must switch away for good and never return.
  void Start(void (*entry)()) {
    entry_ = entry;
    if (stack_ == nullptr) {
      void* p = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED || mprotect(p, kGuardBytes, PROT_NONE) != 0) {
        std::fprintf(stderr, "emulator: no memory for the stack of a thread\n");
        std::abort();
      }
      stack_ = static_cast<char*>(p);
#if defined(__SANITIZE_THREAD__)
      tsan_ = __tsan_create_fiber(0);
#endif
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_ + kGuardBytes, kStackBytes);  // frames that were left for good
#endif
#if defined(__x86_64__)
    // As if entry had been called: a return address above it, six kept registers below.
    void** top = reinterpret_cast<void**>(stack_ + kGuardBytes + kStackBytes);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(&Begin);
    for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
    saved_ = top - 8;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_ + kGuardBytes;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, &Begin, 0);
#endif
  }

  // For the fiber that is the thread itself.
  void Adopt() {
#if defined(__SANITIZE_THREAD__)
    tsan_ = __tsan_get_current_fiber();
#endif
  }

  // Leaves *this, which is running, for `to`; returns when someone switches back.
  // last: *this will not be entered again before its next Start.
  SOK_UNSEEN void SwitchTo(Fiber* to, [[maybe_unused]] bool last = false) {
    entering_ = to;
#if defined(__SANITIZE_ADDRESS__)
    leaving_ = this;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, to->bottom_ != nullptr ? to->bottom_ : to->Bottom(),
                                   to->bottom_ != nullptr ? to->size_ : kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
    // No order between the two: that is what barriers are for.
    __tsan_switch_to_fiber(to->tsan_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
    SokSwitchStack(&saved_, to->saved_);
#else
    swapcontext(&context_, &to->context_);
#endif
    Arrived();
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kStackBytes = 256 << 10;
#else
  static constexpr size_t kStackBytes = 64 << 10;
#endif
  static constexpr size_t kGuardBytes = 4096;

  SOK_UNSEEN static void Begin() {
    entering_->Arrived();
    entering_->entry_();
    std::abort();
  }

  SOK_UNSEEN void Arrived() {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &size);
    leaving_->bottom_ = bottom;
    leaving_->size_ = size;
    fake_stack_ = nullptr;
#endif
  }

  const void* Bottom() const { return stack_ + kGuardBytes; }

  static inline thread_local Fiber* entering_ = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  static inline thread_local Fiber* leaving_ = nullptr;
  void* fake_stack_ = nullptr;
  const void* bottom_ = nullptr;  // of the stack that the sanitizer saw us leave
  size_t size_ = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tsan_ = nullptr;
#endif
  char* stack_ = nullptr;
  void (*entry_)() = nullptr;
#if defined(__x86_64__)
  void* saved_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace sok_emulator
