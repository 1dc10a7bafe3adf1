// Tables of a native export, in a library of their own that a server loads: read-only lookups, nothing else.
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "handle_op.h"
#include "shapes.h"
#include "sok/redis_table.h"
#include "sok/serving_table.h"

namespace sok {
namespace {

using tensorflow::tstring;

// A table that is opened after its handle is made: where the model lies is known when it is loaded.
class ServingResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return "a table of a native export of sok"; }
  // Of the process alone: what is mapped is shared.
  int64_t MemoryUsed() const override { return sizeof(*this); }

  void Open(const std::string& path) {
    auto opened = OpenServingTable(path);
    const std::lock_guard<std::mutex> lock(mutex_);
    table_ = std::move(opened);
  }

  std::shared_ptr<const ServingTable> table() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (table_ != nullptr) return table_;
    throw FailedPrecondition("a table of a native export is looked up before it is opened: run the model's init op.");
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const ServingTable> table_;
};

using Resource = RefCountPtr<ServingResource>;

Resource ServingArg(OpKernelContext* ctx, int index) {
  Resource resource;
  Check(tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, index), &resource));
  return resource;
}

REGISTER_OP("Sok>ServingTable")
    .Output("handle: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("anonymous: bool = false")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

class ServingTableOp final : public HandleOp<ServingResource> {
 public:
  using HandleOp::HandleOp;

 private:
  ServingResource* Make(OpKernelContext*) const override { return new ServingResource; }
};
SOK_CPU_KERNEL("Sok>ServingTable", ServingTableOp);

REGISTER_OP("Sok>ServingOpen").Input("handle: resource").Input("path: string").SetIsStateful().SetShapeFn(TakesScalar);

void ServingOpen(OpKernelContext* ctx) { ServingArg(ctx, 0)->Open(ScalarArg<tstring>(ctx->input(1), "path")); }
SOK_CPU_KERNEL("Sok>ServingOpen", FunctionOp<ServingOpen>);

void CheckKeysAndDim(const ServingTable& table, const Tensor& keys, int64_t dim) {
  const auto type = keys.dtype();
  if (tensorflow::DataTypeSize(type) != table.key_bytes() || IsUnsigned(type) != table.is_unsigned()) {
    throw InvalidArgument("table '" + table.name() + "': keys must be " + (table.is_unsigned() ? "uint" : "int") +
                          std::to_string(8 * table.key_bytes()) + ". Received: " + tensorflow::DataTypeString(type) +
                          ".");
  }
  if (table.dim() != dim) {
    throw InvalidArgument("table '" + table.name() + "': rows have dim " + std::to_string(table.dim()) + " in " +
                          table.path() + ", where the model wants " + std::to_string(dim) +
                          ". The file belongs to another model.");
  }
}

// Neither this nor the next is stateful: TensorFlow may then run several at a time, and leave out what nobody asks for.
REGISTER_OP("Sok>ServingLookup")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Output("rows: float")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .Attr("dim: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(c->Concatenate(c->input(1), c->Vector(dim), &rows));
      c->set_output(0, rows);
      return absl::OkStatus();
    });

class ServingLookupOp : public GuardedOp {
 public:
  explicit ServingLookupOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("dim", &dim_)); }

  void Run(OpKernelContext* ctx) override {
    const std::shared_ptr<const ServingTable> table = ServingArg(ctx, 0)->table();
    const Tensor& keys = ctx->input(1);
    CheckKeysAndDim(*table, keys, dim_);
    TensorShape shape = keys.shape();
    Check(shape.AddDimWithStatus(dim_));
    Tensor* rows = Output(ctx, 0, shape);
    const ScratchLease scratch;
    const TfExecutor executor(ctx);
    table->Lookup({executor}, scratch.get(), KeyWords(keys, scratch.get()), keys.NumElements(),
                  rows->flat<float>().data());
  }

 private:
  int64_t dim_ = 0;
};
SOK_CPU_KERNEL("Sok>ServingLookup", ServingLookupOp);

REGISTER_OP("Sok>ServingGroupLookup")
    .Input("handles: M * resource")
    .Input("keys: Tkeys")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("outputs: N * float")
    .Attr("Tkeys: list(" SOK_KEY_TYPES ") >= 1")
    .Attr("M: int >= 1")
    .Attr("N: int >= 1")
    .Attr("table_of: list(int)")
    .Attr("dims: list(int)")
    .Attr("combiners: list(string)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> table_of, dims;
      TF_RETURN_IF_ERROR(c->GetAttr("table_of", &table_of));
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      const size_t m = dims.size(), n = table_of.size();
      if (static_cast<size_t>(c->num_inputs()) != m + 3 * n) {
        return absl::InvalidArgumentError("`table_of` must have a value for each feature, `dims` for each table.");
      }
      for (size_t f = 0; f < n; ++f) {
        if (table_of[f] < 0 || static_cast<size_t>(table_of[f]) >= m) {
          return absl::InvalidArgumentError("`table_of` must lie in [0, M).");
        }
        ShapeHandle splits;
        DimensionHandle segments;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(static_cast<int>(m + n + f)), 1, &splits));
        TF_RETURN_IF_ERROR(c->Subtract(c->Dim(splits, 0), 1, &segments));
        c->set_output(static_cast<int>(f), c->Matrix(segments, dims[static_cast<size_t>(table_of[f])]));
      }
      return absl::OkStatus();
    });

