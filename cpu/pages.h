// Large zeroed arrays straight from the operating system, in huge pages where that pays.
#pragma once

#include <cstdint>

namespace sok {

// `bytes` of zeroed memory, 2 MiB aligned if that large (else 64 bytes at least). Untouched pages cost nothing. With huge, asks for
// transparent huge pages: random access to large arrays is bound by address translation without them.
// Throws OutOfMemory naming `what`.
void* AllocatePages(int64_t bytes, bool huge, const char* what);

// Asks for huge pages under memory that AllocatePages gave without; contents stay. A hint: it may do nothing.
void MakeHuge(void* p, int64_t bytes);

// Takes back what AllocatePages gave for the same number of bytes.
void FreePages(void* p, int64_t bytes);

}  // namespace sok
