// Many plain TensorFlow variables at once: one op pools rows of all of them where they lie, one sums their gradients.
#include "variable_pool_op.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/row_kernels.h"
#include "../cpu/tasks.h"
#include "input_limits.h"
#include "op.h"
#include "output_pool.h"
#include "sok/profile.h"
#include "sok/sum_rows.h"

namespace sok {

PoolInput CheckPoolInput(int64_t bound, const Tensor& ids, const Tensor& row_splits) {
  CheckRank(ids, 1, "ids");
  PoolInput in;
  in.n = ids.NumElements();
  in.ids = Int64(ids);
  const Splits splits = ReadSplits(row_splits, in.n);
  const InputLimits no_limits;
  if (splits.status.status != kFine) throw InvalidArgument(no_limits.Describe(splits.status));
  in.row_splits = splits.begin;
  in.segments = splits.segments;
  if (!ChosenRowKernels().all_below(reinterpret_cast<const uint64_t*>(in.ids), in.n, static_cast<uint64_t>(bound))) {
    const int64_t* bad = std::find_if(in.ids, in.ids + in.n, [&](int64_t id) { return id < 0 || id >= bound; });
    throw InvalidArgument("id " + std::to_string(*bad) + " is outside [0, " + std::to_string(bound) + ").");
  }
  return in;
}

static PoolInput ReadFeature(const PoolAttributes& of, int f, const Tensor& ids, const Tensor& row_splits) {
  const size_t feature = static_cast<size_t>(f), variable = static_cast<size_t>(of.variable_of[feature]);
  PoolInput in = CheckPoolInput(of.num_rows[variable], ids, row_splits);
  if (!of.is_pooled[feature]) {
    in.row_splits = nullptr;
    in.segments = in.n;
  } else if (in.row_splits == nullptr) {
    throw InvalidArgument("`row_splits` must start with 0.");
  }
  return in;
}

PoolInput ReadPoolInput(const PoolAttributes& of, int f, const Tensor& ids, const Tensor& row_splits) {
  return Labelled([&] { return of.Label(of.variable_of[static_cast<size_t>(f)]); },
                  [&] { return ReadFeature(of, f, ids, row_splits); });
}

namespace {

// Segments [first, last) of a feature.
struct PoolTask {
  int feature;
  int64_t first, last;
};

void RunTask(const PoolInput& in, int64_t first, int64_t last, const float* rows, int64_t dim, Combiner combiner,
             float* output) {
  if (in.row_splits == nullptr) {
    for (int64_t i = first; i < last; ++i) std::copy_n(rows + in.ids[i] * dim, dim, output + i * dim);
    return;
  }
  float* slab = const_cast<float*>(rows);  // only read
  const RowView view{&slab, kRowBits, kMaxRows, dim};
  const auto* keys = reinterpret_cast<const uint64_t*>(in.ids) + in.row_splits[first];
  if (ChosenRowKernels().pool_keys(view, keys, in.row_splits, first, last, combiner, dim, output)) return;
  const SerialExecutor here;
  Combine({here}, rows, in.ids, in.row_splits + first, nullptr, last - first, dim, combiner, output + first * dim);
}

// Cuts the work of all features into pieces of some ten microseconds.
std::vector<PoolTask> CutIntoTasks(const std::vector<PoolInput>& inputs, const std::vector<int64_t>& dims,
                                   int64_t* cost) {
  constexpr int64_t kCycles = 50000;
  std::vector<PoolTask> tasks;
  *cost = 0;
  for (size_t f = 0; f < inputs.size(); ++f) {
    const PoolInput& in = inputs[f];
    if (in.segments == 0) continue;
    const int64_t of_feature = in.n * (20 + dims[f]) + in.segments * (20 + dims[f] / 4);
    const int64_t pieces = std::min(in.segments, of_feature / kCycles + 1);
    *cost += of_feature;
    for (int64_t p = 0; p < pieces; ++p)
      tasks.push_back({static_cast<int>(f), in.segments * p / pieces, in.segments * (p + 1) / pieces});
  }
  return tasks;
}

#define SOK_POOL_VARIABLES_ATTRS      \
  Attr("M: int >= 1")                 \
      .Attr("N: int >= 1")            \
      .Attr("names: list(string)")    \
      .Attr("num_rows: list(int)")    \
      .Attr("dims: list(int)")        \
      .Attr("variable_of: list(int)") \
      .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'rows'})")

