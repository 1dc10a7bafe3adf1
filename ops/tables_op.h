// What ops on groups of tables have in common, on every device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "op.h"
#include "table_resource.h"

namespace sok {

// Which table each feature reads, and how it is pooled.
struct GroupAttributes {
  std::vector<int64_t> table_of;    // [N], in [0, M)
  std::vector<int64_t> dims;        // [M]
  std::vector<Combiner> combiners;  // [N]
  std::vector<int64_t> capacities;  // [M], or empty: not known

  explicit GroupAttributes(OpKernelConstruction* ctx) {
    int64_t num_tables, num_features;
    std::vector<std::string> names;
    Check(ctx->GetAttr("M", &num_tables));
    Check(ctx->GetAttr("N", &num_features));
    Check(ctx->GetAttr("table_of", &table_of));
    Check(ctx->GetAttr("dims", &dims));
    Check(ctx->GetAttr("combiners", &names));
    Check(ctx->GetAttr("capacities", &capacities));
    auto check_size = [](const char* name, size_t size, int64_t expected) {
      if (static_cast<int64_t>(size) == expected) return;
      throw InvalidArgument(std::string("`") + name + "` must have " + std::to_string(expected) +
                            " values. Received: " + std::to_string(size) + ".");
    };
    check_size("table_of", table_of.size(), num_features);
    check_size("combiners", names.size(), num_features);
    check_size("dims", dims.size(), num_tables);
    CheckDims(dims);
    if (!capacities.empty()) check_size("capacities", capacities.size(), num_tables);
    for (const int64_t table : table_of) {
      if (table >= 0 && table < num_tables) continue;
      throw InvalidArgument("`table_of` must lie in [0, " + std::to_string(num_tables) +
                            "). Received: " + std::to_string(table) + ".");
    }
    for (const std::string& name : names) combiners.push_back(ParseCombiner(name));
  }

  int num_tables() const { return static_cast<int>(dims.size()); }
  int num_features() const { return static_cast<int>(table_of.size()); }
  size_t TableOf(int feature) const { return static_cast<size_t>(table_of[static_cast<size_t>(feature)]); }
};

// An op with these attributes.
class TablesOp : public GuardedOp {
 public:
  explicit TablesOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { group_ = std::make_unique<GroupAttributes>(ctx); }

 protected:
  // The tables, which are the first inputs.
  std::vector<RefCountPtr<TableResource>> Tables(OpKernelContext* ctx) const {
    std::vector<RefCountPtr<TableResource>> tables;
    for (int t = 0; t < group_->num_tables(); ++t) {
      tables.push_back(TableArg(ctx, t));
      tables.back()->CheckDim(group_->dims[static_cast<size_t>(t)]);
    }
    return tables;
  }

  std::unique_ptr<GroupAttributes> group_;
};

}  // namespace sok
