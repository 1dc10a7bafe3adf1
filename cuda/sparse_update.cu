// A row's record is read and written once: weights and slots lie side by side. A tile of lanes has a row, four columns to a
// lane, so that of a record of 64 weights with one slot 512 bytes are under way for each tile.
#include <string>
#include <vector>

#include "detail/launch.h"
#include "detail/upload.h"
#include "detail/vector4.h"
#include "sok/device_update.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int kThreads = 256;

struct Gradients {
  const int32_t* tables;   // [n] or null
  const int64_t* row_ids;  // [n]
  const void* values;      // [n, dim]
  int64_t n;
  const int64_t* num;  // [1] or null
  int64_t dim;
  float scale;

  __device__ __forceinline__ int64_t Count() const { return num == nullptr || *num > n ? n : *num; }
};

// The lanes that share a row, when their number is known only at run time.
struct RowLanes {
  __device__ __forceinline__ explicit RowLanes(int lane_bits)
      : lanes(1 << lane_bits),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        first(static_cast<int>(threadIdx.x) & (kWarpSize - 1) & ~(lanes - 1)),
        mask((lanes == kWarpSize ? kFullMask : (1u << lanes) - 1u) << first) {}

  __device__ __forceinline__ bool Any(bool yes) const { return (__ballot_sync(mask, yes) & mask) != 0; }

  int lanes, lane, first;
  unsigned mask;
};

