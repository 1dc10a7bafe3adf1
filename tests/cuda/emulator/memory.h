// Memory as a device tells it apart: its own, that of the host which is pinned, and the rest of the host's, which it
// cannot reach.
//
// Nobody can touch anything at the addresses that cudaMalloc gives. What belongs there lies a constant distance above, and
// kernels and copies get addresses that are moved by it (MovePointers, OnDevice). So a host that reads or writes device memory
// ends with a sentence, whatever else is going on. Each allocation ends before a page that nobody can touch either, and
// no address is given twice.
//
// Under the address and the thread sanitizer device memory is the heap's, where the former knows each byte and the latter
// what was freed: there the distance is 0, and a host that touches it is not noticed.
#pragma once

#include <cstddef>

#include "cuda_runtime.h"

namespace sok_emulator {

cudaError_t AllocateDevice(void** p, size_t bytes, int device);
bool FreeDevice(void* p);  // false: not what AllocateDevice gave
void NoteGoing(void* p);   // what cudaFreeAsync was asked to free
// Ends the process where the word is an address among those of device memory, and that memory is not there, or goes before the kernel
// would run.
void CheckArgument(uint64_t word, const char* kernel, int number);
void Pin(void* p, size_t bytes);
void Unpin(void* p);
void MemoryInfo(size_t* in_use, size_t* limit);

enum class Kind { kDevice, kPinned, kHost };
// Where the bytes lie. Ends the process where they reach past what was allocated; `call` is named then.
Kind KindOf(const void* p, size_t bytes, const char* call);
// Of the byte at p, of which nothing need be known; `current` is the thread's device.
cudaPointerAttributes AttributesOf(const void* p, int current);
// Whether HostMemoryIsDevice() was called.
bool IsHostMemoryDevice();

[[noreturn]] void EndWith(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace sok_emulator
