/* Embedding tables on a device, for callers without C++: what include/sok/device_table.h says holds here too. */
#ifndef SOK_CUDA_C_API_TABLE_H_
#define SOK_CUDA_C_API_TABLE_H_

#include "c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* TableConfig of sok/embedding_table.h. All pointers are host memory, read before the call returns. */
typedef struct {
  const char* name;
  int64_t dim, capacity, hashed, is_unsigned, world_size, rank, owner, num_keys;
  const char* initializer; /* "constant", "uniform", "normal", "truncated_normal", "bank" */
  float a, b;
  uint64_t seed;
  const float* bank; /* [bank_rows, dim], or null */
  int64_t bank_rows;
} SokCudaTableConfig;

typedef struct SokCudaTable SokCudaTable;
int sok_cuda_table_create(const SokCudaTableConfig* config, int64_t budget_bytes, SokCudaTable** table);
void sok_cuda_table_destroy(SokCudaTable* table);

/* rows may be null. */
int sok_cuda_table_lookup(SokCudaContext* context, SokCudaTable* table, const uint64_t* keys, int64_t n, int64_t insert,
                          float* rows, int64_t* row_ids);
/* rule, hyper and step as MakeUpdateRule's; nonfinite "allow", "skip" or "raise". num_grads may be null. */
int sok_cuda_table_apply(SokCudaContext* context, SokCudaTable* table, const char* rule, const double* hyper,
                         int64_t hyper_size, int64_t step, const char* slot_set, const char* nonfinite,
                         float grad_scale, const int64_t* row_ids, const float* grads, int64_t n,
                         const int64_t* num_grads);
int sok_cuda_table_assign(SokCudaContext* context, SokCudaTable* table, const uint64_t* keys, const float* rows,
                          int64_t n);
int sok_cuda_table_assign_slots(SokCudaContext* context, SokCudaTable* table, const char* rule, const double* hyper,
                                int64_t hyper_size, int64_t step, const char* slot_set, const uint64_t* keys,
                                const float* slots, int64_t n, int64_t slot_floats);
int sok_cuda_table_erase(SokCudaContext* context, SokCudaTable* table, const uint64_t* keys, int64_t n);
int sok_cuda_table_export(SokCudaContext* context, SokCudaTable* table, uint64_t* keys, int64_t* row_ids, int64_t n);
int sok_cuda_table_weights(SokCudaContext* context, SokCudaTable* table, const int64_t* row_ids, int64_t n,
                           float* rows);
int sok_cuda_table_slots(SokCudaContext* context, SokCudaTable* table, const char* slot_set, const int64_t* row_ids,
                         int64_t n, float* slots);
int sok_cuda_table_reserve(SokCudaContext* context, SokCudaTable* table, int64_t n);

/* Between the two, on one thread, work on the context's stream sees no row move or change. rows and num_rows are host
 * memory. */
typedef struct SokCudaReading SokCudaReading;
int sok_cuda_table_read_begin(SokCudaContext* context, SokCudaTable* table, SokCudaRows* rows, int64_t* num_rows,
                              SokCudaReading** reading);
void sok_cuda_table_read_end(SokCudaReading* reading);

/* LookupGroup, ApplyGroup and ReadGroup of many tables, each by as many launches as one table takes. Arrays of structures,
 * of tables and of `rows` and `num_rows` are host memory, read or written before the call returns. */
typedef struct {
  SokCudaTable* table;
  const uint64_t* keys; /* [n] */
  int64_t n;
  float* rows;      /* [n, dim], or null */
  int64_t* row_ids; /* [n] */
} SokCudaAsked;
int sok_cuda_tables_lookup(SokCudaContext* context, const SokCudaAsked* asked, int64_t num_asked, int64_t insert);
typedef struct {
  SokCudaTable* table;
  const int64_t* row_ids; /* [n], distinct */
  const float* grads;     /* [n, dim] */
  int64_t n;
  const int64_t* num_grads; /* or null */
} SokCudaGradients;
int sok_cuda_tables_apply(SokCudaContext* context, const char* rule, const double* hyper, int64_t hyper_size,
                          int64_t step, const char* slot_set, const char* nonfinite, float grad_scale,
                          const SokCudaGradients* gradients, int64_t num_tables);
int sok_cuda_tables_read_begin(SokCudaContext* context, SokCudaTable* const* tables, int64_t num_tables,
                               SokCudaRows* rows, int64_t* num_rows, SokCudaReading** reading);

/* Answers in host memory. */
int sok_cuda_table_size_to_host(SokCudaContext* context, SokCudaTable* table, int64_t* size);
int sok_cuda_table_check_to_host(SokCudaContext* context, SokCudaTable* table);
int sok_cuda_table_slot_floats(SokCudaContext* context, SokCudaTable* table, const char* slot_set, int64_t* floats);
int sok_cuda_table_memory_bytes(SokCudaContext* context, SokCudaTable* table, int64_t* bytes);

/* sok/initializer.h: rows [n, dim] as a table with this configuration makes them. bank is device memory. */
int sok_cuda_fill_rows(SokCudaContext* context, const char* initializer, float a, float b, uint64_t seed,
                       const float* bank, int64_t bank_rows, const uint64_t* keys, int64_t n, int64_t dim, float* rows);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SOK_CUDA_C_API_TABLE_H_ */
