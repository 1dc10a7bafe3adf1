// The emulated CUDA device (tests/cuda/emulator) as a device of TensorFlow, "EMULATED_GPU": a pluggable device whose
// streams, events and memory are the emulator's. Where a kernel runs on a stream, its output is not there before the
// stream has come past it, as on a device.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/c/tf_status.h"

namespace {

cudaStream_t Stream(SP_Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Event(SP_Event event) { return reinterpret_cast<cudaEvent_t>(event); }

void Ok(TF_Status* status) { TF_SetStatus(status, TF_OK, ""); }

void Allocate(const SP_Device*, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = nullptr;
  memory->size = cudaMalloc(&memory->opaque, size) == cudaSuccess ? size : 0;
}
void Deallocate(const SP_Device*, SP_DeviceMemoryBase* memory) {
  cudaFree(memory->opaque);
  memory->opaque = nullptr;
  memory->size = 0;
}
void* AllocateHost(const SP_Device*, uint64_t size) {
  void* p = nullptr;
  return cudaHostAlloc(&p, size, cudaHostAllocDefault) == cudaSuccess ? p : nullptr;
}
void DeallocateHost(const SP_Device*, void* p) { cudaFreeHost(p); }

TF_Bool Usage(const SP_Device*, int64_t* free, int64_t* total) {
  size_t free_bytes, total_bytes;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  *free = static_cast<int64_t>(free_bytes);
  *total = static_cast<int64_t>(total_bytes);
  return 1;
}

void CreateStream(const SP_Device*, SP_Stream* stream, TF_Status* status) {
  cudaStream_t made;
  cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
  *stream = reinterpret_cast<SP_Stream>(made);
  Ok(status);
}
void DestroyStream(const SP_Device*, SP_Stream stream) { cudaStreamDestroy(Stream(stream)); }
void StreamStatus(const SP_Device*, SP_Stream, TF_Status* status) { Ok(status); }

void CreateEvent(const SP_Device*, SP_Event* event, TF_Status* status) {
  cudaEvent_t made;
  cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
  *event = reinterpret_cast<SP_Event>(made);
  Ok(status);
}
void DestroyEvent(const SP_Device*, SP_Event event) { cudaEventDestroy(Event(event)); }
SE_EventStatus EventStatus(const SP_Device*, SP_Event event) {
  return cudaEventQuery(Event(event)) == cudaSuccess ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
}
void RecordEvent(const SP_Device*, SP_Stream stream, SP_Event event, TF_Status* status) {
  cudaEventRecord(Event(event), Stream(stream));
  Ok(status);
}
void WaitForEvent(const SP_Device* const, SP_Stream stream, SP_Event event, TF_Status* const status) {
  cudaStreamWaitEvent(Stream(stream), Event(event), 0);
  Ok(status);
}
void BlockHostForEvent(const SP_Device*, SP_Event event, TF_Status* status) {
  cudaEventSynchronize(Event(event));
  Ok(status);
}
void StreamDependency(const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status* status) {
  cudaEvent_t event;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  cudaEventRecord(event, Stream(other));
  cudaStreamWaitEvent(Stream(dependent), event, 0);
  cudaEventDestroy(event);
  Ok(status);
}
void BlockHostUntilDone(const SP_Device*, SP_Stream stream, TF_Status* status) {
  cudaStreamSynchronize(Stream(stream));
  Ok(status);
}
void SynchronizeAll(const SP_Device*, TF_Status* status) {
  cudaDeviceSynchronize();
  Ok(status);
}

void Copy(SP_Stream stream, void* to, const void* from, uint64_t size, TF_Status* status) {
  cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, Stream(stream));
  Ok(status);
}
void ToHost(const SP_Device*, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
            TF_Status* status) {
  Copy(stream, to, from->opaque, size, status);
}
void ToDevice(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
              TF_Status* status) {
  Copy(stream, to->opaque, from, size, status);
}
void OnDevice(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
              uint64_t size, TF_Status* status) {
  Copy(stream, to->opaque, from->opaque, size, status);
}
void ToHostNow(const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t size, TF_Status* status) {
  cudaMemcpy(to, from->opaque, size, cudaMemcpyDefault);
  Ok(status);
}
void ToDeviceNow(const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t size, TF_Status* status) {
  cudaMemcpy(to->opaque, from, size, cudaMemcpyDefault);
  Ok(status);
}
void OnDeviceNow(const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, uint64_t size,
                 TF_Status* status) {
  cudaMemcpy(to->opaque, from->opaque, size, cudaMemcpyDefault);
  Ok(status);
}
void Zero(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, uint64_t size, TF_Status* status) {
  cudaMemsetAsync(to->opaque, 0, size, Stream(stream));
  Ok(status);
}
void Set(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, uint8_t value, uint64_t size, TF_Status* status) {
  cudaMemsetAsync(to->opaque, value, size, Stream(stream));
  Ok(status);
}
void Set32(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, uint32_t value, uint64_t size,
           TF_Status* status) {
  auto* words = static_cast<uint32_t*>(sok_emulator::OnDevice(to->opaque));
  sok_emulator::Enqueue(Stream(stream), [=] {
    for (uint64_t i = 0; i < size / 4; ++i) words[i] = value;
  });
  Ok(status);
}
TF_Bool Callback(const SP_Device*, SP_Stream stream, SE_StatusCallbackFn function, void* argument) {
  sok_emulator::Enqueue(Stream(stream), [=] {
    TF_Status* status = TF_NewStatus();
    function(argument, status);
    TF_DeleteStatus(status);
  });
  return 1;
}

void CreateStreamExecutor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status* status) {
  SP_StreamExecutor* e = params->stream_executor;
  e->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  e->allocate = Allocate;
  e->deallocate = Deallocate;
  e->host_memory_allocate = AllocateHost;
  e->host_memory_deallocate = DeallocateHost;
  e->get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return 0; };
  e->device_memory_usage = Usage;
  e->create_stream = CreateStream;
  e->destroy_stream = DestroyStream;
  e->create_stream_dependency = StreamDependency;
  e->get_stream_status = StreamStatus;
  e->create_event = CreateEvent;
  e->destroy_event = DestroyEvent;
  e->get_event_status = EventStatus;
  e->record_event = RecordEvent;
  e->wait_for_event = WaitForEvent;
  e->memcpy_dtoh = ToHost;
  e->memcpy_htod = ToDevice;
  e->memcpy_dtod = OnDevice;
  e->sync_memcpy_dtoh = ToHostNow;
  e->sync_memcpy_htod = ToDeviceNow;
  e->sync_memcpy_dtod = OnDeviceNow;
  e->block_host_for_event = BlockHostForEvent;
  e->block_host_until_done = BlockHostUntilDone;
  e->synchronize_all_activity = SynchronizeAll;
  e->mem_zero = Zero;
  e->memset = Set;
  e->memset32 = Set32;
  e->host_callback = Callback;
  Ok(status);
}

}  // namespace

