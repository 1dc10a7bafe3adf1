// A rule that exists only in tests, as somebody would write one who has no more of sok than own_rule.h.
#include <math.h>

#include "sok/rules/own_rule.h"

extern "C" void damped(const SokRuleBlock* block) {
  const float rate = (float)block->hyper[0], beta = (float)block->hyper[1];
  for (int64_t i = 0; i < block->num_rows; ++i) {
    const float* g = block->gradients + i * block->dim;
    float *w = block->rows[i], *m = w + block->slot_offset, *total = m + block->dim;
    for (int64_t j = 0; j < block->dim; ++j) {
      m[j] = beta * m[j] + (1 - beta) * g[j];
      total[j] += fabsf(g[j]);
      w[j] -= rate * m[j] / (1 + total[j]);
    }
  }
}
