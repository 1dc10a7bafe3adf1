// A row's record is read and written once: weights and slots lie side by side. A tile of lanes has a row, four columns to a
// lane, so that of a record of 64 weights with one slot 512 bytes are under way for each tile.
#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "detail/launch.h"
#include "detail/upload.h"
#include "detail/vector4.h"
#include "detail/work_of_block.h"
#include "sok/device_update.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kRowsPerTile = 4;

// A stretch of gradients, and which blocks it has.
struct UpdateWork {
  DeviceGradients grads;
  int64_t first_block, rows_per_block;
  int lane_bits;
};

// All of a call.
struct UpdateGroup {
  const DeviceUpdate* updates;
  int64_t num_tables;
  const UpdateWork* work;
  int64_t num_work, num_blocks;
  float scale;
};

__device__ __forceinline__ int64_t CountOf(const DeviceGradients& grads) {
  return grads.num == nullptr || *grads.num > grads.n ? grads.n : *grads.num;
}

// The lanes that share a row, when their number is known only at run time.
struct RowLanes {
  __device__ __forceinline__ explicit RowLanes(int lane_bits)
      : lanes(1 << lane_bits),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        first(static_cast<int>(threadIdx.x) & (kWarpSize - 1) & ~(lanes - 1)),
        mask((lanes == kWarpSize ? kFullMask : (1u << lanes) - 1u) << first) {}

  __device__ __forceinline__ bool Any(bool yes) const { return (__ballot_sync(mask, yes) & mask) != 0; }
  // The same bits in all lanes: each adds the same pairs.
  __device__ __forceinline__ float Sum(float x) const {
    for (int apart = 1; apart < lanes; apart *= 2) x += __shfl_xor_sync(mask, x, apart, lanes);
    return x;
  }

  int lanes, lane, first;
  unsigned mask;
};

template <class T>
__device__ __forceinline__ Vector4 Gradient(const DeviceGradients& grads, float scale, int64_t i, int64_t column,
                                            int count) {
  Vector4 g = Load4(static_cast<const T*>(grads.values) + i * grads.dim + column, count);
  if (scale != 1.0f)
    for (int j = 0; j < 4; ++j) g.x[j] *= scale;
  return g;
}

__device__ __forceinline__ bool IsFinite(const Vector4& g, int count) {
  bool finite = true;
  for (int j = 0; j < 4; ++j) finite = finite && (j >= count || g.x[j] * 0.0f == 0.0f);
  return finite;
}

// The record of gradient i, or null: there is none to change.
__device__ __forceinline__ float* RecordOf(const DeviceUpdate& update, int64_t row) {
  return row < 0 || row >= update.num_rows ? nullptr : update.rows.At(row);
}

// The row of an id: negative where it was erased since, a number that the table does not have where it never gave the id.
__device__ __forceinline__ int64_t RowOf(const DeviceUpdate& update, int64_t id) {
  if (id < 0 || update.num_erasures == 0) return id;
  const uint32_t row = static_cast<uint32_t>(id), generation = static_cast<uint32_t>(id >> 32);
  const uint32_t erased = row < update.num_erasures ? update.erasures[row] & 0x7FFFFFFFu : 0;
  return generation < erased ? -1 : generation > erased ? INT64_MAX : static_cast<int64_t>(row);
}

// f(grads, tile, i, table, row) for the gradients of this block's tiles that have a row; `table` is null, and row what its
// id says, where there is no such row. All lanes of a tile come to f.
template <class F>
__device__ __forceinline__ void ForGradients(const UpdateGroup& group, const F& f) {
  for (int64_t block = blockIdx.x; block < group.num_blocks; block += gridDim.x) {
    const UpdateWork& work = WorkOfBlock(group.work, group.num_work, block);
    const DeviceGradients& grads = work.grads;
    const RowLanes tile(work.lane_bits);
    const int64_t begin = (block - work.first_block) * work.rows_per_block, count = CountOf(grads);
    // Neighbours to a tile: one read brings the row ids of all near.
    const int64_t first = begin + (threadIdx.x >> work.lane_bits) * kRowsPerTile;
    const int64_t end = first + kRowsPerTile < count ? first + kRowsPerTile : count;
    for (int64_t i = first; i < end; ++i) {
      const int64_t number = grads.tables == nullptr ? grads.table : grads.tables[i];
      const bool has_table = number >= 0 && number < group.num_tables;
      const DeviceUpdate* table = has_table ? group.updates + number : nullptr;
      const int64_t row = has_table ? RowOf(*table, grads.row_ids[i]) : grads.row_ids[i];
      if (row < 0) continue;
      f(grads, tile, i, has_table && row < table->num_rows ? table : nullptr, row);
    }
  }
}

