// What an optimizer does to rows.
// Included by row_kernels_body.h, which says how.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "row_vectors.h"

namespace sok {
namespace {

// The step of one row of kDim elements, or of dim if that is 0. Its slots are apart from each other.
template <int64_t kDim, class R, class... Slot>
SOK_INLINE void UpdateElements(const R rule, const float* __restrict__ g, int64_t dim, float* __restrict__ w,
                               Slot* __restrict__... slots) {
  // Left alone, GCC 12 unrolls up to 16 steps before it makes vectors of them, and then makes none: up to 1.5 times the
  // instructions. Of the counts that keep it from that, these had the fewest.
  if (kDim == 0) {
#pragma GCC unroll 1
    for (int64_t j = 0; j < dim; ++j) rule.Element(g[j], &w[j], &slots[j]...);
  } else {
#pragma GCC unroll 3
    for (int64_t j = 0; j < kDim; ++j) rule.Element(g[j], &w[j], &slots[j]...);
  }
}

// Sums over a row go by kLanes columns at a time, so that they are vectors and the same on all processors.
template <class R, class... Vector>
SOK_INLINE SumsOfRow<R::kSums> SumRow(const R rule, const float* __restrict__ g, int64_t dim,
                                      const float* __restrict__ w, Vector* __restrict__... vectors) {
  constexpr int64_t kLanes = 8;
  float lanes[R::kSums][kLanes] = {};
  auto add = [&](int64_t j, int64_t count) {
    for (int64_t l = 0; l < count; ++l) {
      const SumsOfRow<R::kSums> terms = rule.First(g[j + l], w[j + l], &vectors[j + l]...);
      for (int s = 0; s < R::kSums; ++s) lanes[s][l] += terms.of[s];
    }
  };
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) add(j, kLanes);
  add(j, dim - j);
  SumsOfRow<R::kSums> sums;
  for (int s = 0; s < R::kSums; ++s) {
    for (int64_t apart = kLanes / 2; apart > 0; apart /= 2)
      for (int64_t l = 0; l < apart; ++l) lanes[s][l] += lanes[s][l + apart];
    sums.of[s] = lanes[s][0];
  }
  return sums;
}

// The step of a row whose elements need to know something of all of it.
template <int64_t kDim, class R, class... Vector>
SOK_INLINE void UpdateWhole(const R rule, float factor, const float* __restrict__ g, int64_t dim, float* __restrict__ w,
                            Vector* __restrict__... vectors) {
  if (kDim != 0) dim = kDim;
  for (int64_t j = 0; j < dim; ++j) rule.Element(g[j], factor, &w[j], &vectors[j]...);
}

template <int64_t kDim, class R, size_t... k, size_t... s>
SOK_INLINE void UpdateRecord(const R& rule, const float* g, float* w, float* slots, int64_t dim,
                             std::index_sequence<k...>, std::index_sequence<s...>) {
  if (kDim != 0) dim = kDim;
  if constexpr (!kByRow<R>) {
    UpdateElements<kDim>(rule, g, dim, w, (slots + static_cast<int64_t>(k) * dim)...);
  } else {
    float* scalars = slots + static_cast<int64_t>(sizeof...(k)) * dim;
    float factor;
    if constexpr (R::kSums > 0) {
      factor = rule.Factor(SumRow(rule, g, dim, w, (slots + static_cast<int64_t>(k) * dim)...), dim, &scalars[s]...);
    } else {
      factor = rule.Factor(dim, &scalars[s]...);
    }
    UpdateWhole<kDim>(rule, factor, g, dim, w, (slots + static_cast<int64_t>(k) * dim)...);
  }
}

template <class R>
using SlotsOf = std::make_index_sequence<kNumVectors<R>>;
template <class R>
using ScalarsOf = std::make_index_sequence<kNumScalars<R>>;

void Update(const UpdateRule& rule, float* const* records, int64_t slot_offset, const float* grads, int64_t count,
            int64_t dim) {
  WithRule(rule.rule, [&](auto* null) {
    using R = std::remove_pointer_t<decltype(null)>;
    const R step(rule);
    for (int64_t i = 0; i < count; ++i)
      UpdateRecord<0>(step, grads + i * dim, records[i], records[i] + slot_offset, dim, SlotsOf<R>(), ScalarsOf<R>());
  });
}

template <int64_t kDim, class R>
SOK_INLINE void UpdateRowsOf(const RowView& view, const R& step, const int64_t* row_ids, int64_t slot_offset,
                             const float* grads, int64_t count, int64_t dim) {
  if (kDim != 0) dim = kDim;
  static_assert(!(R::kDecays && kByRow<R>), "missed steps are elements' alone");
  const int64_t floats = CountSlots<R>().floats(dim), lines = (slot_offset + floats + 15) / 16;
  const int64_t ahead = lines <= 4 ? 12 : lines <= 12 ? 6 : 3;
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < count) {
      const float* next = RecordAt(view, static_cast<uint32_t>(row_ids[i + ahead]));
      for (int64_t at = 0; at < dim; at += 16) __builtin_prefetch(next + at, 1);
      for (int64_t at = slot_offset; at < slot_offset + floats; at += 16) __builtin_prefetch(next + at, 1);
    }
    float* w = const_cast<float*>(RecordAt(view, static_cast<uint32_t>(row_ids[i])));
    UpdateRecord<kDim>(step, grads + i * dim, w, w + slot_offset, dim, SlotsOf<R>(), ScalarsOf<R>());
  }
}

