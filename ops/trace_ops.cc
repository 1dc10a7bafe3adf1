// Counting collectives and their bytes as they run.
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "op.h"

namespace sok {
namespace {

struct Count {
  std::string kind;
  int64_t calls = 0;
  int64_t bytes = 0;
};

struct Counts {
  std::mutex mutex;
  std::map<std::string, Count> by_name;
};

Counts& TheCounts() {
  static Counts* counts = new Counts;  // leaked: kernels may run while the process ends
  return *counts;
}

// Names are ours (table and layer names): quotes and control characters are all that JSON minds.
std::string JsonText(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

// TensorFlow runs the stateful ops of a function one after the other, except for those that touch resources, which wait
// for their own resource only: `turns` keeps one layer's exchange from waiting for another's.
REGISTER_OP("Sok>TraceCollective")
    .Input("x: T")
    .Input("turns: num_turns * resource")
    .Output("y: T")
    .Attr("num_turns: int >= 0")
    .Attr("T: type")
    .Attr("collective: string")
    .Attr("kind: string")
    .Attr("more_bytes: int = 0")  // of the other tensors of a grouped collective
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    });

class TraceCollectiveOp : public OpKernel {
 public:
  explicit TraceCollectiveOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("collective", &name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("kind", &kind_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("more_bytes", &more_bytes_));
  }
  void Compute(OpKernelContext* ctx) override {
    {
      Counts& counts = TheCounts();
      std::lock_guard<std::mutex> lock(counts.mutex);
      Count& count = counts.by_name[name_];
      count.kind = kind_;
      ++count.calls;
      count.bytes += static_cast<int64_t>(ctx->input(0).TotalBytes()) + more_bytes_;
    }
    ctx->set_output(0, ctx->input(0));
  }

 private:
  std::string name_, kind_;
  int64_t more_bytes_;
};
REGISTER_KERNEL_BUILDER(Name("Sok>TraceCollective").Device(tensorflow::DEVICE_CPU), TraceCollectiveOp);

REGISTER_OP("Sok>TraceRead")
    .Input("reset: bool")
    .Output("json: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

class TraceReadOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const bool reset = ScalarArg<bool>(ctx->input(0), "reset");
      Tensor* json;
      Check(ctx->allocate_output(0, TensorShape({}), &json));
      std::ostringstream names;
      int64_t calls = 0, bytes = 0;
      Counts& counts = TheCounts();
      std::lock_guard<std::mutex> lock(counts.mutex);
      for (const auto& [name, count] : counts.by_name) {
        names << (calls == 0 ? "" : ", ") << JsonText(name) << ": {\"kind\": " << JsonText(count.kind)
              << ", \"collectives\": " << count.calls << ", \"bytes\": " << count.bytes << "}";
        calls += count.calls;
        bytes += count.bytes;
      }
      std::ostringstream out;
      out << "{\"collectives\": " << calls << ", \"bytes\": " << bytes << ", \"by_name\": {" << names.str() << "}}";
      json->scalar<tensorflow::tstring>()() = out.str();
      if (reset) counts.by_name.clear();
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TraceRead").Device(tensorflow::DEVICE_CPU), TraceReadOp);

}  // namespace
}  // namespace sok