class ServingGroupLookupOp : public GuardedOp {
 public:
  explicit ServingGroupLookupOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    std::vector<std::string> combiners;
    Check(ctx->GetAttr("table_of", &table_of_));
    Check(ctx->GetAttr("dims", &dims_));
    Check(ctx->GetAttr("combiners", &combiners));
    // Shape functions do not run for eager calls.
    if (static_cast<size_t>(ctx->num_inputs()) != dims_.size() + 3 * table_of_.size()) {
      throw InvalidArgument("`table_of` must have a value for each feature, `dims` for each table.");
    }
    if (combiners.size() != table_of_.size()) throw InvalidArgument("`combiners` must have a value for each feature.");
    for (const int64_t table : table_of_)
      if (table < 0 || static_cast<size_t>(table) >= dims_.size())
        throw InvalidArgument("`table_of` must lie in [0, M).");
    for (const std::string& name : combiners) combiners_.push_back(ParseCombiner(name));
  }

  void Run(OpKernelContext* ctx) override {
    const int m = static_cast<int>(dims_.size()), n = static_cast<int>(table_of_.size());
    std::vector<std::shared_ptr<const ServingTable>> tables;
    for (int t = 0; t < m; ++t) tables.push_back(ServingArg(ctx, t)->table());
    const ScratchLease scratch;
    const TfExecutor executor(ctx);
    std::vector<Feature> features;
    std::vector<ServingAsk> remote;
    for (int f = 0; f < n; ++f) {
      const ServingTable& table = *tables[static_cast<size_t>(table_of_[static_cast<size_t>(f)])];
      CheckRank(ctx->input(m + f), 1, "keys");
      CheckKeysAndDim(table, ctx->input(m + f), dims_[static_cast<size_t>(table_of_[static_cast<size_t>(f)])]);
      features.push_back(Prepare(ctx, scratch.get(), table, f, m, n));
      if (table.is_remote()) remote.push_back(features.back().ask);
    }
    if (!remote.empty()) LookupRemote({executor}, scratch.get(), remote);  // of all features in one go
    for (int f = 0; f < n; ++f) Pool({executor}, scratch.get(), features[static_cast<size_t>(f)], f);
  }

 private:
  struct Feature {
    ServingAsk ask;
    const int64_t* begin;  // [segments + 1]
    int64_t segments;
    const float* weights;
    float* pooled;
  };

  Feature Prepare(OpKernelContext* ctx, Scratch* scratch, const ServingTable& table, int f, int m, int n) {
    const Tensor &keys = ctx->input(m + f), &splits = ctx->input(m + n + f);
    const int64_t num_keys = keys.NumElements();
    const int64_t segments =
        Labelled([&] { return "table '" + table.name() + "'"; }, [&] { return CheckRowSplits(splits, num_keys); });
    const float* weights = WeightsOrNull(ctx->input(m + 2 * n + f), num_keys);
    const int64_t* begin = Int64(splits);
    Tensor* output = Output(ctx, f, CheckedShape({segments, table.dim()}));
    float* pooled = output->flat<float>().data();
    const uint64_t* words = KeyWords(keys, scratch);
    bool is_one_each = weights == nullptr && num_keys == segments;
    for (int64_t s = 0; is_one_each && s < segments; ++s) is_one_each = begin[s] == s;
    // The sum, the mean and the sqrtn of one row are the row.
    float* rows = is_one_each ? pooled : scratch->Get<float>(num_keys * table.dim());
    return {{&table, words, num_keys, rows}, begin, segments, weights, pooled};
  }

  void Pool(const Cpu& cpu, Scratch* scratch, const Feature& feature, int f) {
    const auto& [table, keys, num_keys, rows] = feature.ask;
    if (!table->is_remote()) table->Lookup(cpu, scratch, keys, num_keys, rows);
    if (rows == feature.pooled) return;
    int64_t* index = scratch->Get<int64_t>(num_keys);
    for (int64_t i = 0; i < num_keys; ++i) index[i] = i;
    Combine(cpu, rows, index, feature.begin, feature.weights, feature.segments, table->dim(),
            combiners_[static_cast<size_t>(f)], feature.pooled);
  }

  std::vector<int64_t> table_of_, dims_;
  std::vector<Combiner> combiners_;
};
SOK_CPU_KERNEL("Sok>ServingGroupLookup", ServingGroupLookupOp);

}  // namespace
}  // namespace sok
