// Large zeroed arrays straight from the operating system, in huge pages where that pays.
#pragma once

#include <cstdint>
#include <string>

namespace sok {

// `bytes` of zeroed memory, 2 MiB aligned if that large (else 64 bytes at least). Untouched pages cost nothing. With huge, asks for
// transparent huge pages: random access to large arrays is bound by address translation without them.
// lazily: most of it may never be used, so the system is not asked whether it has as much.
// Throws OutOfMemory naming `what`; it says so if the process has about as many mappings as the system lets it have.
void* AllocatePages(int64_t bytes, bool huge, const char* what, bool lazily = false);

// Gives back the whole pages in a part of what AllocatePages gave; they read as zeros from then on.
void DropPages(void* p, int64_t bytes);

// Asks for huge pages under memory that AllocatePages gave without; contents stay. A hint: it may do nothing.
void MakeHuge(void* p, int64_t bytes);

// Takes back what AllocatePages gave for the same number of bytes.
void FreePages(void* p, int64_t bytes);

// What to add to a message that there is no memory: that PROC/self/maps is nearly as long as PROC/sys/vm/max_map_count allows, or
// nothing.
std::string MappingsText(const std::string& proc);

// Bytes to ask for where sizes differ a little from step to step: one of eight sizes per power of two, so that they can share
// memory; a multiple of `least`.
constexpr int64_t SharedSize(int64_t bytes, int64_t least) {
  int64_t step = least;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

}  // namespace sok
