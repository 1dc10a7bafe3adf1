// Tables to files and back.
#include <string>
#include <utility>
#include <vector>

#include "op.h"
#include "sok/shard_file.h"
#include "table_resource.h"

namespace sok {
namespace {

using tensorflow::tstring;

std::string TextArg(OpKernelContext* ctx, int index, const char* name) {
  return ScalarArg<tstring>(ctx->input(index), name);
}

int KeyBytes(const TableResource& resource) { return tensorflow::DataTypeSize(resource.key_dtype()); }

void StoreSummary(OpKernelContext* ctx, const ShardSummary& summary) {
  Tensor* out;
  Check(ctx->allocate_output(0, TensorShape({}), &out));
  out->scalar<tstring>()() = ShardSummaryJson(summary);
}

absl::Status ScalarOut(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("Sok>TableSave")
    .Input("handle: resource")
    .Input("path: string")
    .Input("generation: string")
    .Output("summary: string")
    .SetIsStateful()
    .SetShapeFn(ScalarOut);

class TableSaveOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      const TfExecutor executor(ctx);
      StoreSummary(ctx, SaveShard({executor}, resource->table(), KeyBytes(*resource), TextArg(ctx, 2, "generation"),
                                  TextArg(ctx, 1, "path")));
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableSave").Device(tensorflow::DEVICE_CPU), TableSaveOp);

REGISTER_OP("Sok>TableLoad")
    .Input("handle: resource")
    .Input("path: string")
    .Input("saved_sets: string")
    .Input("table_sets: string")
    .Output("summary: string")
    .SetIsStateful()
    .SetShapeFn(ScalarOut);

class TableLoadOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
      CheckRank(ctx->input(2), 1, "saved_sets");
      CheckShape(ctx->input(3), ctx->input(2).shape(), "table_sets");
      std::vector<std::pair<std::string, std::string>> names;
      for (int64_t i = 0; i < ctx->input(2).NumElements(); ++i) {
        names.emplace_back(ctx->input(2).vec<tstring>()(i), ctx->input(3).vec<tstring>()(i));
      }
      const TfExecutor executor(ctx);
      StoreSummary(ctx, LoadShard({executor}, TextArg(ctx, 1, "path"), KeyBytes(*resource), names, &resource->table()));
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>TableLoad").Device(tensorflow::DEVICE_CPU), TableLoadOp);

REGISTER_OP("Sok>ShardVerify").Input("path: string").Output("summary: string").SetIsStateful().SetShapeFn(ScalarOut);

class ShardVerifyOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] { StoreSummary(ctx, VerifyShard(TextArg(ctx, 0, "path"))); });
  }
};
REGISTER_KERNEL_BUILDER(Name("Sok>ShardVerify").Device(tensorflow::DEVICE_CPU), ShardVerifyOp);

}  // namespace
}  // namespace sok
