/* Update rules of one's own: a C function that changes rows in place, registered under a name.
 *
 * Graphs and files hold the name, which lists the slots: 'signum(m)', or 'signum(m;count)' where a row
 * has one number alone of those behind ';'. Each process that trains registers it before its first
 * update; to read files, to restore and to export nobody has to. Structs say their size, so that they can grow at the end. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Distinct rows of a table, each with its summed gradient. */
typedef struct SokRuleBlock {
  int64_t size; /* of this struct, in bytes */
  int64_t num_rows;
  int64_t dim;
  float* const* rows;     /* [num_rows], each the weights [dim] of a row */
  int64_t slot_offset;    /* slot k of row i: rows[i] + slot_offset + k * dim, [dim]; behind all of them its scalars */
  const float* gradients; /* [num_rows, dim] */
  const double* hyper;    /* in the order of the layout */
  int64_t step;           /* that this update performs, from 1 */
  const uint64_t* keys;   /* [num_rows], signed ones sign-extended; null, unless the layout asks for them */
} SokRuleBlock;

/* Called by many threads at once, for different rows. Must not throw, and must stay where it is as long as the process. */
typedef void (*SokRuleFunction)(const SokRuleBlock* block);

typedef struct SokRuleLayout {
  int64_t size;      /* of this struct, in bytes */
  const char* hyper; /* names, of which the learning rate is the first: "learning_rate,beta" */
  const char*
      starts; /* what each slot of a fresh row holds, a number or the name of a hyperparameter: "0"; "": zeros */
  int64_t prefetches; /* 1: the function prefetches the rows that it comes to, and blocks are longer */
  int64_t reads_keys; /* 1: blocks have keys, for which a hashed table keeps the key of each row in 8 bytes more */
} SokRuleLayout;

/* Registers a rule, or gives it another function. Returns null; or why it cannot be done, until the thread's next call. The
 * layout of a name stays: another one, or the same word with other slots, is refused. */
const char* SokRegisterRule(const char* name, const SokRuleLayout* layout, SokRuleFunction function);

/* All rules of this process, as JSON: [{"name", "slots", "num_scalars", "starts", "hyper", "decays",
 * "needs_whole_row"}, ...]. Until the thread's next call. */
const char* SokRules(void);

#ifdef __cplusplus
}
#endif
