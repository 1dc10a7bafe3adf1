// The device's side of the emulator: blocks of fibers.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../../cpp/own_threads.h"
#include "cuda_runtime.h"
#include "fiber.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl SokSwitchStack
.type SokSwitchStack,@function
SokSwitchStack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size SokSwitchStack,.-SokSwitchStack
)");
#endif

// ThreadSanitizer knows of no order between the fibers of a block but what RELEASE and ACQUIRE tell it: barriers are
// ordered, switches are not. The emulator's own books are kept out of its sight.
#if defined(__SANITIZE_THREAD__)
#define RELEASE(p) __tsan_release(p)
#define ACQUIRE(p) __tsan_acquire(p)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#else
#define RELEASE(p) static_cast<void>(p)
#define ACQUIRE(p) static_cast<void>(p)
#endif

namespace sok_emulator {
namespace {

struct Unseen {
#if defined(__SANITIZE_THREAD__)
  Unseen() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Unseen() {}
#endif
};

constexpr unsigned kLanes = 32, kMaxThreads = 1024;
constexpr unsigned kBlocksAtOnce = 3;

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "emulator: block %u, thread %u: %s\n", current == nullptr ? 0 : current->block.x,
               current == nullptr ? 0 : current->thread.x, what);
  std::abort();
}

uint64_t Seed() {
  static const uint64_t seed = [] {
    const char* text = std::getenv("SOK_EMULATOR_SEED");
    return text == nullptr ? uint64_t{1} : std::strtoull(text, nullptr, 10) * 2 + 1;
  }();
  return seed;
}

// Runs one block at a time. Kept between launches, since stacks are not cheap.
class BlockRunner {
 public:
  void Run(const std::function<void()>& thread, const dim3& grid, unsigned block, unsigned threads,
           size_t shared_bytes) {
    const Unseen unseen;
    body_ = &thread;
    if (fibers_.size() < threads) {
      const size_t before = fibers_.size();
      fibers_.resize(threads);
      for (size_t i = before; i < threads; ++i) fibers_[i] = std::make_unique<Fiber>();
    }
    threads_.assign(threads, Thread());
    shared_.assign((shared_bytes + 15) / 16, float4{});
    random_ = (Seed() + 0x9E3779B97F4A7C15ull * (block + 1)) | 1;
    running_ = threads;
    at_barrier_ = 0;
    main_.Adopt();
    runner = this;
    for (unsigned t = 0; t < threads; ++t) {
      threads_[t].index = {{t, 0, 0}, {block, 0, 0}, dim3(threads), grid};
      fibers_[t]->Start(&BlockRunner::Entry);
    }
    RELEASE(&body_);
    while (running_ > 0) {
      bool any = false;
      const unsigned first = static_cast<unsigned>(Random() % threads);
      for (unsigned i = 0; i < threads; ++i) {
        const unsigned t = (first + i) % threads;
        if (threads_[t].state != State::kReady) continue;
        any = true;
        at_ = t;
        current = &threads_[t].index;
        main_.SwitchTo(fibers_[t].get());
      }
      if (!any) Fail("deadlock: no thread of the block can go on. A barrier or a mask names one that never comes");
    }
    ACQUIRE(&running_);
    current = nullptr;
    runner = nullptr;
  }

  void Yield() {
    const Unseen unseen;
    const unsigned t = at_;
    fibers_[t]->SwitchTo(&main_);
    current = &threads_[t].index;
  }

  void MaybeYield() {
    const Unseen unseen;
    if ((Random() >> 32) % 8 == 0) Yield();
  }

  void Fence() {
#if defined(__SANITIZE_THREAD__)  // which knows no fences: let this one order everything
    static char fence;
    RELEASE(&fence);
    ACQUIRE(&fence);
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
  }
  void BlockBarrier() {
    const Unseen unseen;
    RELEASE(&at_barrier_);
    threads_[at_].state = State::kAtBarrier;
    ++at_barrier_;
    ReleaseBarrier();
    const unsigned t = at_;
    while (threads_[t].state != State::kReady) Yield();
    ACQUIRE(&at_barrier_);
  }

  uint64_t Warp(WarpOp op, unsigned mask, uint64_t value, int argument, int width) {
    const Unseen unseen;
    const unsigned t = at_, warp = t - t % kLanes, lane = t % kLanes;
    Thread& self = threads_[t];
    if (((mask >> lane) & 1) == 0) Fail("a warp function whose mask does not name the lane that calls it");
    self.op = op;
    self.mask = mask;
    self.value = value;
    self.argument = argument;
    self.width = width;
    self.state = State::kAtWarp;
    RELEASE(&threads_[warp].answer);
    bool all = true;
    for (unsigned l = 0; l < kLanes; ++l) {
      if (((mask >> l) & 1) == 0) continue;
      if (warp + l >= threads_.size() || threads_[warp + l].state == State::kDone) {
        Fail("a warp function waits for a lane that has ended");
      }
      const Thread& other = threads_[warp + l];
      if (other.state != State::kAtWarp) {
        all = false;
      } else if (other.mask != mask || other.op != op) {
        Fail("lanes of one mask are at different warp functions");
      }
    }
    if (all) {
      for (unsigned l = 0; l < kLanes; ++l)
        if (((mask >> l) & 1) != 0) threads_[warp + l].answer = Answer(warp, l);
      for (unsigned l = 0; l < kLanes; ++l)
        if (((mask >> l) & 1) != 0) threads_[warp + l].state = State::kReady;
    }
    while (threads_[t].state != State::kReady) Yield();
    ACQUIRE(&threads_[warp].answer);
    return threads_[t].answer;
  }