template <class T>
__device__ __forceinline__ bool MyColumnsAreFinite(const DeviceGradients& grads, float scale, const RowLanes& tile,
                                                   int64_t i) {
  bool finite = true;
  for (int64_t column = 4 * tile.lane; column < grads.dim; column += 4 * tile.lanes) {
    const int n = ColumnsLeft(grads.dim, column);
    finite = finite && IsFinite(Gradient<T>(grads, scale, i, column, n), n);
  }
  return finite;
}

// Whether any row is to be refused, before one is changed.
template <class T>
__global__ void CheckRowsKernel(UpdateGroup group, uint64_t* refused) {
  ForGradients(group,
               [&](const DeviceGradients& grads, const RowLanes& tile, int64_t i, const DeviceUpdate* table, int64_t) {
                 if (table != nullptr && MyColumnsAreFinite<T>(grads, group.scale, tile, i)) return;
                 ReportBad(grads.first_bad, i);
                 if (refused != grads.first_bad) ReportBad(refused, i);
               });
}

// Keeps what was found bad, if nothing was kept before: the arrays will be gone when somebody asks.
__global__ void KeepBadKernel(UpdateGroup group) {
  for (int64_t w = GlobalThread(); w < group.num_work; w += GlobalThreads()) {
    const DeviceGradients& grads = group.work[w].grads;
    if (grads.first_bad == nullptr || *grads.first_bad == kNothingBad) continue;
    const DeviceUpdate& table = group.updates[grads.table];
    if (grads.tables != nullptr || table.bad == nullptr || table.bad->has_gradient != 0) continue;
    const int64_t position = static_cast<int64_t>(*grads.first_bad), id = grads.row_ids[position];
    const int64_t row = RowOf(table, id);
    table.bad->has_gradient = row < 0 || row >= table.num_rows ? TableBad::kUnknownRow : TableBad::kNotFinite;
    table.bad->position = static_cast<uint64_t>(position);
    table.bad->row_id = static_cast<uint64_t>(id);
  }
}

// f(w, slots...) for element j of a row's four columns.
template <class R, class F, size_t... k>
__device__ __forceinline__ void OnElement(Vector4* w, Vector4* slots, int j, const F& f, std::index_sequence<k...>) {
  f(&w->x[j], &slots[k].x[j]...);
}

// One weight with its slots, over the calls from + 1 .. to.
template <class R, class... Slot>
__device__ __forceinline__ void Replay(const R& step, const DecayArgs& decay, const DecayModel& model, int64_t from,
                                       int64_t steps, float* w, Slot*... slots) {
  AlphaCursor cursor(decay.view.alphas, from + 1);
  for (int64_t s = 0; s < steps; ++s) step.MissedElement(cursor.Next(), w, slots...);
  if (steps == decay.calls - from) return;
  const double extra = R::kHasExtra ? decay.view.alphas.SumOfExtra(from + steps, decay.calls) : 0.0;
  step.CatchUp(Faded(model, static_cast<double>(decay.calls - from - steps), extra), w, slots...);
}

// Brings a record from the state after call `from` to that after the last one. All lanes of the tile come here.
template <class R>
__device__ __forceinline__ void Settle(const DecayArgs& decay, const R& step, int64_t from, const RowLanes& tile,
                                       int64_t dim, float* record, float* slots) {
  constexpr int kSlots = kNumVectors<R>;
  if (from >= decay.calls) return;
  Decay closed = {};
  int64_t steps = 0;
  const DecayModel model = decay.view.model;
  if (decay.is_closed_form) {
    closed = decay.view.Of(from, decay.calls);
  } else {
    // As on the CPU: a row without momentum is not replayed, its other slots fade at once.
    bool moves = R::kMomentumSlot < 0;
    for (int64_t column = tile.lane; !moves && column < dim; column += tile.lanes)
      moves = slots[(R::kMomentumSlot < 0 ? 0 : R::kMomentumSlot) * dim + column] != 0.0f;
    if (tile.Any(moves)) {
      AlphaCursor first(decay.view.alphas, from + 1);
      steps = ReplayLength(model, first.Next().alpha, decay.max_alpha);
      if (steps > decay.calls - from) steps = decay.calls - from;
    }
  }
  for (int64_t column = 4 * tile.lane; column < dim; column += 4 * tile.lanes) {
    const int n = ColumnsLeft(dim, column);
    Vector4 w = Load4(record + column, n), s[kSlots];
    for (int k = 0; k < kSlots; ++k) s[k] = Load4(slots + k * dim + column, n);
    for (int j = 0; j < 4; ++j) {
      if (j >= n) continue;
      OnElement<R>(
          &w, s, j,
          [&](auto... element) {
            if (decay.is_closed_form) {
              step.CatchUp(closed, element...);
            } else {
              Replay(step, decay, model, from, steps, element...);
            }
          },
          std::make_index_sequence<kSlots>());
    }
    Store4(record + column, w, n);
    for (int k = 0; k < kSlots; ++k) Store4(slots + k * dim + column, s[k], n);
  }
}

