// What ops on many plain TensorFlow variables have in common, on every device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace sok {

inline constexpr int64_t kMaxRows = INT32_MAX;
inline constexpr int64_t kMaxVariableDim = INT32_MAX;

// Which variable each feature reads, and how it is pooled.
struct PoolAttributes {
  std::vector<std::string> names;    // [M]
  std::vector<int64_t> num_rows;     // [M]
  std::vector<int64_t> dims;         // [M]
  std::vector<int64_t> variable_of;  // [N], in [0, M)
  std::vector<bool> is_pooled;       // [N]
  std::vector<Combiner> combiners;   // [N]

  explicit PoolAttributes(OpKernelConstruction* ctx) {
    std::vector<std::string> spelled;
    Check(ctx->GetAttr("names", &names));
    Check(ctx->GetAttr("num_rows", &num_rows));
    Check(ctx->GetAttr("dims", &dims));
    Check(ctx->GetAttr("variable_of", &variable_of));
    Check(ctx->GetAttr("combiners", &spelled));
    int64_t m, n;
    Check(ctx->GetAttr("M", &m));
    Check(ctx->GetAttr("N", &n));
    if (names.size() != static_cast<size_t>(m) || num_rows.size() != names.size() || dims.size() != names.size())
      throw InvalidArgument("`names`, `num_rows` and `dims` must have one value per variable.");
    if (variable_of.size() != static_cast<size_t>(n) || spelled.size() != variable_of.size())
      throw InvalidArgument("`variable_of` and `combiners` must have one value per feature.");
    for (const int64_t rows : num_rows)
      if (rows < 0 || rows > kMaxRows) throw InvalidArgument("`num_rows` must lie in [0, 2^31).");
    for (const int64_t dim : dims)
      if (dim < 0 || dim > kMaxVariableDim) throw InvalidArgument("`dims` must lie in [0, 2^31).");
    for (const int64_t v : variable_of)
      if (v < 0 || v >= m) throw InvalidArgument("`variable_of` must lie in [0, " + std::to_string(m) + ").");
    for (const std::string& combiner : spelled) {
      is_pooled.push_back(combiner != "rows");
      combiners.push_back(is_pooled.back() ? ParseCombiner(combiner) : Combiner::kSum);
    }
  }

  int num_variables() const { return static_cast<int>(names.size()); }
  int num_features() const { return static_cast<int>(variable_of.size()); }
  std::string Label(int64_t variable) const { return "variable '" + names[static_cast<size_t>(variable)] + "'"; }
};

// An op with these attributes, over variables or on what comes back for them.
class PoolAttributesOp : public GuardedOp {
 public:
  explicit PoolAttributesOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { of_ = std::make_unique<PoolAttributes>(ctx); }

 protected:
  std::unique_ptr<PoolAttributes> of_;
};

// Ids that are rows of a variable, `bound` of them, and row splits that fit; both in host memory. Gives a feature that reads
// nothing yet. Throws InvalidArgument.
HostFeature CheckPoolInput(int64_t bound, const Tensor& ids, const Tensor& row_splits);

// The same of feature f, with its dim and combiner; the error names its variable.
HostFeature ReadPoolInput(const PoolAttributes& of, int f, const Tensor& ids, const Tensor& row_splits);

// Shared locks of many variables, taken in one order everywhere: two ops that wait for each other's would never end.
class SharedLocks {
 public:
  explicit SharedLocks(const std::vector<RefCountPtr<tensorflow::Var>>& variables) {
    for (const auto& variable : variables) variables_.push_back(variable.get());
    std::sort(variables_.begin(), variables_.end());
    variables_.erase(std::unique(variables_.begin(), variables_.end()), variables_.end());
    for (tensorflow::Var* variable : variables_) variable->mu()->lock_shared();
  }
  ~SharedLocks() {
    for (tensorflow::Var* variable : variables_) variable->mu()->unlock_shared();
  }
  SharedLocks(const SharedLocks&) = delete;
  SharedLocks& operator=(const SharedLocks&) = delete;

 private:
  std::vector<tensorflow::Var*> variables_;
};

// The variables of the first inputs, by their handles.
inline std::vector<RefCountPtr<tensorflow::Var>> VariablesOf(OpKernelContext* ctx, const PoolAttributes& of) {
  std::vector<RefCountPtr<tensorflow::Var>> variables(of.names.size());
  for (int v = 0; v < of.num_variables(); ++v) {
    const absl::Status found =
        tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, v), &variables[static_cast<size_t>(v)]);
    if (absl::IsNotFound(found)) {
      throw FailedPrecondition(of.Label(v) + ": it has no value. Run its initializer first.");
    }
    Check(found);
  }
  return variables;
}

// The values of a variable, wherever they lie.
inline const float* RowsOf(const PoolAttributes& of, int v, const Tensor& tensor) {
  const size_t variable = static_cast<size_t>(v);
  if (!tensor.IsInitialized()) throw FailedPrecondition(of.Label(v) + ": it has no value. Run its initializer first.");
  if (tensor.dtype() != tensorflow::DT_FLOAT)
    throw InvalidArgument(of.Label(v) + ": it must be float32. Received: " + DataTypeString(tensor.dtype()) + ".");
  const TensorShape expected({of.num_rows[variable], of.dims[variable]});
  if (tensor.shape() != expected) {
    throw InvalidArgument(of.Label(v) + ": its shape must be " + expected.DebugString() +
                          ". Received: " + tensor.shape().DebugString() + ".");
  }
  return tensor.flat<float>().data();
}

}  // namespace sok
