// Pinned memory of the host, for copies that the host does not wait for.
#pragma once

#include <cstdint>

#include "sok/device.h"
#include "sok/device_words.h"

struct CUevent_st;

namespace sok {

// A block of pinned memory of the current device, lent by the process, and the place in a stream behind its last copy.
class PinnedLease {
 public:
  // Throws CudaError.
  explicit PinnedLease(int64_t bytes);
  PinnedLease(const PinnedLease&) = delete;
  PinnedLease& operator=(const PinnedLease&) = delete;
  ~PinnedLease();  // others get it once its copies are done

  void* data() const { return data_; }
  void Mark(const Cuda& cuda);  // its copies are on the stream
  void Wait() const;            // for these

 private:
  int device_ = 0;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  CUevent_st* copied_ = nullptr;
};

inline constexpr int64_t kMostUploaded = int64_t{32} << 20;  // bytes of one copy; more go by several

// to[0 .. bytes) = from[0 .. bytes), put on the stream; `from` is read before the call returns. The host waits only where many
// such copies are still under way. Throws CudaError.
void UploadBytes(const Cuda& cuda, const void* from, int64_t bytes, void* to);
// The same of parts that lie apart (CopyToDevice).
void UploadParts(const Cuda& cuda, const HostPart* parts, int64_t num_parts, void* to);

}  // namespace sok
