// What an optimizer does to rows.
// Included by row_kernels_body.h, which says how.
#pragma once

#include <cstdint>

#include "row_vectors.h"

namespace sok {
namespace {

SOK_INLINE void UpdateRecord(const UpdateRule& rule, const float* __restrict__ g, float* __restrict__ w,
                             float* __restrict__ a, int64_t dim) {
  const float lr = rule.lr, epsilon = rule.epsilon, c1 = rule.one_minus_beta_1, c2 = rule.one_minus_beta_2;
  float* __restrict__ b = a + dim;
  switch (rule.rule) {
    case Rule::kSgd:
      for (int64_t j = 0; j < dim; ++j) SgdElement(g[j], lr, &w[j]);
      break;
    case Rule::kAdagrad:
      for (int64_t j = 0; j < dim; ++j) AdagradElement(g[j], lr, epsilon, &w[j], &a[j]);
      break;
    case Rule::kAdam:
    case Rule::kLazyAdam:
      for (int64_t j = 0; j < dim; ++j) AdamElement(g[j], lr, c1, c2, epsilon, &w[j], &a[j], &b[j]);
      break;
  }
}

void Update(const UpdateRule& rule, float* const* records, int64_t slot_offset, const float* grads, int64_t count,
            int64_t dim) {
  for (int64_t i = 0; i < count; ++i) UpdateRecord(rule, grads + i * dim, records[i], records[i] + slot_offset, dim);
}

template <int64_t kDim>
SOK_INLINE void UpdateRowsOf(const RowView& view, const UpdateRule& rule, const int64_t* row_ids, int64_t slot_offset,
                             const float* grads, int64_t count, int64_t dim) {
  if (kDim != 0) dim = kDim;
  const int64_t floats = rule.num_slots() * dim, lines = (slot_offset + floats + 15) / 16;
  const int64_t ahead = lines <= 4 ? 12 : lines <= 12 ? 6 : 3;
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < count) {
      const float* next = RecordAt(view, static_cast<uint32_t>(row_ids[i + ahead]));
      for (int64_t at = 0; at < dim; at += 16) __builtin_prefetch(next + at, 1);
      for (int64_t at = slot_offset; at < slot_offset + floats; at += 16) __builtin_prefetch(next + at, 1);
    }
    float* w = const_cast<float*>(RecordAt(view, static_cast<uint32_t>(row_ids[i])));
    UpdateRecord(rule, grads + i * dim, w, w + slot_offset, dim);
  }
}

void UpdateRows(const RowView& view, const UpdateRule& rule, const int64_t* row_ids, int64_t slot_offset,
                const float* grads, int64_t count, int64_t dim) {
  // Where a row is a few vectors, a loop of unknown length costs more than what it does.
  if (dim == 4) return UpdateRowsOf<4>(view, rule, row_ids, slot_offset, grads, count, dim);
  if (dim == 8) return UpdateRowsOf<8>(view, rule, row_ids, slot_offset, grads, count, dim);
  if (dim == 16) return UpdateRowsOf<16>(view, rule, row_ids, slot_offset, grads, count, dim);
  if (dim == 32) return UpdateRowsOf<32>(view, rule, row_ids, slot_offset, grads, count, dim);
  UpdateRowsOf<0>(view, rule, row_ids, slot_offset, grads, count, dim);
}

void ReadDecayed(const Decay& decay, float epsilon, const float* w, const float* m, const float* v, int64_t dim,
                 float* out) {
  for (int64_t j = 0; j < dim; ++j) out[j] = w[j] - DecayedStep(decay, epsilon, m[j], v[j]);
}

void Settle(const Decay& decay, float epsilon, int64_t dim, float* __restrict__ w, float* __restrict__ m,
            float* __restrict__ v) {
  for (int64_t j = 0; j < dim; ++j) {
    w[j] -= DecayedStep(decay, epsilon, m[j], v[j]);
    m[j] *= decay.fade_m;
    v[j] *= decay.fade_v;
  }
}

}  // namespace
}  // namespace sok
