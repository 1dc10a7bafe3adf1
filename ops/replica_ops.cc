// Whether what all workers should have alike is alike: by one op for all of it, as steps have hundreds of variables.
#include <algorithm>
#include <string>
#include <vector>

#include "op.h"
#include "shapes.h"

namespace sok {
namespace {

REGISTER_OP("Sok>CheckSame")
    .Input("is_same: bool")
    .Attr("problem: string")
    .Attr("names: list(string) >= 1")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

class CheckSameOp : public GuardedOp {
 public:
  explicit CheckSameOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("problem", &problem_));
    Check(ctx->GetAttr("names", &names_));
  }
  void Run(OpKernelContext* ctx) override {
    const Tensor& is_same = ctx->input(0);
    CheckShape(is_same, {static_cast<int64_t>(names_.size())}, "is_same");
    constexpr int kShown = 8;
    std::string shown;
    int64_t others = 0;
    for (size_t i = 0; i < names_.size(); ++i) {
      if (is_same.flat<bool>()(i)) continue;
      if (++others <= kShown) shown += (others > 1 ? ", '" : "'") + names_[i] + "'";
    }
    if (others > kShown) shown += " and " + std::to_string(others - kShown) + " more";
    if (others > 0) throw InvalidArgument(problem_ + " " + shown + ".");
  }

 private:
  std::string problem_;
  std::vector<std::string> names_;
};
SOK_CPU_KERNEL("Sok>CheckSame", CheckSameOp);

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
