// Updates of a group of tables: what the attributes and the last inputs say, on every device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "op.h"
#include "sok/sparse_update.h"

namespace sok {

// Reads the attributes of GroupApply.
class GroupApplyOp : public GuardedOp {
 public:
  explicit GroupApplyOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    std::string nonfinite;
    int64_t num_tables;
    Check(ctx->GetAttr("M", &num_tables));
    Check(ctx->GetAttr("rule", &rule_));
    Check(ctx->GetAttr("slot_set", &slot_set_));
    Check(ctx->GetAttr("nonfinite", &nonfinite));
    Check(ctx->GetAttr("distinct", &distinct_));
    ParseRule(rule_);  // refuses what is no rule's name
    nonfinite_ = ParseNonfinite(nonfinite);
    if (static_cast<int64_t>(distinct_.size()) != num_tables) {
      throw InvalidArgument("`distinct` must have " + std::to_string(num_tables) +
                            " values. Received: " + std::to_string(distinct_.size()) + ".");
    }
  }

 protected:
  int num_tables() const { return static_cast<int>(distinct_.size()); }

  // Inputs 3 M and 3 M + 1, in the memory of the host.
  UpdateRule Rule(OpKernelContext* ctx) const {
    const int64_t step = ScalarArg<int64_t>(ctx->input(3 * num_tables()), "step");
    const Tensor& hyper = ctx->input(3 * num_tables() + 1);
    CheckRank(hyper, 1, "hyper");
    return MakeUpdateRule(rule_, hyper.flat<double>().data(), hyper.NumElements(), step);
  }

  std::string rule_, slot_set_;
  Nonfinite nonfinite_ = Nonfinite::kAllow;
  std::vector<bool> distinct_;
};

}  // namespace sok
