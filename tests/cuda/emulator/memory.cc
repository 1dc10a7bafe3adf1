#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace sok_emulator {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kApart = false;
#else
constexpr bool kApart = true;
#endif
#if defined(SOK_TRACED)  // no kernel runs that would write something: what the host reads is to be plausible
constexpr int kFresh = 0;
#else
constexpr int kFresh = 0xA5;
#endif
constexpr size_t kSpan = size_t{1} << 44, kPage = 4096, kAlignment = 256;

std::atomic<bool> host_is_device{false};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, size_t> device, pinned;
  std::map<uintptr_t, int> number;  // of the device that has what begins there
  std::set<uintptr_t> going;        // what is given back as soon as a stream has come so far
  size_t in_use = 0, limit = size_t{16} << 30;
  uintptr_t first = 0;  // of the addresses that the host gets: kSpan of them, and as many where things lie
  size_t next = 0;      // how many of them have been given
  struct sigaction before{};
};
Memory& memory() {
  static auto* m = new Memory();
  return *m;
}

uintptr_t Word(const void* p) { return reinterpret_cast<uintptr_t>(p); }
bool IsHostsAddress(uintptr_t p) { return memory().first != 0 && p - memory().first < kSpan; }
bool IsWhereItLies(uintptr_t p) { return memory().first != 0 && p - memory().first - kSpan < kSpan; }

// The allocation that p is in, or that ends at p.
std::map<uintptr_t, size_t>::const_iterator Find(const std::map<uintptr_t, size_t>& all, uintptr_t p) {
  auto found = all.upper_bound(p);
  if (found == all.begin()) return all.end();
  --found;
  return p <= found->first + found->second ? found : all.end();
}

// Whether p is in it. What ends at p is not it: a heap may give the bytes behind to anyone.
bool Holds(const std::map<uintptr_t, size_t>& all, std::map<uintptr_t, size_t>::const_iterator found, uintptr_t p) {
  return found != all.end() && p < found->first + found->second;
}

// Says what was touched, if it is ours, and leaves the rest to whoever was asked before: a debugger, a sanitizer or
// Python's faulthandler then shows where.
void OnFault(int, siginfo_t* info, void*) {
  Memory& m = memory();
  const uintptr_t at = Word(info->si_addr);
  const bool in_kernel = current != nullptr, known = m.mutex.try_lock();
  char where[96] = "in no allocation";
  if (known) {
    const auto found = Find(m.device, IsWhereItLies(at) ? at - kSpan : at);
    if (found != m.device.end()) {
      std::snprintf(where, sizeof(where), "%zu bytes into an allocation of %zu", (at - found->first) % kSpan,
                    found->second);
    }
    m.mutex.unlock();
  }
  char said[320] = "";
  if (info->si_code != SEGV_ACCERR && info->si_code != SEGV_MAPERR) {
  } else if (IsHostsAddress(at) && in_kernel) {
    std::snprintf(
        said, sizeof(said),
        "emulator: a kernel touched device memory (%p, %s) by an address that was no argument of its launch, nor "
        "uploaded by UploadTo, or that was free by then.\n",
        info->si_addr, where);
  } else if (IsHostsAddress(at)) {
    std::snprintf(said, sizeof(said),
                  "emulator: the host touched device memory (%p, %s). Only kernels and cudaMemcpyAsync may.\n",
                  info->si_addr, where);
  } else if (IsWhereItLies(at)) {
    std::snprintf(
        said, sizeof(said),
        "emulator: a kernel or a copy touched device memory that is not allocated (what the host knows as %p, "
        "%s).\n",
        reinterpret_cast<void*>(at - kSpan), where);
  }
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, said, std::char_traits<char>::length(said));
  sigaction(SIGSEGV, &m.before, nullptr);
}

void Reserve(Memory* m) {
  void* p = mmap(nullptr, 2 * kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) EndWith("no room for the addresses of device memory");
  m->first = Word(p);
  struct sigaction action{};
  action.sa_sigaction = OnFault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &m->before);
}

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

bool IsMapped(uintptr_t p) {
  unsigned char resident;
  return mincore(reinterpret_cast<void*>(p / kPage * kPage), 1, &resident) == 0;
}

}  // namespace

void EndWith(const char* format, ...) {
  std::va_list args;
  va_start(args, format);
  std::fputs("emulator: ", stderr);
  std::vfprintf(stderr, format, args);
  std::fputs(".\n", stderr);
  va_end(args);
  std::abort();
}

void SetMemoryLimit(size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().limit = bytes;
}

size_t MemoryInUse() {
  std::lock_guard<std::mutex> lock(memory().mutex);
  return memory().in_use;
}

void MemoryInfo(size_t* in_use, size_t* limit) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  *in_use = memory().in_use;
  *limit = memory().limit;
}

void HostMemoryIsDevice() { host_is_device = true; }
bool IsHostMemoryDevice() { return host_is_device; }

