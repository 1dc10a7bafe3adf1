/* The CUDA kernels for callers without C++: what include/sok says of each promise holds here too. Pointers are device memory
 * unless said otherwise. Nothing waits for the stream but calls whose name ends in _to_host.
 *
 * A function gives SOK_CUDA_OK or what went wrong; sok_cuda_last_error() then has the sentence. No exception leaves. */
#ifndef SOK_CUDA_C_API_H_
#define SOK_CUDA_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SOK_CUDA_OK = 0,
  SOK_CUDA_INVALID_ARGUMENT = 1,
  SOK_CUDA_TABLE_FULL = 2,
  SOK_CUDA_OUT_OF_MEMORY = 3,
  SOK_CUDA_FAILED_PRECONDITION = 4,
  SOK_CUDA_ERROR = 5,
  SOK_CUDA_INTERNAL = 6
};

/* Of the last call of this thread that failed; valid until the next. */
const char* sok_cuda_last_error(void);

/* 1 in the emulator, where device memory is the host's. */
int sok_cuda_is_emulated(void);

/* A stream (a cudaStream_t, or null) and scratch that is kept between calls. For one thread at a time. */
typedef struct SokCudaContext SokCudaContext;
int sok_cuda_context_create(void* stream, SokCudaContext** context);
void sok_cuda_context_destroy(SokCudaContext* context);
int sok_cuda_synchronize(SokCudaContext* context);

/* Floating-point types: "float32", "float16", "bfloat16". Combiners: "sum", "mean", "sqrtn". */

/* sok/unique.h. in_order: by first appearance, else as it comes. counts may be null. */
int sok_cuda_unique(SokCudaContext* context, const uint64_t* keys, int64_t n, int in_order, uint64_t* unique_keys,
                    uint32_t* inverse, uint32_t* counts, int64_t* num_unique);
int sok_cuda_unique_to_host(SokCudaContext* context, const uint64_t* keys, int64_t n, int in_order,
                            uint64_t* unique_keys, uint32_t* inverse, uint32_t* counts,
                            int64_t* num_unique); /* host memory */

/* sok/segment_sum.h. fixed: sums that repeat bit for bit. first_bad may be null. */
int sok_cuda_unsorted_segment_sum(SokCudaContext* context, const void* data, const char* type, const int64_t* ids,
                                  int64_t n, int64_t dim, int64_t num_segments, int fixed, float* sums,
                                  uint64_t* first_bad);

/* sok/partition.h. owner: as in Partition. places may be null. */
int sok_cuda_partition_keys(SokCudaContext* context, const uint64_t* keys, int64_t n, int world_size, int owner,
                            int is_unsigned, uint64_t* sorted_keys, uint32_t* positions, uint32_t* places,
                            int64_t* counts);

/* sok/device_rows.h: slabs, or else one matrix. */
typedef struct {
  void* slabs;
  float* matrix;
  int64_t shift, mask, stride;
} SokCudaRows;

/* sok/combine.h: positions of segments. */
typedef struct {
  const int64_t* row_splits; /* or null: hotness positions each */
  int64_t hotness, segments, n;
} SokCudaSegments;

typedef struct {
  SokCudaRows rows;
  int64_t num_rows, dim;
  const int64_t* index;
  SokCudaSegments segments;
  const float* weights; /* or null */
  const char* combiner;
  void* output;
  int64_t output_stride;
} SokCudaFeature;

/* `features` is host memory. */
int sok_cuda_combine_group(SokCudaContext* context, const SokCudaFeature* features, int64_t num_features,
                           const char* output_type, uint64_t* first_bad);

int sok_cuda_expand_segments(SokCudaContext* context, const SokCudaSegments* segments, const float* weights,
                             const char* combiner, uint32_t* segment_of, float* factor);

/* sok/combine_grad.h. `feature` and `segments` are host memory; first_bad may be null. */
int sok_cuda_combine_grad_weights(SokCudaContext* context, const SokCudaFeature* feature, const float* grad,
                                  float* grad_weights, uint64_t* first_bad);
int sok_cuda_combine_grad_rows(SokCudaContext* context, const float* grad, const int64_t* index,
                               const SokCudaSegments* segments, const float* weights, int64_t num_rows, int64_t dim,
                               const char* combiner, float* grad_rows, uint64_t* first_bad);

/* sok/sum_rows.h */
typedef struct {
  int64_t table;
  const int64_t* row_ids;
  const void* values;
  int64_t values_stride;
  SokCudaSegments segments;
  const float* weights; /* or null */
  const char* combiner;
} SokCudaAddends;

/* `addends` and `table_rows` are host memory. tables and first_bad may be null. */
int sok_cuda_sum_rows(SokCudaContext* context, const SokCudaAddends* addends, int64_t num_addends,
                      const int64_t* table_rows, int64_t num_tables, int64_t dim, const char* type, int64_t* row_ids,
                      int32_t* tables, float* sums, int64_t* num_sums, uint64_t* first_bad);

/* The same into arrays of each table's own, for tables of any dims. `tables` is host memory, what it points to is not. */
typedef struct {
  int64_t num_rows, dim;
  int64_t* row_ids;  /* [addends of the table] */
  float* sums;       /* [addends of the table, dim] */
  int64_t* num_sums; /* [1] */
} SokCudaRowSums;
int sok_cuda_sum_rows_of_tables(SokCudaContext* context, const SokCudaAddends* addends, int64_t num_addends,
                                const SokCudaRowSums* tables, int64_t num_tables, const char* type,
                                uint64_t* first_bad);

/* sok/device_update.h. Of a decaying rule, the calls so far on one table. */
typedef struct SokCudaDecay SokCudaDecay;
int sok_cuda_decay_create(SokCudaDecay** decay);
void sok_cuda_decay_destroy(SokCudaDecay* decay);

typedef struct {
  SokCudaRows rows;
  int64_t num_rows, slot_offset;
  SokCudaDecay* decay; /* or null */
  uint32_t* stamps;    /* [num_rows], with decay */
} SokCudaUpdate;

/* rule, hyper and step as MakeUpdateRule's; nonfinite "allow", "skip" or "raise". With a decaying rule the call is appended
 * to every table's decay; with nonfinite "raise" it is first waited for, since a call that is refused must not count.
 * `updates` and `hyper` are host memory. tables, num_grads and first_bad may be null. */
int sok_cuda_update_rows(SokCudaContext* context, const char* rule, const double* hyper, int64_t hyper_size,
                         int64_t step, const SokCudaUpdate* updates, int64_t num_tables, const int32_t* tables,
                         const int64_t* row_ids, const void* grads, const char* type, int64_t n,
                         const int64_t* num_grads, int64_t dim, float grad_scale, const char* nonfinite,
                         uint64_t* first_bad);
int sok_cuda_settle_rows(SokCudaContext* context, const char* rule, const double* hyper, int64_t hyper_size,
                         int64_t step, const SokCudaUpdate* update, const int64_t* row_ids, int64_t n, int64_t dim);
int sok_cuda_throw_if_bad_to_host(SokCudaContext* context, const uint64_t* first_bad, const int64_t* row_ids,
                                  int64_t n);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SOK_CUDA_C_API_H_ */
