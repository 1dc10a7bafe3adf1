#include "sok/combine.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "row_kernels.h"
#include "sok/error.h"
#include "sok/segment_sum.h"
#include "tasks.h"

namespace sok {
namespace {

// Segments [first, last) of a feature.
struct GroupTask {
  const HostFeature* feature;
  int64_t first, last;
};

void RunTask(const GroupTask& task) {
  const HostFeature& of = *task.feature;
  if (of.row_splits == nullptr) {
    for (int64_t i = task.first; i < task.last; ++i)
      std::copy_n(of.rows + of.index[i] * of.dim, of.dim, of.output + i * of.dim);
    return;
  }
  constexpr int kRowBits = 31;                // row numbers are shifted by as many, so they have fewer than 32
  float* slab = const_cast<float*>(of.rows);  // only read
  const RowView view{&slab, kRowBits, (int64_t{1} << kRowBits) - 1, of.dim};
  const auto* keys = reinterpret_cast<const uint64_t*>(of.index) + of.row_splits[task.first];
  if (ChosenRowKernels().pool_keys(view, keys, of.row_splits, task.first, task.last, of.combiner, of.dim, of.output))
    return;
  const SerialExecutor here;
  Combine({here}, of.rows, of.index, of.row_splits + task.first, nullptr, task.last - task.first, of.dim, of.combiner,
          of.output + task.first * of.dim);
}

}  // namespace

Combiner ParseCombiner(const std::string& name) {
  if (name == "sum") return Combiner::kSum;
  if (name == "mean") return Combiner::kMean;
  if (name == "sqrtn") return Combiner::kSqrtn;
  throw InvalidArgument("combiner must be 'sum', 'mean' or 'sqrtn'. Received: '" + name + "'.");
}

void Combine(const Cpu& cpu, const float* rows, const int64_t* index, const int64_t* row_splits, const float* weights,
             int64_t segments, int64_t dim, Combiner combiner, float* output) {
  const int64_t n = segments > 0 ? row_splits[segments] : 0;
  cpu.executor.For(segments, 20 + 2 * dim * (segments > 0 ? n / segments + 1 : 1), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      float* out = output + s * dim;
      std::fill(out, out + dim, 0.0f);
      for (int64_t i = row_splits[s]; i < row_splits[s + 1]; ++i) {
        const float* row = rows + index[i] * dim;
        const float w = weights == nullptr ? 1.0f : weights[i];
        for (int64_t j = 0; j < dim; ++j) out[j] += w * row[j];
      }
      const int64_t first = row_splits[s];
      const float scale =
          SegmentScale(combiner, weights == nullptr ? nullptr : weights + first, row_splits[s + 1] - first);
      if (scale != 1.0f)
        for (int64_t j = 0; j < dim; ++j) out[j] *= scale;
    }
  });
}

// Cuts the work of all features into pieces of some ten microseconds.
void CombineGroup(const Cpu& cpu, const HostFeature* features, int64_t num_features) {
  constexpr int64_t kCycles = 50000;
  std::vector<GroupTask> tasks;
  int64_t cost = 0;
  for (const HostFeature* of = features; of != features + num_features; ++of) {
    if (of->segments == 0) continue;
    const int64_t of_feature = of->n * (20 + of->dim) + of->segments * (20 + of->dim / 4);
    const int64_t pieces = std::min(of->segments, of_feature / kCycles + 1);
    cost += of_feature;
    for (int64_t p = 0; p < pieces; ++p)
      tasks.push_back({of, of->segments * p / pieces, of->segments * (p + 1) / pieces});
  }
  ForTasks(cpu, static_cast<int64_t>(tasks.size()), cost,
           [&](int64_t, int64_t t) { RunTask(tasks[static_cast<size_t>(t)]); });
}

void ExpandSegments(const Cpu& cpu, const int64_t* row_splits, const float* weights, int64_t segments,
                    Combiner combiner, uint32_t* segment_of, float* factor) {
  cpu.executor.For(segments, 30, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t first = row_splits[s], last = row_splits[s + 1];
      const float scale = SegmentScale(combiner, weights == nullptr ? nullptr : weights + first, last - first);
      for (int64_t i = first; i < last; ++i) {
        segment_of[i] = static_cast<uint32_t>(s);
        factor[i] = weights == nullptr ? scale : scale * weights[i];
      }
    }
  });
}

void CombineGradRows(const Cpu& cpu, Scratch* scratch, const float* grad, const int64_t* index,
                     const int64_t* row_splits, const float* weights, int64_t n, int64_t segments, int64_t num_rows,
                     int64_t dim, Combiner combiner, float* grad_rows) {
  uint32_t* segment_of = scratch->Get<uint32_t>(n);
  float* factor = scratch->Get<float>(n);
  ExpandSegments(cpu, row_splits, weights, segments, combiner, segment_of, factor);
  const uint32_t* offsets;
  const uint32_t* positions;
  SortById(scratch, index, n, num_rows, &offsets, &positions);
  cpu.executor.For(num_rows, 20 + 2 * dim, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* sum = grad_rows + r * dim;
      std::fill(sum, sum + dim, 0.0f);
      for (uint32_t i = offsets[r]; i < offsets[r + 1]; ++i) {
        const uint32_t p = positions[i];
        const float* g = grad + int64_t{segment_of[p]} * dim;
        for (int64_t j = 0; j < dim; ++j) sum[j] += factor[p] * g[j];
      }
    }
  });
}

void CombineGradWeights(const Cpu& cpu, const float* grad, const float* rows, const int64_t* index,
                        const int64_t* row_splits, const float* weights, int64_t segments, int64_t dim,
                        Combiner combiner, float* grad_weights) {
  cpu.executor.For(segments, 40 + 4 * dim, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t first = row_splits[s], last = row_splits[s + 1];
      const float* g = grad + s * dim;
      const float scale = SegmentScale(combiner, weights + first, last - first);
      float out_dot = 0.0f;  // output . g
      for (int64_t i = first; i < last; ++i) {
        const float* row = rows + index[i] * dim;
        float dot = 0.0f;
        for (int64_t j = 0; j < dim; ++j) dot += row[j] * g[j];
        grad_weights[i] = dot * scale;
        out_dot += weights[i] * dot * scale;
      }
      // d scale / d w_i: -1 / (sum w)^2 for mean, -w_i / (sum w^2)^{3/2} for sqrtn.
      if (combiner == Combiner::kSum) continue;
      for (int64_t i = first; i < last; ++i) {
        grad_weights[i] -= combiner == Combiner::kMean ? out_dot * scale : out_dot * weights[i] * scale * scale;
      }
    }
  });
}

}  // namespace sok
