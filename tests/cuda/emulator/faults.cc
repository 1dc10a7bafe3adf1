// Calls of the runtime that fail on purpose.
#include "faults.h"

#include <atomic>

namespace {

std::atomic<int64_t> left{-1};  // calls until one fails; negative: none does
std::atomic<cudaError_t> error{cudaSuccess};
std::atomic<bool> allocations_alone{false}, stays{false}, has_failed{false};
thread_local cudaError_t last = cudaSuccess;

bool IsGone() { return stays && has_failed && left == 0 && !allocations_alone; }

}  // namespace

namespace sok_emulator {

void FailCall(int64_t others, int with, bool for_good, bool of_allocations) {
  error = static_cast<cudaError_t>(with);
  stays = for_good;
  allocations_alone = of_allocations;
  has_failed = false;
  left = others;
}

bool EndFaults() {
  left = -1;
  if (stays) last = cudaSuccess;  // that of a device that was gone
  return has_failed;
}

cudaError_t NextStatus(bool allocates) {
  if (left < 0 || (allocations_alone && !allocates) || (left > 0 && left.fetch_sub(1) > 0)) return cudaSuccess;
  if (!stays) left = -1;
  has_failed = true;
  return Noted(error);
}

cudaError_t Noted(cudaError_t status) {
  if (status != cudaSuccess) last = status;
  return status;
}

cudaError_t LastError(bool clears) {
  if (IsGone()) return error;
  const cudaError_t found = last;
  if (clears) last = cudaSuccess;
  return found;
}

}  // namespace sok_emulator