// f(gradient, weight, vectors...) for this lane's elements of a row: the same elements each time.
template <class R, class T, class F>
__device__ __forceinline__ void ForElements(const DeviceGradients& grads, float scale, int64_t i, const RowLanes& tile,
                                            float* record, float* slots, const F& f) {
  constexpr int kSlots = kNumVectors<R>;
  for (int64_t column = 4 * tile.lane; column < grads.dim; column += 4 * tile.lanes) {
    const int n = ColumnsLeft(grads.dim, column);
    const Vector4 g = Gradient<T>(grads, scale, i, column, n);
    Vector4 w = Load4(record + column, n), s[kSlots + 1];  // one more: none would be no array
    for (int k = 0; k < kSlots; ++k) s[k] = Load4(slots + k * grads.dim + column, n);
    for (int j = 0; j < 4; ++j) {
      if (j >= n) continue;
      OnElement<R>(&w, s, j, [&](auto... element) { f(g.x[j], element...); }, std::make_index_sequence<kSlots>());
    }
    Store4(record + column, w, n);
    for (int k = 0; k < kSlots; ++k) Store4(slots + k * grads.dim + column, s[k], n);
  }
}

// What the elements of a row need to know of all of it. All lanes of the tile come here, and get the same.
template <class R, class T, size_t... s>
__device__ __forceinline__ float FactorOf(const R& step, const DeviceGradients& grads, float scale, int64_t i,
                                          const RowLanes& tile, float* record, float* slots,
                                          std::index_sequence<s...>) {
  constexpr int kScalars = static_cast<int>(sizeof...(s));
  float* scalars = slots + kNumVectors<R> * grads.dim;
  float own[kScalars + 1] = {};
  for (int k = 0; k < kScalars; ++k) own[k] = scalars[k];
  float factor;
  if constexpr (R::kSums > 0) {
    SumsOfRow<R::kSums> sums = {};
    ForElements<R, T>(grads, scale, i, tile, record, slots, [&](float g, const float* w, auto... vectors) {
      const SumsOfRow<R::kSums> terms = step.First(g, *w, vectors...);
      for (int k = 0; k < R::kSums; ++k) sums.of[k] += terms.of[k];
    });
    for (int k = 0; k < R::kSums; ++k) sums.of[k] = tile.Sum(sums.of[k]);
    factor = step.Factor(sums, grads.dim, &own[s]...);
  } else {
    factor = step.Factor(grads.dim, &own[s]...);
  }
  __syncwarp(tile.mask);  // every lane has read the scalars
  if (tile.lane == 0)
    for (int k = 0; k < kScalars; ++k) scalars[k] = own[k];
  return factor;
}

// Of a row that will be updated, what this lane reads first.
template <class R, class T>
__device__ __forceinline__ void FetchRow(const DeviceGradients& grads, const RowLanes& tile, int64_t i,
                                         const DeviceUpdate& update, int64_t row) {
  const int64_t column = 4 * tile.lane;
  const float* record = update.rows.At(row);
  Fetch(update.decay.stamps + row);
  if (column >= grads.dim) return;
  Fetch(static_cast<const T*>(grads.values) + i * grads.dim + column);
  Fetch(record + column);
  for (int k = 0; k < kNumVectors<R>; ++k) Fetch(record + update.slot_offset + k * grads.dim + column);
}

