#include "sok/pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>

#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

void* AllocatePages(int64_t bytes, bool huge, const char* what) {
  // mmap aligns to 4 KiB; large arrays are cut out of a larger mapping so that they start on a huge page.
  const int64_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* raw = mmap(nullptr, static_cast<size_t>(bytes + slack), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    throw OutOfMemory("the system has no memory for " + std::to_string(bytes) + " bytes of " + what +
                      MappingsText("/proc"));
  }
  if (slack == 0) return raw;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (begin + kHugePage - 1) & ~static_cast<uintptr_t>(kHugePage - 1);
  if (aligned != begin) munmap(raw, aligned - begin);
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes + slack);
  const uintptr_t kept_end = (aligned + static_cast<uintptr_t>(bytes) + 4095) & ~uintptr_t{4095};
  if (kept_end < end) munmap(reinterpret_cast<void*>(kept_end), end - kept_end);
  if (huge) madvise(reinterpret_cast<void*>(aligned), static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a hint: may fail
  return reinterpret_cast<void*>(aligned);
}

void MakeHuge(void* p, int64_t bytes) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE (Linux 6.1): at once, where the first call alone leaves it for later
  madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  madvise(p, static_cast<size_t>(bytes), kCollapse);
}

void DropPages(void* p, int64_t bytes) {
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + 4095) & ~uintptr_t{4095};
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes)) & ~uintptr_t{4095};
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

std::string MappingsText(const std::string& proc) {
  std::ifstream maps(proc + "/self/maps"), limit(proc + "/sys/vm/max_map_count");
  const int64_t mappings = std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
  int64_t most = 0;
  if (!(limit >> most) || mappings < most - most / 16) return "";
  return "; this process has " + std::to_string(mappings) + " memory mappings and may have " + std::to_string(most) +
         ": raise vm.max_map_count (sysctl -w vm.max_map_count=1048576)";
}

void FreePages(void* p, int64_t bytes) {
  if (p != nullptr) munmap(p, static_cast<size_t>(bytes));
}

}  // namespace sok