template <class T>
__device__ __forceinline__ Vector4 Gradient(const Gradients& grads, int64_t i, int64_t column, int count) {
  Vector4 g = Load4(static_cast<const T*>(grads.values) + i * grads.dim + column, count);
  if (grads.scale != 1.0f)
    for (int j = 0; j < 4; ++j) g.x[j] *= grads.scale;
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

// Whether any row is to be refused, before one is changed.
template <class T>
__global__ void CheckRowsKernel(const DeviceUpdate* updates, int64_t num_tables, Gradients grads, bool checks_finite,
                                int lane_bits, uint64_t* first_bad) {
  const RowLanes tile(lane_bits);
  const int64_t count = grads.Count();
  for (int64_t i = GlobalThread() >> lane_bits; i < count; i += GlobalThreads() >> lane_bits) {
    const int64_t row = grads.row_ids[i], table = grads.tables == nullptr ? 0 : grads.tables[i];
    if (row < 0) continue;
    bool bad = table < 0 || table >= num_tables || row >= updates[table].num_rows;
    for (int64_t column = 4 * tile.lane; checks_finite && column < grads.dim; column += 4 * tile.lanes) {
      const int n = ColumnsLeft(grads.dim, column);
      bad = bad || !IsFinite(Gradient<T>(grads, i, column, n), n);
    }
    if (bad) ReportBad(first_bad, i);
  }
}

// One weight with its moments, over the calls from + 1 .. to.
__device__ __forceinline__ void Replay(const DecayArgs& decay, const UpdateRule& rule, int64_t from, bool row_moves,
                                       float* w, float* m, float* v) {
  int64_t steps = 0;
  if (row_moves) {
    AlphaCursor cursor(decay.view.alphas, from + 1);
    AlphaCursor peek = cursor;
    steps = ReplayLength(rule, peek.Next(), decay.max_alpha);
    if (steps > decay.calls - from) steps = decay.calls - from;
    for (int64_t k = 0; k < steps; ++k) {
      AdamDecayElement(cursor.Next(), rule.one_minus_beta_1, rule.one_minus_beta_2, rule.epsilon, w, m, v);
    }
  }
  const double rest = static_cast<double>(decay.calls - from - steps);
  if (rest > 0) {
    *m *= static_cast<float>(pow(static_cast<double>(rule.beta_1), rest));
    *v *= static_cast<float>(pow(static_cast<double>(rule.beta_2), rest));
  }
}

// Brings a record from the state after call `from` to that after the last one. All lanes of the tile come here.
__device__ __forceinline__ void Settle(const DecayArgs& decay, const UpdateRule& rule, int64_t from,
                                       const RowLanes& tile, int64_t dim, float* record, float* slots) {
  if (from >= decay.calls) return;
  Decay closed = {};
  bool moves = true;
  if (decay.is_closed_form) {
    closed = decay.view.Of(from, decay.calls);
  } else {
    // As on the CPU: a row without momentum is not replayed, its second moment fades at once.
    bool mine = false;
    for (int64_t column = tile.lane; column < dim; column += tile.lanes) mine = mine || slots[column] != 0.0f;
    moves = tile.Any(mine);
  }
  for (int64_t column = 4 * tile.lane; column < dim; column += 4 * tile.lanes) {
    const int n = ColumnsLeft(dim, column);
    Vector4 w = Load4(record + column, n), m = Load4(slots + column, n), v = Load4(slots + dim + column, n);
    for (int j = 0; j < 4; ++j) {
      if (j >= n) continue;
      if (decay.is_closed_form) {
        w.x[j] -= DecayedStep(closed, rule.epsilon, m.x[j], v.x[j]);
        m.x[j] *= closed.fade_m;
        v.x[j] *= closed.fade_v;
      } else {
        Replay(decay, rule, from, moves, &w.x[j], &m.x[j], &v.x[j]);
      }
    }
    Store4(record + column, w, n);
    Store4(slots + column, m, n);
    Store4(slots + dim + column, v, n);
  }
}

template <Rule kRule, class T>
__global__ void UpdateRowsKernel(UpdateRule rule, const DeviceUpdate* updates, int64_t num_tables, Gradients grads,
                                 Nonfinite nonfinite, int lane_bits, uint64_t* first_bad) {
  constexpr bool kHasFirst = kRule != Rule::kSgd;
  constexpr bool kHasSecond = kRule == Rule::kAdam || kRule == Rule::kLazyAdam;
  if (nonfinite == Nonfinite::kRaise && *first_bad != kNothingBad) return;
  const RowLanes tile(lane_bits);
  const int64_t count = grads.Count();
  for (int64_t i = GlobalThread() >> lane_bits; i < count; i += GlobalThreads() >> lane_bits) {
    const int64_t row = grads.row_ids[i], table = grads.tables == nullptr ? 0 : grads.tables[i];
    if (row < 0) continue;
    if (table < 0 || table >= num_tables || row >= updates[table].num_rows) {
      if (tile.lane == 0) ReportBad(first_bad, i);
      continue;
    }
    const DeviceUpdate& update = updates[table];
    float* record = update.rows.At(row);
    float* slots = record + update.slot_offset;
    if (nonfinite == Nonfinite::kSkip) {
      bool bad = false;
      for (int64_t column = 4 * tile.lane; column < grads.dim; column += 4 * tile.lanes) {
        const int n = ColumnsLeft(grads.dim, column);
        bad = bad || !IsFinite(Gradient<T>(grads, i, column, n), n);
      }
      if (tile.Any(bad)) continue;
    }
    if constexpr (kRule == Rule::kAdam) {
      const int64_t stamp = update.decay.stamps[row];
      __syncwarp(tile.mask);  // every lane has read the stamp
      Settle(update.decay, rule, stamp, tile, grads.dim, record, slots);
      if (tile.lane == 0) update.decay.stamps[row] = static_cast<uint32_t>(update.decay.calls + 1);
    }
    for (int64_t column = 4 * tile.lane; column < grads.dim; column += 4 * tile.lanes) {
      const int n = ColumnsLeft(grads.dim, column);
      const Vector4 g = Gradient<T>(grads, i, column, n);
      Vector4 w = Load4(record + column, n), a = {}, b = {};
      if (kHasFirst) a = Load4(slots + column, n);
      if (kHasSecond) b = Load4(slots + grads.dim + column, n);
      for (int j = 0; j < 4; ++j)
        if (j < n) UpdateElement<kRule>(rule, g.x[j], &w.x[j], &a.x[j], &b.x[j]);
      Store4(record + column, w, n);
      if (kHasFirst) Store4(slots + column, a, n);
      if (kHasSecond) Store4(slots + grads.dim + column, b, n);
    }
    if (tile.lane == 0) update.notes.Note(row);
  }
}

// A tile that takes a row's stamp settles the row: of those that ask for the same row, one finds it old.
__global__ void SettleRowsKernel(UpdateRule rule, DeviceUpdate update, const int64_t* row_ids, int64_t n, int64_t dim,
                                 int lane_bits) {
  const RowLanes tile(lane_bits);
  const uint32_t calls = static_cast<uint32_t>(update.decay.calls);
  for (int64_t i = GlobalThread() >> lane_bits; i < n; i += GlobalThreads() >> lane_bits) {
    float* record = RecordOf(update, row_ids[i]);
    if (record == nullptr) continue;
    uint32_t* at = update.decay.stamps + row_ids[i];
    uint32_t stamp = calls;
    if (tile.lane == 0 && LoadRelaxed(at) != calls) stamp = atomicExch(at, calls);
    stamp = __shfl_sync(tile.mask, stamp, 0, tile.lanes);
    Settle(update.decay, rule, stamp, tile, dim, record, record + update.slot_offset);
  }
}

template <class T>
void LaunchUpdate(const Cuda& cuda, int64_t grid, const UpdateRule& rule, const DeviceUpdate* updates,
                  int64_t num_tables, const Gradients& grads, Nonfinite nonfinite, int lane_bits, uint64_t* first_bad) {
  auto kernel = UpdateRowsKernel<Rule::kSgd, T>;
  if (rule.rule == Rule::kAdagrad) kernel = UpdateRowsKernel<Rule::kAdagrad, T>;
  if (rule.rule == Rule::kLazyAdam) kernel = UpdateRowsKernel<Rule::kLazyAdam, T>;
  if (rule.rule == Rule::kAdam) kernel = UpdateRowsKernel<Rule::kAdam, T>;
  Launch(kernel, grid, kThreads, 0, cuda, rule, updates, num_tables, grads, nonfinite, lane_bits, first_bad);
}

}  // namespace

