// Whether what all workers should have alike is alike: by one op for all of it, as steps have hundreds of variables.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "op.h"
#include "shapes.h"

namespace sok {
namespace {

// Throws InvalidArgument with the names of those that are not alike.
template <class IsSame>
void RequireSame(const std::string& problem, const std::vector<std::string>& names, IsSame is_same) {
  constexpr int kShown = 8;
  std::string shown;
  int64_t others = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    if (is_same(static_cast<int64_t>(i))) continue;
    if (++others <= kShown) shown += (others > 1 ? ", '" : "'") + names[i] + "'";
  }
  if (others > kShown) shown += " and " + std::to_string(others - kShown) + " more";
  if (others > 0) throw InvalidArgument(problem + " " + shown + ".");
}

class NamedCheckOp : public GuardedOp {
 public:
  explicit NamedCheckOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("problem", &problem_));
    Check(ctx->GetAttr("names", &names_));
  }

 protected:
  std::string problem_;
  std::vector<std::string> names_;
};

REGISTER_OP("Sok>CheckSame")
    .Input("is_same: bool")
    .Attr("problem: string")
    .Attr("names: list(string) >= 1")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

class CheckSameOp : public NamedCheckOp {
 public:
  using NamedCheckOp::NamedCheckOp;
  void Run(OpKernelContext* ctx) override {
    CheckShape(ctx->input(0), {static_cast<int64_t>(names_.size())}, "is_same");
    const auto is_same = ctx->input(0).flat<bool>();
    RequireSame(problem_, names_, [&](int64_t i) { return is_same(i); });
  }
};
SOK_CPU_KERNEL("Sok>CheckSame", CheckSameOp);

// Whether all workers said the same numbers, as what they said together tells: whole numbers, rounded in short floats.
//   reduced, mine   the sum (workers: so many) or the average (workers: 1) over all ranks, and what this one said
//   size            how many ranks there are
//   may_be_silent   the first of them says whether the others count: they do if all ranks said 1
REGISTER_OP("Sok>CheckReduced")
    .Input("reduced: float")
    .Input("mine: float")
    .Attr("workers: int >= 1")
    .Attr("size: int >= 1")
    .Attr("may_be_silent: bool")
    .Attr("problem: string")
    .Attr("names: list(string) >= 1")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

class CheckReducedOp : public NamedCheckOp {
 public:
  explicit CheckReducedOp(OpKernelConstruction* ctx) : NamedCheckOp(ctx) {
    int64_t size = 1;
    Check(ctx->GetAttr("workers", &workers_));
    Check(ctx->GetAttr("size", &size));
    Check(ctx->GetAttr("may_be_silent", &may_be_silent_));
    within_ = 0.5f / static_cast<float>(size);
  }
  void Run(OpKernelContext* ctx) override {
    const int64_t first = may_be_silent_ ? 1 : 0, n = first + static_cast<int64_t>(names_.size());
    CheckShape(ctx->input(0), {n}, "reduced");
    CheckShape(ctx->input(1), {n}, "mine");
    const auto reduced = ctx->input(0).flat<float>(), mine = ctx->input(1).flat<float>();
    const float workers = static_cast<float>(workers_);
    if (may_be_silent_ && !(reduced(0) > workers - within_)) return;
    RequireSame(problem_, names_,
                [&](int64_t i) { return std::abs(reduced(first + i) - mine(first + i) * workers) < within_; });
  }

 private:
  int64_t workers_ = 1;
  bool may_be_silent_ = false;
  float within_ = 0.5f;
};
SOK_CPU_KERNEL("Sok>CheckReduced", CheckReducedOp);

// Sums of residues are exact in float32 for 4,000 workers.
constexpr uint64_t kPrime = 4093;

// Of the bytes and of their places: a mere sum would not see two values that have changed places.
float Checksum(const unsigned char* bytes, int64_t n) {
  constexpr int64_t kAtOnce = int64_t{1} << 30;  // of which the sum fits 64 bits
  uint64_t sum = 0, place = 0;
  for (int64_t begin = 0; begin < n; begin += kAtOnce) {
    const int64_t end = std::min(n, begin + kAtOnce);
    for (int64_t i = begin; i < end; ++i) {
      if (++place == kPrime) place = 0;
      sum += place * bytes[i];
    }
    sum %= kPrime;
  }
  return static_cast<float>(sum);
}

REGISTER_OP("Sok>Checksums")
    .Input("values: T")
    .Output("sums: float")
    .Attr("T: list(type) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->num_inputs()));
      return absl::OkStatus();
    });

void Checksums(OpKernelContext* ctx) {
  auto sums = Output(ctx, 0, TensorShape({ctx->num_inputs()}))->vec<float>();
  for (int i = 0; i < ctx->num_inputs(); ++i) {
    const Tensor& values = ctx->input(i);
    if (!tensorflow::DataTypeCanUseMemcpy(values.dtype())) {
      throw InvalidArgument("`values` must be numbers. Received: " + tensorflow::DataTypeString(values.dtype()) + ".");
    }
    sums(i) = Checksum(static_cast<const unsigned char*>(values.data()), static_cast<int64_t>(values.TotalBytes()));
  }
}
SOK_CPU_KERNEL("Sok>Checksums", FunctionOp<Checksums>);

}  // namespace
}  // namespace sok
