// Many tables at once, on one rank: one op looks all of them up, one sums their gradients, one updates them.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "output_pool.h"
#include "shapes.h"
#include "sok/profile.h"
#include "sok/sum_rows.h"
#include "tables_op.h"

namespace sok {
namespace {

// capacities: of each table, what its row numbers are below, or nothing: sums on a GPU sort by as few bits.
#define SOK_GROUP_ATTRS                \
  Attr("M: int >= 1")                  \
      .Attr("N: int >= 1")             \
      .Attr("table_of: list(int)")     \
      .Attr("dims: list(int)")         \
      .Attr("combiners: list(string)") \
      .Attr("capacities: list(int) = []")

// Which keys a feature looks up, and where.
EmbeddingTable::Feature KeysOf(TableResource& table, const Tensor& keys, Scratch* scratch) {
  table.CheckKeyType(keys);
  CheckRank(keys, 1, "keys");
  EmbeddingTable::Feature feature;
  feature.table = &table.table();
  feature.n = keys.NumElements();
  feature.keys = KeyWords(keys, scratch);
  return feature;
}

absl::Status ReadAttributes(InferenceContext* c, std::vector<int64_t>* table_of, std::vector<int64_t>* dims) {
  TF_RETURN_IF_ERROR(c->GetAttr("table_of", table_of));
  TF_RETURN_IF_ERROR(c->GetAttr("dims", dims));
  for (const int64_t table : *table_of) {
    if (table < 0 || table >= static_cast<int64_t>(dims->size())) {
      return absl::InvalidArgumentError("`table_of` must lie in [0, M) and `dims` have M values.");
    }
  }
  return absl::OkStatus();
}

REGISTER_OP("Sok>GroupLookup")
    .Input("handles: M * resource")
    .Input("keys: Tkeys")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Input("insert: bool")
    .Output("outputs: N * float")
    .Output("row_ids: N * int64")
    .Attr("Tkeys: list(" SOK_KEY_TYPES ") >= 1")
    .SOK_GROUP_ATTRS.SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> table_of, dims;
      TF_RETURN_IF_ERROR(ReadAttributes(c, &table_of, &dims));
      const int m = static_cast<int>(dims.size()), n = static_cast<int>(table_of.size());
      if (c->num_inputs() != m + 3 * n + 1) {
        return absl::InvalidArgumentError("`table_of` must have a value for each feature, `dims` for each table.");
      }
      for (int f = 0; f < n; ++f) {
        ShapeHandle keys, splits;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(m + f), 1, &keys));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(m + n + f), 1, &splits));
        DimensionHandle segments;
        TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &segments));
        c->set_output(f, c->Matrix(segments, dims[static_cast<size_t>(table_of[static_cast<size_t>(f)])]));
        c->set_output(n + f, keys);
      }
      ShapeHandle unused;
      return c->WithRank(c->input(m + 3 * n), 0, &unused);
    });