absl::Status PoolShape(InferenceContext* c) {
  std::vector<int64_t> dims, variable_of;
  std::vector<std::string> combiners;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(c->GetAttr("variable_of", &variable_of));
  TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
  const int m = static_cast<int>(dims.size()), n = static_cast<int>(variable_of.size());
  if (c->num_inputs() != m + 2 * n || combiners.size() != variable_of.size())
    return absl::InvalidArgumentError("`variable_of` must have a value for each feature, `dims` for each variable.");
  for (int f = 0; f < n; ++f) {
    const size_t feature = static_cast<size_t>(f);
    if (variable_of[feature] < 0 || variable_of[feature] >= m)
      return absl::InvalidArgumentError("`variable_of` must lie in [0, M).");
    ShapeHandle ids, splits;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(m + f), 1, &ids));
    TF_RETURN_IF_ERROR(c->WithRank(c->input(m + n + f), 1, &splits));
    DimensionHandle rows = c->Dim(ids, 0);
    if (combiners[feature] != "rows") TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &rows));
    c->set_output(f, c->Matrix(rows, dims[static_cast<size_t>(variable_of[feature])]));
  }
  return absl::OkStatus();
}

// Of resource variables, by their handles.
REGISTER_OP("Sok>VariablePool")
    .Input("handles: M * resource")
    .Input("ids: N * int64")
    .Input("row_splits: N * int64")
    .Output("outputs: N * float")
    .SOK_POOL_VARIABLES_ATTRS.SetIsStateful()
    .SetShapeFn(PoolShape);

// Of tensors: what variables are that are references, in graphs of TensorFlow 1.
REGISTER_OP("Sok>TensorPool")
    .Input("params: M * float")
    .Input("ids: N * int64")
    .Input("row_splits: N * int64")
    .Output("outputs: N * float")
    .SOK_POOL_VARIABLES_ATTRS.SetShapeFn(PoolShape);

template <bool kByHandle>
class PoolOp : public GuardedOp {
 public:
  explicit PoolOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { of_ = std::make_unique<PoolAttributes>(ctx); }

  void Run(OpKernelContext* ctx) override {
    const int m = of_->num_variables(), n = of_->num_features();
    std::vector<RefCountPtr<tensorflow::Var>> variables;
    if (kByHandle) variables = VariablesOf(ctx, *of_);
    std::vector<PoolInput> inputs;
    std::vector<int64_t> dims;
    for (int f = 0; f < n; ++f) {
      inputs.push_back(ReadPoolInput(*of_, f, ctx->input(m + f), ctx->input(m + n + f)));
      dims.push_back(of_->dims[static_cast<size_t>(of_->variable_of[static_cast<size_t>(f)])]);
    }
    // For the whole of it: a writer that finds its tensor in other hands would copy it.
    const SharedLocks locks(variables);
    std::vector<const float*> rows;
    for (int v = 0; v < m; ++v)
      rows.push_back(RowsOf(*of_, v, kByHandle ? *variables[static_cast<size_t>(v)]->tensor() : ctx->input(v)));
    std::vector<float*> outputs;
    ProfileCounts counts;
    for (int f = 0; f < n; ++f) {
      const PoolInput& in = inputs[static_cast<size_t>(f)];
      Tensor* output = AllocateOutput(ctx, f, CheckedShape({in.segments, dims[static_cast<size_t>(f)]}));
      outputs.push_back(output->flat<float>().data());
      counts += ProfileCounts{in.n, in.segments, static_cast<int64_t>(output->TotalBytes())};
    }
    const ProfileSpan span("find+combine", name(), counts, "op");
    int64_t cost;
    const std::vector<PoolTask> tasks = CutIntoTasks(inputs, dims, &cost);
    const TfExecutor executor(ctx);
    ForTasks({executor}, static_cast<int64_t>(tasks.size()), cost, [&](int64_t, int64_t t) {
      const PoolTask& task = tasks[static_cast<size_t>(t)];
      const size_t f = static_cast<size_t>(task.feature);
      RunTask(inputs[f], task.first, task.last, rows[static_cast<size_t>(of_->variable_of[f])], dims[f],
              of_->combiners[f], outputs[f]);
    });
  }

 private:
  std::unique_ptr<PoolAttributes> of_;
};
SOK_CPU_KERNEL("Sok>VariablePool", PoolOp<true>);
SOK_CPU_KERNEL("Sok>TensorPool", PoolOp<false>);

// The gradient of both: for each variable the rows that were read, each once, with what came back for it.
REGISTER_OP("Sok>VariablePoolGrad")
    .Input("grads: N * float")
    .Input("ids: N * int64")
    .Input("row_splits: N * int64")
    .Output("unique_ids: M * int64")
    .Output("sums: M * float")
    .SOK_POOL_VARIABLES_ATTRS.SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      const int m = static_cast<int>(dims.size());
      if (c->num_outputs() != 2 * m) {
        return absl::InvalidArgumentError("`dims` must have one value per variable.");
      }
      for (int v = 0; v < m; ++v) {
        const DimensionHandle rows = c->UnknownDim();
        c->set_output(v, c->Vector(rows));
        c->set_output(m + v, c->Matrix(rows, dims[static_cast<size_t>(v)]));
      }
      return absl::OkStatus();
    });

