// Many plain TensorFlow variables at once: one op pools rows of all of them where they lie, one sums their gradients.
#include "variable_pool_op.h"

#include <string>
#include <utility>
#include <vector>

#include "input_limits.h"
#include "op.h"
#include "output_pool.h"
#include "shapes.h"
#include "sok/check_ids.h"
#include "sok/profile.h"
#include "sok/sum_rows.h"

namespace sok {

HostFeature CheckPoolInput(int64_t bound, const Tensor& ids, const Tensor& row_splits) {
  CheckRank(ids, 1, "ids");
  HostFeature in;
  in.n = ids.NumElements();
  in.index = Int64(ids);
  const Splits splits = ReadSplits(row_splits, in.n);
  const InputLimits no_limits;
  if (splits.status.status != kFine) throw InvalidArgument(no_limits.Describe(splits.status));
  in.row_splits = splits.begin;
  in.segments = splits.segments;
  if (const int64_t i = FirstOutside(in.index, in.n, bound); i < in.n) {
    throw InvalidArgument("id " + std::to_string(in.index[i]) + " is outside [0, " + std::to_string(bound) + ").");
  }
  return in;
}

static HostFeature ReadFeature(const PoolAttributes& of, int f, const Tensor& ids, const Tensor& row_splits) {
  const size_t feature = static_cast<size_t>(f), variable = static_cast<size_t>(of.variable_of[feature]);
  HostFeature in = CheckPoolInput(of.num_rows[variable], ids, row_splits);
  in.dim = of.dims[variable];
  in.combiner = of.combiners[feature];
  if (!of.is_pooled[feature]) {
    in.row_splits = nullptr;
    in.segments = in.n;
  } else if (in.row_splits == nullptr) {
    throw InvalidArgument("`row_splits` must start with 0.");
  }
  return in;
}

HostFeature ReadPoolInput(const PoolAttributes& of, int f, const Tensor& ids, const Tensor& row_splits) {
  return Labelled([&] { return of.Label(of.variable_of[static_cast<size_t>(f)]); },
                  [&] { return ReadFeature(of, f, ids, row_splits); });
}

namespace {

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
class PoolOp : public PoolAttributesOp {
 public:
  using PoolAttributesOp::PoolAttributesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = of_->num_variables(), n = of_->num_features();
    std::vector<RefCountPtr<tensorflow::Var>> variables;
    if (kByHandle) variables = VariablesOf(ctx, *of_);
    std::vector<HostFeature> features;
    for (int f = 0; f < n; ++f) features.push_back(ReadPoolInput(*of_, f, ctx->input(m + f), ctx->input(m + n + f)));
    // For the whole of it: a writer that finds its tensor in other hands would copy it.
    const SharedLocks locks(variables);
    std::vector<const float*> rows;
    for (int v = 0; v < m; ++v)
      rows.push_back(RowsOf(*of_, v, kByHandle ? *variables[static_cast<size_t>(v)]->tensor() : ctx->input(v)));
    ProfileCounts counts;
    for (int f = 0; f < n; ++f) {
      HostFeature& feature = features[static_cast<size_t>(f)];
      Tensor* output = AllocateOutput(ctx, f, CheckedShape({feature.segments, feature.dim}));
      feature.rows = rows[static_cast<size_t>(of_->variable_of[static_cast<size_t>(f)])];
      feature.output = output->flat<float>().data();
      counts += ProfileCounts{feature.n, feature.segments, static_cast<int64_t>(output->TotalBytes())};
    }
    const ProfileSpan span("find+combine", name(), counts, "op");
    const TfExecutor executor(ctx);
    CombineGroup({executor}, features.data(), n);
  }
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
      if (static_cast<size_t>(c->num_outputs()) != 2 * dims.size()) {
        return absl::InvalidArgumentError("`dims` must have one value per variable.");
      }
      return DistinctRowsShape(c, dims);
    });

class VariablePoolGradOp : public PoolAttributesOp {
 public:
  using PoolAttributesOp::PoolAttributesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = of_->num_variables(), n = of_->num_features();
    std::vector<std::vector<RowAddends>> addends(static_cast<size_t>(m));
    for (int f = 0; f < n; ++f) {
      const size_t variable = static_cast<size_t>(of_->variable_of[static_cast<size_t>(f)]);
      const HostFeature in = ReadPoolInput(*of_, f, ctx->input(n + f), ctx->input(2 * n + f));
      CheckShape(ctx->input(f), {in.segments, in.dim}, "grads");
      RowAddends a;
      a.row_ids = in.index;
      a.n = in.n;
      a.values = ctx->input(f).flat<float>().data();
      a.row_splits = in.row_splits;
      a.segments = in.segments;
      a.combiner = in.combiner;
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
};
SOK_CPU_KERNEL("Sok>VariablePoolGrad", VariablePoolGradOp);

// For what stock ops look up: the ids, once they are known to be fine.
REGISTER_OP("Sok>CheckIds")
    .Input("ids: int64")
    .Input("row_splits: int64")
    .Output("checked_ids: int64")
    .Attr("variable: string")
    .Attr("num_rows: int >= 0")
    .SetShapeFn(ShapeOfInput<0>);

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
    .SetShapeFn(ShapeOfInput<0>);  // whatever follows a report is never run

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