class GroupLookupOp : public TablesOp {
 public:
  using TablesOp::TablesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = group_->num_tables(), n = group_->num_features();
    const std::vector<RefCountPtr<TableResource>> tables = Tables(ctx);
    const bool insert = ScalarArg<bool>(ctx->input(m + 3 * n), "insert");
    const ScratchLease scratch;
    std::vector<EmbeddingTable::Feature> features(static_cast<size_t>(n));
    std::vector<Wanted> wanted(static_cast<size_t>(2 * n));  // outputs, then row ids
    bool* are_keys = scratch.get()->Get<bool>(n);
    std::fill_n(are_keys, n, false);
    for (int f = 0; f < n; ++f) {
      EmbeddingTable::Feature& feature = features[static_cast<size_t>(f)];
      const Tensor &keys = ctx->input(m + f), &row_splits = ctx->input(m + n + f);
      feature = KeysOf(*tables[group_->TableOf(f)], keys, scratch.get());
      feature.segments =
          Labelled([&] { return feature.table->Label(); }, [&] { return CheckRowSplits(row_splits, feature.n); });
      feature.row_splits = Int64(row_splits);
      feature.weights = WeightsOrNull(ctx->input(m + 2 * n + f), feature.n);
      feature.combiner = group_->combiners[static_cast<size_t>(f)];
      wanted[static_cast<size_t>(f)] = {tensorflow::DT_FLOAT, CheckedShape({feature.segments, feature.table->dim()})};
      wanted[static_cast<size_t>(n + f)] = {tensorflow::DT_INT64, keys.shape()};
      if (keys.dtype() == tensorflow::DT_INT64) feature.keys_are_row_ids = &are_keys[f];
    }
    std::vector<Tensor> outputs = AllocateTogether(ctx, wanted);
    for (size_t f = 0; f < features.size(); ++f) {
      features[f].output = outputs[f].flat<float>().data();
      Tensor* row_ids = &outputs[features.size() + f];
      features[f].row_ids = reinterpret_cast<int64_t*>(row_ids->flat<int64_t>().data());
    }
    const ProfileGroup described = DescribeGroup(features, [](const EmbeddingTable::Feature& f) {
      return ProfileCounts{f.n, f.segments, f.segments * f.table->dim() * int64_t{sizeof(float)}};
    });
    const ProfileSpan span("find+combine", described.tables, described.counts);
    const TfExecutor executor(ctx);
    EmbeddingTable::LookupGroup({executor}, scratch.get(), features.data(), n, insert);
    for (int f = 0; insert && f < n; ++f) tables[group_->TableOf(f)]->ids += features[static_cast<size_t>(f)].n;
    for (int f = 0; f < n; ++f) {
      ctx->set_output(f, outputs[static_cast<size_t>(f)]);
      ctx->set_output(n + f, are_keys[f] ? ctx->input(m + f) : outputs[static_cast<size_t>(n + f)]);
    }
  }
};
SOK_CPU_KERNEL(Name("Sok>GroupLookup"), GroupLookupOp);

// The gradient of GroupLookup: for each table the rows that were read, each once, with what came back for it. The matrix
// of gradients per key never exists.
REGISTER_OP("Sok>GroupLookupGrad")
    .Input("grads: N * float")
    .Input("row_ids: N * int64")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("unique_row_ids: M * int64")
    .Output("sums: M * float")
    .SOK_GROUP_ATTRS.SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> table_of, dims;
      TF_RETURN_IF_ERROR(ReadAttributes(c, &table_of, &dims));
      return DistinctRowsShape(c, dims);
    });

class GroupLookupGradOp : public TablesOp {
 public:
  using TablesOp::TablesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = group_->num_tables(), n = group_->num_features();
    std::vector<std::vector<RowAddends>> addends(static_cast<size_t>(m));
    for (int f = 0; f < n; ++f) {
      const size_t t = group_->TableOf(f);
      const Tensor &grad = ctx->input(f), &row_ids = ctx->input(n + f), &row_splits = ctx->input(2 * n + f);
      CheckRank(row_ids, 1, "row_ids");
      RowAddends a;
      a.n = row_ids.NumElements();
      a.segments = CheckRowSplits(row_splits, a.n);
      CheckShape(grad, {a.segments, group_->dims[t]}, "grad");
      a.row_ids = Int64(row_ids);
      a.values = grad.flat<float>().data();
      a.row_splits = Int64(row_splits);
      a.weights = WeightsOrNull(ctx->input(3 * n + f), a.n);
      a.combiner = group_->combiners[static_cast<size_t>(f)];
      addends[t].push_back(a);
    }
    std::vector<RowSums> tables;
    for (int t = 0; t < m; ++t) {
      const auto& of_table = addends[static_cast<size_t>(t)];
      tables.push_back({group_->dims[static_cast<size_t>(t)], of_table.data(), static_cast<int64_t>(of_table.size())});
    }
    const ProfileSpan span("backward", name(), {}, "op");
    SharedBlocks blocks;  // small sums of many tables side by side; how many rows there are is known one by one
    auto place = [&](int index, const TensorShape& shape) {
      ctx->set_output(index, blocks.Allocate(ctx->expected_output_dtype(index), shape));
      return ctx->mutable_output(index);
    };
    const TfExecutor executor(ctx);
    const ScratchLease scratch;
    SumRows({executor}, scratch.get(), tables.data(), m, [&](int64_t t, int64_t rows) {
      RowSumsTarget target;
      target.row_ids =
          reinterpret_cast<int64_t*>(place(static_cast<int>(t), CheckedShape({rows}))->flat<int64_t>().data());
      target.sums = place(static_cast<int>(m + t), CheckedShape({rows, group_->dims[static_cast<size_t>(t)]}))
                        ->flat<float>()
                        .data();
      return target;
    });
  }
};
SOK_CPU_KERNEL(Name("Sok>GroupLookupGrad"), GroupLookupGradOp);

