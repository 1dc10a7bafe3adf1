/* Initializers of one's own: a C function that writes fresh rows, registered under a name.
 *
 * Graphs and files hold 'own:' and the name. Each process that makes tables with it registers it first. Tables on GPUs refuse
 * it. Structs say their size, so that they can grow at the end. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SokInitializerBlock {
  int64_t size; /* of this struct, in bytes */
  int64_t num_rows;
  int64_t dim;
  const uint64_t* keys; /* [num_rows], signed ones sign-extended */
  uint64_t seed;        /* of the table */
  float* const* rows;   /* [num_rows], each [dim]: random numbers in [0, 1), which the function replaces */
} SokInitializerBlock;

/* A pure function of seed, key and column; the random numbers are one, too. Called by many threads at once. Must not throw,
 * and must stay where it is as long as the process. */
typedef void (*SokInitializerFunction)(const SokInitializerBlock* block);

/* Registers an initializer, or gives it another function. Returns null; or why it cannot be done, until the thread's next
 * call. */
const char* SokRegisterInitializer(const char* name, SokInitializerFunction function);

#ifdef __cplusplus
}
#endif