void UpdateRows(const RowView& view, const UpdateRule& rule, const int64_t* row_ids, int64_t slot_offset,
                const float* grads, int64_t count, int64_t dim) {
  WithRule(rule.rule, [&](auto* null) {
    const std::remove_pointer_t<decltype(null)> step(rule);
    // Where a row is a few vectors, a loop of unknown length costs more than what it does.
    if (dim == 4) return UpdateRowsOf<4>(view, step, row_ids, slot_offset, grads, count, dim);
    if (dim == 8) return UpdateRowsOf<8>(view, step, row_ids, slot_offset, grads, count, dim);
    if (dim == 16) return UpdateRowsOf<16>(view, step, row_ids, slot_offset, grads, count, dim);
    if (dim == 32) return UpdateRowsOf<32>(view, step, row_ids, slot_offset, grads, count, dim);
    UpdateRowsOf<0>(view, step, row_ids, slot_offset, grads, count, dim);
  });
}

template <class R, class... Slot>
SOK_INLINE void ReadElements(const R rule, const Decay decay, const float* w, int64_t dim, float* out,
                             const Slot* __restrict__... slots) {
  for (int64_t j = 0; j < dim; ++j) {
    float weight = w[j];
    [&](Slot... copies) { rule.CatchUp(decay, &weight, &copies...); }(slots[j]...);
    out[j] = weight;
  }
}

template <class R, class... Slot>
SOK_INLINE void SettleElements(const R rule, const Decay decay, int64_t dim, float* __restrict__ w,
                               Slot* __restrict__... slots) {
  for (int64_t j = 0; j < dim; ++j) rule.CatchUp(decay, &w[j], &slots[j]...);
}

template <class R, size_t... k>
SOK_INLINE void ReadRecord(const R& rule, const Decay& decay, const float* w, const float* slots, int64_t dim,
                           float* out, std::index_sequence<k...>) {
  ReadElements(rule, decay, w, dim, out, (slots + static_cast<int64_t>(k) * dim)...);
}

template <class R, size_t... k>
SOK_INLINE void SettleRecord(const R& rule, const Decay& decay, int64_t dim, float* w, float* slots,
                             std::index_sequence<k...>) {
  SettleElements(rule, decay, dim, w, (slots + static_cast<int64_t>(k) * dim)...);
}

void ReadDecayed(const UpdateRule& rule, const Decay& decay, const float* w, const float* slots, int64_t dim,
                 float* out) {
  WithRule(rule.rule, [&](auto* null) {
    using R = std::remove_pointer_t<decltype(null)>;
    if constexpr (R::kDecays) ReadRecord(R(rule), decay, w, slots, dim, out, SlotsOf<R>());
  });
}

void Settle(const UpdateRule& rule, const Decay& decay, int64_t dim, float* w, float* slots) {
  WithRule(rule.rule, [&](auto* null) {
    using R = std::remove_pointer_t<decltype(null)>;
    if constexpr (R::kDecays) SettleRecord(R(rule), decay, dim, w, slots, SlotsOf<R>());
  });
}

}  // namespace
}  // namespace sok
