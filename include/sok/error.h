// The error vocabulary of the kernels. Each type becomes one TensorFlow status (ops/guard.h).
#pragma once

#include <stdexcept>
#include <string>

namespace sok {

// A caller's argument is wrong; nothing was changed.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The table has no room for the new keys of this call; nothing was changed.
struct TableFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The operating system, or the device, gave no memory.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The call does not fit the state of the object (for example an unknown slot set).
struct FailedPrecondition : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The time that a call may take is over.
struct DeadlineExceeded : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A call to CUDA failed: no device, or an earlier kernel went wrong.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace sok