  unsigned ActiveMask() const { return 1u << (at_ % kLanes); }
  void* shared() { return shared_.data(); }

  static thread_local BlockRunner* runner;

 private:
  enum class State { kReady, kAtBarrier, kAtWarp, kDone };
  struct Thread {
    ThreadIndex index{};
    State state = State::kReady;
    WarpOp op = WarpOp::kSync;
    unsigned mask = 0;
    uint64_t value = 0, answer = 0;
    int argument = 0, width = 0;
  };

  // Never returns, so ThreadSanitizer must not see that it is called: each thread of the fiber would make the stack that it
  // reports longer. For the same reason nothing that ignores may be left open here: all later threads would be ignored.
  SOK_UNSEEN static void Entry() {
    BlockRunner* const self = runner;
    ACQUIRE(&self->body_);
    (*self->body_)();
    Fiber* const fiber = self->EndThread();
    fiber->SwitchTo(&self->main_, /*last=*/true);
  }

  Fiber* EndThread() {
    const Unseen unseen;
    RELEASE(&running_);
    threads_[at_].state = State::kDone;
    --running_;
    ReleaseBarrier();  // threads that have ended are not waited for
    return fibers_[at_].get();
  }

  void ReleaseBarrier() {
    if (at_barrier_ == 0 || at_barrier_ < running_) return;
    at_barrier_ = 0;
    for (Thread& thread : threads_)
      if (thread.state == State::kAtBarrier) thread.state = State::kReady;
  }

  uint64_t Answer(unsigned warp, unsigned lane) const {
    const Thread& self = threads_[warp + lane];
    uint64_t lanes = 0;
    int from = static_cast<int>(lane);
    const int begin = static_cast<int>(lane) & ~(self.width - 1), end = begin + self.width;
    switch (self.op) {
      case WarpOp::kSync:
        return 0;
      case WarpOp::kBallot:
      case WarpOp::kMatch:
        for (unsigned l = 0; l < kLanes; ++l) {
          if (((self.mask >> l) & 1) == 0) continue;
          const uint64_t other = threads_[warp + l].value;
          if (self.op == WarpOp::kBallot ? other != 0 : other == self.value) lanes |= uint64_t{1} << l;
        }
        return lanes;
      case WarpOp::kShuffle:
        from = begin + (self.argument & (self.width - 1));
        break;
      case WarpOp::kShuffleXor:
        if ((from ^ self.argument) < end) from ^= self.argument;
        break;
      case WarpOp::kShuffleUp:
        if (from - self.argument >= begin) from -= self.argument;
        break;
      case WarpOp::kShuffleDown:
        if (from + self.argument < end) from += self.argument;
        break;
    }
    if (((self.mask >> from) & 1) == 0) Fail("a shuffle reads from a lane outside its mask");
    return threads_[warp + static_cast<unsigned>(from)].value;
  }

  uint64_t Random() {  // Marsaglia's xorshift (2003)
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_;
  }

  const std::function<void()>* body_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Thread> threads_;
  std::vector<float4> shared_;
  Fiber main_;
  unsigned at_ = 0, running_ = 0, at_barrier_ = 0;
  uint64_t random_ = 1;
};

thread_local BlockRunner* BlockRunner::runner = nullptr;

// Runners that no launch uses at the moment.
std::mutex runners_mutex;
std::vector<std::unique_ptr<BlockRunner>>& Runners() {
  static auto* runners = new std::vector<std::unique_ptr<BlockRunner>>();
  return *runners;
}

std::unique_ptr<BlockRunner> TakeRunner() {
  std::lock_guard<std::mutex> lock(runners_mutex);
  if (Runners().empty()) return std::make_unique<BlockRunner>();
  auto runner = std::move(Runners().back());
  Runners().pop_back();
  return runner;
}

void GiveRunner(std::unique_ptr<BlockRunner> runner) {
  std::lock_guard<std::mutex> lock(runners_mutex);
  Runners().push_back(std::move(runner));
}

}  // namespace

cudaError_t Launch(cudaStream_t stream, unsigned grid, unsigned block, size_t shared_bytes,
                   std::function<void()> thread) {
  if (block == 0 || block > kMaxThreads || grid == 0) Fail("a launch of 0 or of more than 1,024 threads a block");
  if (shared_bytes > (size_t{227} << 10)) Fail("a launch with more shared memory than a block can have");
  return Enqueue(stream, [=] {
    std::atomic<unsigned> next{0};
    auto work = [&](int) {
      auto runner = TakeRunner();
      for (unsigned b = next.fetch_add(1); b < grid; b = next.fetch_add(1)) {
        runner->Run(thread, dim3(grid), b, block, shared_bytes);
      }
      GiveRunner(std::move(runner));
    };
    OwnThreads::Run(static_cast<int>(std::min(grid, kBlocksAtOnce)), work);
  });
}

void Yield() { BlockRunner::runner->Yield(); }
void MaybeYield() {
  if (BlockRunner::runner != nullptr) BlockRunner::runner->MaybeYield();
}
void Fence() {
#if defined(__SANITIZE_THREAD__)  // which knows no fences: let this one order everything
  static char fence;
  RELEASE(&fence);
  ACQUIRE(&fence);
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
void BlockBarrier() { BlockRunner::runner->BlockBarrier(); }
uint64_t Warp(WarpOp op, unsigned mask, uint64_t value, int argument, int width) {
  return BlockRunner::runner->Warp(op, mask, value, argument, width);
}
unsigned ActiveMask() { return BlockRunner::runner->ActiveMask(); }
void* DynamicShared() { return BlockRunner::runner->shared(); }

}  // namespace sok_emulator