template <class R, class T>
__global__ void UpdateRowsKernel(UpdateRule rule, UpdateGroup group, Nonfinite nonfinite, const uint64_t* refused) {
  const R step(rule);
  if (nonfinite == Nonfinite::kRaise && *refused != kNothingBad) return;
  if constexpr (
      R::kDecays) {  // one read waits for another, of id, stamp and record, and few tiles fit beside each other
    ForGradients(group, [&](const DeviceGradients& grads, const RowLanes& tile, int64_t i, const DeviceUpdate* table,
                            int64_t row) {
      if (table != nullptr) FetchRow<R, T>(grads, tile, i, *table, row);
    });
  }
  ForGradients(group, [&](const DeviceGradients& grads, const RowLanes& tile, int64_t i, const DeviceUpdate* table,
                          int64_t row) {
    if (table == nullptr) {
      if (tile.lane == 0) ReportBad(grads.first_bad, i);
      return;
    }
    const DeviceUpdate& update = *table;
    float* record = update.rows.At(row);
    float* slots = record + update.slot_offset;
    if (nonfinite == Nonfinite::kSkip && tile.Any(!MyColumnsAreFinite<T>(grads, group.scale, tile, i))) return;
    if constexpr (R::kDecays) {
      const int64_t stamp = update.decay.stamps[row];
      __syncwarp(tile.mask);  // every lane has read the stamp
      Settle(update.decay, step, stamp, tile, grads.dim, record, slots);
      if (tile.lane == 0) update.decay.stamps[row] = static_cast<uint32_t>(update.decay.calls + 1);
    }
    if constexpr (!kByRow<R>) {
      ForElements<R, T>(grads, group.scale, i, tile, record, slots,
                        [&](float g, auto... element) { step.Element(g, element...); });
    } else {
      const float factor =
          FactorOf<R, T>(step, grads, group.scale, i, tile, record, slots, std::make_index_sequence<kNumScalars<R>>());
      ForElements<R, T>(grads, group.scale, i, tile, record, slots,
                        [&](float g, auto... element) { step.Element(g, factor, element...); });
    }
    if (tile.lane == 0) update.notes.Note(row);
  });
}

// A tile that takes a row's stamp settles the row: of those that ask for the same row, one finds it old.
template <class R>
__global__ void SettleRowsKernel(UpdateRule rule, DeviceUpdate update, const int64_t* row_ids, int64_t n, int64_t dim,
                                 int lane_bits) {
  const R step(rule);
  const RowLanes tile(lane_bits);
  const uint32_t calls = static_cast<uint32_t>(update.decay.calls);
  for (int64_t i = GlobalThread() >> lane_bits; i < n; i += GlobalThreads() >> lane_bits) {
    float* record = RecordOf(update, row_ids[i]);
    if (record == nullptr) continue;
    uint32_t* at = update.decay.stamps + row_ids[i];
    uint32_t stamp = calls;
    if (tile.lane == 0 && LoadRelaxed(at) != calls) stamp = atomicExch(at, calls);
    stamp = __shfl_sync(tile.mask, stamp, 0, tile.lanes);
    Settle(update.decay, step, stamp, tile, dim, record, record + update.slot_offset);
  }
}

template <class T>
void LaunchUpdate(const Cuda& cuda, const UpdateRule& rule, const UpdateGroup& group, Nonfinite nonfinite,
                  uint64_t* refused) {
  const int64_t grid = GridFor(group.num_blocks, 1);
  if (nonfinite == Nonfinite::kRaise) Launch(CheckRowsKernel<T>, grid, kThreads, 0, cuda, group, refused);
  WithRule(rule.rule, [&](auto* null) {
    using R = std::remove_pointer_t<decltype(null)>;
    Launch(UpdateRowsKernel<R, T>, grid, kThreads, 0, cuda, rule, group, nonfinite, refused);
  });
}

void Check(const UpdateRule& rule, const DeviceUpdate* updates, int64_t num_tables, const DeviceGradients* gradients,
           int64_t num_gradients, Nonfinite nonfinite, const uint64_t* refused) {
  for (int64_t k = 0; k < num_gradients; ++k) {
    const DeviceGradients& g = gradients[k];
    if (g.dim < 1) throw InvalidArgument("dim must be at least 1. Received: " + std::to_string(g.dim) + ".");
    if (num_tables > 0 && (g.table < 0 || g.table >= num_tables)) {
      throw InvalidArgument("gradients " + std::to_string(k) + ": table " + std::to_string(g.table) +
                            " is not one of the " + std::to_string(num_tables) + " of the update.");
    }
  }
  if (nonfinite == Nonfinite::kRaise && refused == nullptr) {
    throw InvalidArgument("nonfinite 'raise' needs first_bad, where it reports.");
  }
  for (int64_t t = 0; rule.decays() && t < num_tables; ++t) {
    if (updates[t].decay.stamps != nullptr || updates[t].num_rows == 0) continue;
    throw InvalidArgument("table " + std::to_string(t) + " has no stamps, which rule '" + RuleName(rule.rule) +
                          "' needs. Give DeviceDecay's args().");
  }
}

}  // namespace