void UpdateRows(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule, const DeviceUpdate* updates,
                int64_t num_tables, const int32_t* tables, const int64_t* row_ids, const void* grads, FloatType type,
                int64_t n, const int64_t* num_grads, int64_t dim, float grad_scale, Nonfinite nonfinite,
                uint64_t* first_bad) {
  if (dim < 1) throw InvalidArgument("dim must be at least 1. Received: " + std::to_string(dim) + ".");
  if (nonfinite == Nonfinite::kRaise && first_bad == nullptr) {
    throw InvalidArgument("nonfinite 'raise' needs first_bad, where it reports.");
  }
  for (int64_t t = 0; rule.decays() && t < num_tables; ++t) {
    if (updates[t].decay.stamps != nullptr) continue;
    throw InvalidArgument("table " + std::to_string(t) +
                          " has no stamps, which rule 'adam' needs. Give DeviceDecay's args().");
  }
  if (n == 0 || num_tables == 0) return;
  const DeviceUpdate* on_device = Upload(cuda, scratch, updates, num_tables);
  const Gradients all = {tables, row_ids, grads, n, num_grads, dim, grad_scale};
  const int lane_bits = LaneBits(dim);
  const int64_t grid = GridFor(n << lane_bits, kThreads);
  WithFloatType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    if (nonfinite == Nonfinite::kRaise) {
      Launch(CheckRowsKernel<T>, grid, kThreads, 0, cuda, on_device, num_tables, all, true, lane_bits, first_bad);
    }
    LaunchUpdate<T>(cuda, grid, rule, on_device, num_tables, all, nonfinite, lane_bits, first_bad);
  });
}

void SettleRows(const Cuda& cuda, const UpdateRule& rule, const DeviceUpdate& update, const int64_t* row_ids, int64_t n,
                int64_t dim) {
  if (dim < 1) throw InvalidArgument("dim must be at least 1. Received: " + std::to_string(dim) + ".");
  if (update.decay.stamps == nullptr) throw InvalidArgument("only tables with a decaying rule have rows to settle.");
  const int lane_bits = LaneBits(dim);
  Launch(SettleRowsKernel, GridFor(n << lane_bits, kThreads), kThreads, 0, cuda, rule, update, row_ids, n, dim,
         lane_bits);
}

void ThrowIfBadToHost(const Cuda& cuda, const uint64_t* first_bad, const int64_t* row_ids, int64_t n) {
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
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