extern "C" void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status* status) {
  SP_Platform* platform = params->platform;
  platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  platform->name = "EMULATOR";
  platform->type = "EMULATED_GPU";
  platform->supports_unified_memory = 0;
  platform->use_bfc_allocator = 1;
  platform->force_memory_growth = 1;
  SP_PlatformFns* f = params->platform_fns;
  f->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  f->get_device_count = [](const SP_Platform*, int* count, TF_Status* s) {
    *count = 1;
    Ok(s);
  };
  f->create_device = [](const SP_Platform*, SE_CreateDeviceParams* p, TF_Status* s) {
    p->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    p->device->hardware_name = "sok's emulator";
    p->device->device_vendor = "sok";
    p->device->pci_bus_id = "0000:00:00.0";
    Ok(s);
  };
  f->destroy_device = [](const SP_Platform*, SP_Device*) {};
  f->create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* p, TF_Status* s) {
    *p->device_fns = {SP_DEVICE_FNS_STRUCT_SIZE, nullptr, [](const SP_Device*) -> int32_t { return -1; },
                      [](const SP_Device*) -> int64_t { return -1; }, [](const SP_Device*) -> double { return -1; }};
    Ok(s);
  };
  f->destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  f->create_stream_executor = CreateStreamExecutor;
  f->destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  f->create_timer_fns = [](const SP_Platform*, SP_TimerFns* t, TF_Status* s) {
    t->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
    t->nanoseconds = [](SP_Timer) -> uint64_t { return 0; };
    Ok(s);
  };
  f->destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
  Ok(status);
}

// For tests in Python: what sok_emulator::CountsSoFar says, in this order.
extern "C" void sok_emulator_counts(int64_t* counts) {
  const sok_emulator::Counts c = sok_emulator::CountsSoFar();
  const int64_t all[] = {c.launches, c.copies, c.sets, c.to_device, c.to_host, c.bytes, c.pageable, c.marks, c.waits, c.host_waits};
  std::copy(std::begin(all), std::end(all), counts);
}
