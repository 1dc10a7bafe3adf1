#include "c_api_order.h"

#include <memory>

#include "c_api_guard.h"
#include "detail/check.h"
#include "detail/event.h"

struct SokCudaMark {
  sok::HomeDevice home;
  std::shared_ptr<sok::Event> event;
};

namespace sok {
namespace {

// What `later` is given from now on waits for what `earlier` has been given so far.
void Order(const Cuda& earlier, const Cuda& later) {
  const std::shared_ptr<Event> event = TakeEvent();
  event->Record(earlier);
  event->Before(later);
}

int PlaceOf(cudaMemoryType type) {
  if (type == cudaMemoryTypeManaged) return SOK_CUDA_MANAGED_MEMORY;
  return type == cudaMemoryTypeDevice ? SOK_CUDA_DEVICE_MEMORY : SOK_CUDA_HOST_MEMORY;
}

Cuda CudaOf(void* stream) { return Cuda{static_cast<cudaStream_t>(stream)}; }

}  // namespace
}  // namespace sok

int sok_cuda_wait_for(SokCudaContext* context, void* stream) {
  return sok::Guard([&] {
    const sok::HomeDevice::Visit visit(context->home);
    sok::Order(sok::CudaOf(stream), context->cuda);
  });
}

int sok_cuda_let_wait(SokCudaContext* context, void* stream) {
  return sok::Guard([&] {
    const sok::HomeDevice::Visit visit(context->home);
    sok::Order(context->cuda, sok::CudaOf(stream));
  });
}

int sok_cuda_mark_create(SokCudaContext* context, SokCudaMark** mark) {
  return sok::Guard([&] {
    const sok::HomeDevice::Visit visit(context->home);
    auto made = std::make_unique<SokCudaMark>(SokCudaMark{context->home, sok::TakeEvent()});
    made->event->Record(context->cuda);
    *mark = made.release();
  });
}

void sok_cuda_mark_destroy(SokCudaMark* mark) {
  if (mark == nullptr) return;
  const sok::HomeDevice::Visit visit(mark->home);
  delete mark;
}

int sok_cuda_mark_has_passed(SokCudaMark* mark, int* has_passed) {
  return sok::Guard([&] { *has_passed = mark->event->HasPassed() ? 1 : 0; });
}

int sok_cuda_place_of(const void* address, int* place, int* device) {
  return sok::Guard([&] {
    cudaPointerAttributes attributes{};
    SOK_CUDA(cudaPointerGetAttributes(&attributes, address));
    *place = sok::PlaceOf(attributes.type);
    *device = attributes.device;
  });
}
