/* What arrays of other libraries need: where they lie, and the order between their streams and a context's. No call waits. */
#ifndef SOK_CUDA_C_API_ORDER_H_
#define SOK_CUDA_C_API_ORDER_H_

#include "c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Work that the context is given from now on waits for what `stream` has been given so far; or the other way round. `stream`
 * is a cudaStream_t of the context's device; null and 1 are the legacy default stream, 2 is the calling thread's own. */
int sok_cuda_wait_for(SokCudaContext* context, void* stream);
int sok_cuda_let_wait(SokCudaContext* context, void* stream);

/* A place behind all that the context has been given so far. */
typedef struct SokCudaMark SokCudaMark;
int sok_cuda_mark_create(SokCudaContext* context, SokCudaMark** mark);
void sok_cuda_mark_destroy(SokCudaMark* mark);
int sok_cuda_mark_has_passed(SokCudaMark* mark, int* has_passed);

/* Where memory lies; of a device's, on which. Address and answers are the host's to read and write. */
enum { SOK_CUDA_HOST_MEMORY = 0, SOK_CUDA_DEVICE_MEMORY = 1, SOK_CUDA_MANAGED_MEMORY = 2 };
int sok_cuda_place_of(const void* address, int* place, int* device);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SOK_CUDA_C_API_ORDER_H_ */