// The gradient of GroupLookup in its weights. Reads the rows once more, so it belongs before their update.
REGISTER_OP("Sok>GroupLookupGradWeights")
    .Input("handles: M * resource")
    .Input("grads: N * float")
    .Input("keys: Tkeys")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("grad_weights: N * float")
    .Attr("Tkeys: list(" SOK_KEY_TYPES ") >= 1")
    .SOK_GROUP_ATTRS.SetShapeFn([](InferenceContext* c) {
      const int n = c->num_outputs();
      for (int f = 0; f < n; ++f) c->set_output(f, c->input(c->num_inputs() - n + f));
      return absl::OkStatus();
    });

class GroupLookupGradWeightsOp : public TablesOp {
 public:
  using TablesOp::TablesOp;

  void Run(OpKernelContext* ctx) override {
    const int m = group_->num_tables(), n = group_->num_features();
    const ProfileSpan span("backward", name(), {}, "op");
    const TfExecutor executor(ctx);
    const ScratchLease lease;
    Scratch* scratch = lease.get();
    const std::vector<RefCountPtr<TableResource>> tables = Tables(ctx);
    std::vector<EmbeddingTable::Feature> features;
    for (int f = 0; f < n; ++f) {
      EmbeddingTable::Feature feature = KeysOf(*tables[group_->TableOf(f)], ctx->input(m + n + f), scratch);
      feature.output = scratch->Get<float>(feature.n * feature.table->dim());
      feature.row_ids = scratch->Get<int64_t>(feature.n);
      features.push_back(feature);
    }
    EmbeddingTable::LookupGroup({executor}, scratch, features.data(), n, /*insert=*/false);
    for (int f = 0; f < n; ++f) {
      const EmbeddingTable::Feature& feature = features[static_cast<size_t>(f)];
      const Tensor &grad = ctx->input(m + f), &row_splits = ctx->input(m + 2 * n + f);
      const int64_t segments = CheckRowSplits(row_splits, feature.n), dim = feature.table->dim();
      CheckShape(grad, {segments, dim}, "grad");
      const float* weights = WeightsOrNull(ctx->input(m + 3 * n + f), feature.n);
      Tensor* out = AllocateOutput(ctx, f, ctx->input(m + 3 * n + f).shape());
      if (weights == nullptr) continue;
      int64_t* index = scratch->Get<int64_t>(feature.n);
      std::iota(index, index + feature.n, int64_t{0});
      CombineGradWeights({executor}, grad.flat<float>().data(), feature.output, index, Int64(row_splits), weights,
                         segments, dim, group_->combiners[static_cast<size_t>(f)], out->flat<float>().data());
    }
  }
};
SOK_CPU_KERNEL(Name("Sok>GroupLookupGradWeights"), GroupLookupGradWeightsOp);

}  // namespace
}  // namespace sok