void UpdateRows(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule, const DeviceUpdate* updates,
                int64_t num_tables, const DeviceGradients* gradients, int64_t num_gradients, FloatType type,
                float grad_scale, Nonfinite nonfinite, uint64_t* refused) {
  Check(rule, updates, num_tables, gradients, num_gradients, nonfinite, refused);
  std::vector<UpdateWork> work;
  int64_t blocks = 0;
  for (int64_t k = 0; k < num_gradients; ++k) {
    if (gradients[k].n == 0) continue;
    UpdateWork one = {gradients[k], blocks, 0, LaneBits(gradients[k].dim)};
    one.rows_per_block = (kThreads >> one.lane_bits) * kRowsPerTile;
    blocks += (gradients[k].n + one.rows_per_block - 1) / one.rows_per_block;
    work.push_back(one);
  }
  if (work.empty() || num_tables == 0) return;
  Parcel parcel;
  const auto updates_at = parcel.Add(updates, num_tables);
  const auto work_at = parcel.Add(work.data(), static_cast<int64_t>(work.size()));
  parcel.Send(cuda, scratch);
  const UpdateGroup group = {
      parcel.On(updates_at), num_tables, parcel.On(work_at), static_cast<int64_t>(work.size()), blocks, grad_scale};
  WithFloatType(type, [&](auto* null) {
    LaunchUpdate<std::remove_pointer_t<decltype(null)>>(cuda, rule, group, nonfinite, refused);
  });
  const bool keeps = std::any_of(updates, updates + num_tables, [](const DeviceUpdate& u) { return u.bad != nullptr; });
  if (keeps) Launch(KeepBadKernel, GridFor(group.num_work, kThreads), kThreads, 0, cuda, group);
}

void UpdateRows(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule, const DeviceUpdate* updates,
                int64_t num_tables, const int32_t* tables, const int64_t* row_ids, const void* grads, FloatType type,
                int64_t n, const int64_t* num_grads, int64_t dim, float grad_scale, Nonfinite nonfinite,
                uint64_t* first_bad) {
  const DeviceGradients all = {row_ids, grads, n, num_grads, dim, tables, 0, first_bad};
  UpdateRows(cuda, scratch, rule, updates, num_tables, &all, 1, type, grad_scale, nonfinite, first_bad);
}

void SettleRows(const Cuda& cuda, const UpdateRule& rule, const DeviceUpdate& update, const int64_t* row_ids, int64_t n,
                int64_t dim) {
  if (dim < 1) throw InvalidArgument("dim must be at least 1. Received: " + std::to_string(dim) + ".");
  if (update.decay.stamps == nullptr) throw InvalidArgument("only tables with a decaying rule have rows to settle.");
  const int lane_bits = LaneBits(dim);
  WithRule(rule.rule, [&](auto* null) {
    using R = std::remove_pointer_t<decltype(null)>;
    if constexpr (R::kDecays) {
      Launch(SettleRowsKernel<R>, GridFor(n << lane_bits, kThreads), kThreads, 0, cuda, rule, update, row_ids, n, dim,
             lane_bits);
    }
  });
}

void ThrowIfBadToHost(const Cuda& cuda, const uint64_t* first_bad, const int64_t* row_ids, int64_t n) {
  uint64_t position = kNothingBad;
  SOK_CUDA(cudaMemcpyAsync(&position, first_bad, sizeof(position), cudaMemcpyDeviceToHost, cuda.stream));
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  if (position == kNothingBad) return;
  std::string text = "the gradient at position " + std::to_string(position);
  if (position < static_cast<uint64_t>(n)) {
    int64_t row = 0;
    SOK_CUDA(cudaMemcpyAsync(&row, row_ids + position, sizeof(row), cudaMemcpyDeviceToHost, cuda.stream));
    SOK_CUDA(cudaStreamSynchronize(cuda.stream));
    text += ", of row id " + std::to_string(row) + ",";
  }
  throw InvalidArgument(text + " holds NaN or infinity, or belongs to a row that its table does not have. With " +
                        "nonfinite 'raise' nothing was updated, otherwise this row was left out.");
}

}  // namespace sok