cudaError_t AllocateDevice(void** p, size_t bytes, int device) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (bytes > m.limit || m.in_use > m.limit - bytes) return cudaErrorMemoryAllocation;
  if constexpr (kApart) {
    if (m.first == 0) Reserve(&m);
    // As far up as an allocation's alignment lets it: the page behind it is nobody's.
    const size_t rounded = RoundUp(bytes, kAlignment), pages_bytes = RoundUp(rounded, kPage);
    if (pages_bytes + kPage > kSpan - m.next) EndWith("all %zu bytes of addresses have been given once", kSpan);
    const uintptr_t pages = m.first + m.next;
    if (mprotect(reinterpret_cast<void*>(pages + kSpan), pages_bytes, PROT_READ | PROT_WRITE) != 0) {
      return cudaErrorMemoryAllocation;
    }
    m.next += pages_bytes + kPage;
    *p = reinterpret_cast<void*>(pages + pages_bytes - rounded);
  } else {
    *p = std::aligned_alloc(kAlignment, RoundUp(bytes, kAlignment));
    if (*p == nullptr) return cudaErrorMemoryAllocation;
  }
  m.device[Word(*p)] = bytes;
  m.number[Word(*p)] = device;
  m.in_use += bytes;
  std::memset(kApart ? static_cast<char*>(*p) + kSpan : *p, kFresh, bytes);  // fresh memory holds anything
  return cudaSuccess;
}

bool FreeDevice(void* p) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  const auto found = m.device.find(Word(p));
  if (found == m.device.end()) return false;
  if constexpr (kApart) {
    const uintptr_t pages = Word(p) / kPage * kPage + kSpan, end = Word(p) + kSpan + RoundUp(found->second, kAlignment);
    void* gone = mmap(reinterpret_cast<void*>(pages), end - pages, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (gone == MAP_FAILED) EndWith("freeing %zu bytes of device memory failed", found->second);
  } else {
    std::free(p);
  }
  m.in_use -= found->second;
  m.number.erase(found->first);
  m.going.erase(found->first);
  m.device.erase(found);
  return true;
}

void NoteGoing(void* p) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().going.insert(Word(p));
}

void CheckArgument(uint64_t word, const char* kernel, int number) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (!IsHostsAddress(word)) return;
  const auto found = Find(m.device, word);
  if (found == m.device.end() || m.going.count(found->first) != 0)
    EndWith("%s: argument %d is the address of device memory that %s (%p)", kernel, number,
            found == m.device.end() ? "nobody has" : "was given back", reinterpret_cast<void*>(word));
}

void Pin(void* p, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().pinned[Word(p)] = bytes;
}

void Unpin(void* p) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().pinned.erase(Word(p));
}

Kind KindOf(const void* p, size_t bytes, const char* call) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto found = Find(m.device, Word(p));
  const bool on_device = Holds(m.device, found, Word(p));
  if (!on_device) found = Find(m.pinned, Word(p));
  if (!on_device && !Holds(m.pinned, found, Word(p))) {
    if (IsHostsAddress(Word(p)) || IsWhereItLies(Word(p))) EndWith("%s: no device memory is allocated at %p", call, p);
    return Kind::kHost;
  }
  if (bytes > found->second - (Word(p) - found->first)) {
    EndWith("%s: %zu bytes at %p reach past an allocation of %zu bytes at %p", call, bytes, p, found->second,
            reinterpret_cast<void*>(found->first));
  }
  return on_device ? Kind::kDevice : Kind::kPinned;
}

cudaPointerAttributes AttributesOf(const void* p, int current) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  const auto found = Find(m.device, Word(p));
  if (Holds(m.device, found, Word(p))) return {cudaMemoryTypeDevice, m.number.at(found->first)};
  if (Holds(m.pinned, Find(m.pinned, Word(p)), Word(p))) return {cudaMemoryTypeHost, -1};
  if (host_is_device && !IsHostsAddress(Word(p)) && !IsWhereItLies(Word(p))) return {cudaMemoryTypeDevice, current};
  return {cudaMemoryTypeUnregistered, -1};
}

void* MovedToDevice(const void* p) {
  void* same = const_cast<void*>(p);
  return kApart && IsHostsAddress(Word(p)) ? static_cast<char*>(same) + kSpan : same;
}

void MovePointers(void* words, size_t bytes, bool are_pointers, Line line, const char* what) {
  Memory& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
    uintptr_t word;
    std::memcpy(&word, static_cast<char*>(words) + at, sizeof(word));
    if (Find(m.device, word) != m.device.end()) {
      if (kApart) word += kSpan;
      std::memcpy(static_cast<char*>(words) + at, &word, sizeof(word));
      continue;
    }
#if defined(__clang__)  // leaves in structures what lay between their members before
    if (!are_pointers) continue;
#endif
    // A number of a structure is taken for a pointer only if it is large and something is there.
    constexpr uintptr_t kLeast = uintptr_t{1} << 40, kMost = uintptr_t{1} << 47;
    if (host_is_device || word < (are_pointers ? 1 : kLeast) || word >= kMost) continue;
    if (IsHostsAddress(word) || IsWhereItLies(word) || Find(m.pinned, word) != m.pinned.end() || !IsMapped(word))
      continue;
    EndWith("%s:%d: %s has, at byte %zu, the address of memory of the host that is not pinned (%p)", line.file,
            line.number, what, at, reinterpret_cast<void*>(word));
  }
}

}  // namespace sok_emulator