class VariablePoolGradOp : public GuardedOp {
 public:
  explicit VariablePoolGradOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    of_ = std::make_unique<PoolAttributes>(ctx);
  }

  void Run(OpKernelContext* ctx) override {
    const int m = of_->num_variables(), n = of_->num_features();
    std::vector<std::vector<RowAddends>> addends(static_cast<size_t>(m));
    for (int f = 0; f < n; ++f) {
      const size_t variable = static_cast<size_t>(of_->variable_of[static_cast<size_t>(f)]);
      const PoolInput in = ReadPoolInput(*of_, f, ctx->input(n + f), ctx->input(2 * n + f));
      CheckShape(ctx->input(f), {in.segments, of_->dims[variable]}, "grads");
      RowAddends a;
      a.row_ids = in.ids;
      a.n = in.n;
      a.values = ctx->input(f).flat<float>().data();
      a.row_splits = in.row_splits;
      a.segments = in.segments;
      a.combiner = of_->combiners[static_cast<size_t>(f)];
      addends[variable].push_back(a);
    }
    std::vector<RowSums> tables;
    for (int v = 0; v < m; ++v) {
      const auto& of_variable = addends[static_cast<size_t>(v)];
      tables.push_back(
          {of_->dims[static_cast<size_t>(v)], of_variable.data(), static_cast<int64_t>(of_variable.size())});
    }
    const ProfileSpan span("backward", name(), {}, "op");
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    SumRows({executor}, scratch.get(), tables.data(), m, [&](int64_t v, int64_t rows) {
      Tensor* ids = AllocateOutput(ctx, static_cast<int>(v), CheckedShape({rows}));
      Tensor* sums =
          AllocateOutput(ctx, static_cast<int>(m + v), CheckedShape({rows, of_->dims[static_cast<size_t>(v)]}));
      RowSumsTarget target;
      target.row_ids = reinterpret_cast<int64_t*>(ids->flat<int64_t>().data());
      target.sums = sums->flat<float>().data();
      return target;
    });
  }

 private:
  std::unique_ptr<PoolAttributes> of_;
};
SOK_CPU_KERNEL("Sok>VariablePoolGrad", VariablePoolGradOp);

// For what stock ops look up: the ids, once they are known to be fine.
REGISTER_OP("Sok>CheckIds")
    .Input("ids: int64")
    .Input("row_splits: int64")
    .Output("checked_ids: int64")
    .Attr("variable: string")
    .Attr("num_rows: int >= 0")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });

class CheckIdsOp : public GuardedOp {
 public:
  explicit CheckIdsOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("variable", &variable_));
    Check(ctx->GetAttr("num_rows", &num_rows_));
  }

  void Run(OpKernelContext* ctx) override {
    Labelled([&] { return "variable '" + variable_ + "'"; },
             [&] { return CheckPoolInput(num_rows_, ctx->input(0), ctx->input(1)); });
    ctx->set_output(0, ctx->input(0));
  }

 private:
  std::string variable_;
  int64_t num_rows_;
};
SOK_CPU_KERNEL("Sok>CheckIds", CheckIdsOp);

// For variables beside the tables of several workers: row splits of a table's feature, or in their place what is wrong with
// the ids of a variable. The lookup of the table raises it on all workers; to raise here would leave the others waiting.
REGISTER_OP("Sok>ReportIds")
    .Input("row_splits: int64")
    .Input("ids: N * int64")
    .Input("id_splits: N * int64")
    .Output("checked_splits: int64")
    .Attr("N: int >= 1")
    .Attr("names: list(string)")
    .Attr("num_rows: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));  // whatever follows a report is never run
      return absl::OkStatus();
    });

class ReportIdsOp : public GuardedOp {
 public:
  explicit ReportIdsOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    int64_t n;
    Check(ctx->GetAttr("N", &n));
    Check(ctx->GetAttr("names", &names_));
    Check(ctx->GetAttr("num_rows", &num_rows_));
    if (names_.size() != static_cast<size_t>(n) || num_rows_.size() != names_.size())
      throw InvalidArgument("`names` and `num_rows` must have one value per feature.");
  }

  void Run(OpKernelContext* ctx) override {
    const int n = static_cast<int>(names_.size());
    try {
      for (int f = 0; f < n; ++f) {
        const size_t feature = static_cast<size_t>(f);
        Labelled([&] { return "variable '" + names_[feature] + "'"; },
                 [&] { return CheckPoolInput(num_rows_[feature], ctx->input(1 + f), ctx->input(1 + n + f)); });
      }
    } catch (const InvalidArgument& e) {
      return WriteTextReport(ctx, 0, e.what());
    }
    ctx->set_output(0, ctx->input(0));
  }

 private:
  std::vector<std::string> names_;
  std::vector<int64_t> num_rows_;
};
SOK_HOST_KERNEL("Sok>ReportIds", ReportIdsOp, "row_splits", "ids", "id_splits", "checked_splits");

}  // namespace
}  // namespace sok
