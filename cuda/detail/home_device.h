// Devices of one's own: work, and above all what is freed, goes to the device it belongs to, whichever is current.
#pragma once

#include <cuda_runtime.h>

namespace sok {

// The device that is current when this is made. Throws CudaError.
class HomeDevice {
 public:
  HomeDevice();

  // For as long as this lives, that device is the thread's current one. Contexts are pushed and popped: cudaSetDevice would
  // make a context on the device that it goes back to, where this process may have no work.
  class Visit {
   public:
    explicit Visit(const HomeDevice& home);
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    ~Visit();

   private:
    bool has_pushed_;
  };

 private:
  void* context_ = nullptr;
};

}  // namespace sok
