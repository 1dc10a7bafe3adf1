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
  ScalarOutput<tstring>(ctx, 0) = ShardSummaryJson(summary);
}

REGISTER_OP("Sok>TableSave")
    .Input("handle: resource")
    .Input("path: string")
    .Input("generation: string")
    .Output("summary: string")
    .Attr("changes: bool = false")
    .Attr("snapshot: bool = false")
    .Attr("version: bool = false")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

class TableSaveOp : public GuardedOp {
 public:
  explicit TableSaveOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("changes", &changes_));
    Check(ctx->GetAttr("snapshot", &snapshot_));
    Check(ctx->GetAttr("version", &version_));
  }
  void Run(OpKernelContext* ctx) override {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    const std::string path = TextArg(ctx, 1, "path"), generation = TextArg(ctx, 2, "generation");
    const int key_bytes = KeyBytes(*resource);
    if (version_)
      return StoreSummary(ctx, SaveShardVersion(&resource->host_table(), key_bytes, generation, path, snapshot_));
    if (snapshot_) {  // beside training: it gets the other processors
      const SerialExecutor executor;
      return StoreSummary(ctx,
                          SaveShardSnapshot({executor}, &resource->store(), key_bytes, generation, path, changes_));
    }
    const TfExecutor executor(ctx);
    const auto save = changes_ ? SaveShardChanges : SaveShard;
    StoreSummary(ctx, save({executor}, resource->store(), key_bytes, generation, path));
  }

 private:
  bool changes_ = false;
  bool snapshot_ = false;
  bool version_ = false;
};
SOK_HOST_KERNEL("Sok>TableSave", TableSaveOp, "handle", "path", "generation", "summary");

REGISTER_OP("Sok>TableSaveBegin")
    .Input("handle: resource")
    .Attr("snapshot: {'', 'all', 'changes', 'version'} = ''")
    .SetIsStateful()
    .SetShapeFn(NoOutputs);

class TableSaveBeginOp : public GuardedOp {
 public:
  explicit TableSaveBeginOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    std::string of;
    Check(ctx->GetAttr("snapshot", &of));
    using Of = TableStore::SnapshotOf;
    of_ = of == "all" ? Of::kAllRows : of == "changes" ? Of::kChanges : of == "version" ? Of::kVersion : Of::kNothing;
  }
  void Run(OpKernelContext* ctx) override {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    if (of_ == TableStore::SnapshotOf::kVersion) static_cast<void>(resource->host_table());  // or it cannot
    resource->store().BeginSave(of_);
  }

 private:
  TableStore::SnapshotOf of_ = TableStore::SnapshotOf::kNothing;
};
SOK_HOST_KERNEL("Sok>TableSaveBegin", TableSaveBeginOp, "handle");

REGISTER_OP("Sok>TableKeepVersions").Input("handle: resource").SetIsStateful().SetShapeFn(NoOutputs);

void TableKeepVersions(OpKernelContext* ctx) { TableArg(ctx, 0)->host_table().KeepVersions(); }
SOK_HOST_KERNEL("Sok>TableKeepVersions", FunctionOp<TableKeepVersions>, "handle");

REGISTER_OP("Sok>TableSaveEnd").Input("handle: resource").Input("base: string").SetIsStateful().SetShapeFn(NoOutputs);

void TableSaveEnd(OpKernelContext* ctx) { TableArg(ctx, 0)->store().EndSave(TextArg(ctx, 1, "base")); }
SOK_HOST_KERNEL("Sok>TableSaveEnd", FunctionOp<TableSaveEnd>, "handle", "base");

REGISTER_OP("Sok>TableChanges")
    .Input("handle: resource")
    .Output("summary: string")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

void TableChanges(OpKernelContext* ctx) {
  ScalarOutput<tstring>(ctx, 0) = ChangesJson(TableArg(ctx, 0)->store().Changes());
}
SOK_HOST_KERNEL("Sok>TableChanges", FunctionOp<TableChanges>, "handle", "summary");

REGISTER_OP("Sok>TableLoad")
    .Input("handle: resource")
    .Input("path: string")
    .Input("saved_sets: string")
    .Input("table_sets: string")
    .Input("columns: int64")
    .Output("summary: string")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

void TableLoad(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  CheckRank(ctx->input(2), 1, "saved_sets");
  CheckShape(ctx->input(3), ctx->input(2).shape(), "table_sets");
  std::vector<std::pair<std::string, std::string>> names;
  for (int64_t i = 0; i < ctx->input(2).NumElements(); ++i) {
    names.emplace_back(ctx->input(2).vec<tstring>()(i), ctx->input(3).vec<tstring>()(i));
  }
  TableStore::Columns columns;
  if (ctx->input(4).NumElements() != 0) {
    CheckShape(ctx->input(4), TensorShape({4}), "columns");
    const auto given = ctx->input(4).vec<int64_t>();
    columns = {given(0), given(1), given(2), given(3)};
    if (columns.dim < 1) throw InvalidArgument("`columns` must be empty, or begin with the dim of what is saved.");
  }
  const TfExecutor executor(ctx);
  StoreSummary(ctx,
               LoadShard({executor}, TextArg(ctx, 1, "path"), KeyBytes(*resource), names, &resource->store(), columns));
}
SOK_HOST_KERNEL("Sok>TableLoad", FunctionOp<TableLoad>, "handle", "path", "saved_sets", "table_sets", "columns",
                "summary");

REGISTER_OP("Sok>ShardsCompact")
    .Input("paths: string")
    .Input("links: int64")
    .Input("generation: string")
    .Input("path: string")
    .Output("summary: string")
    .Attr("world_size: int")
    .Attr("rank: int")
    .Attr("owner: int")
    .Attr("hashed: bool")
    .Attr("passes: int")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

class ShardsCompactOp : public GuardedOp {
 public:
  explicit ShardsCompactOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("world_size", &head_.world_size));
    Check(ctx->GetAttr("rank", &head_.rank));
    Check(ctx->GetAttr("owner", &head_.owner));
    Check(ctx->GetAttr("hashed", &head_.hashed));
    Check(ctx->GetAttr("passes", &passes_));
    if (passes_ < 1 || passes_ > 65536) throw InvalidArgument("`passes` must lie in [1, 65536].");
  }
  void Run(OpKernelContext* ctx) override {
    CheckRank(ctx->input(0), 1, "paths");
    CheckShape(ctx->input(1), ctx->input(0).shape(), "links");
    std::vector<std::vector<std::string>> links;
    for (int64_t i = 0; i < ctx->input(0).NumElements(); ++i) {
      const int64_t number = ctx->input(1).vec<int64_t>()(i);
      if (number < 0 || number >= ctx->input(0).NumElements()) {
        throw InvalidArgument("`links` must lie in [0, number of paths). Received: " + std::to_string(number) + ".");
      }
      const size_t link = static_cast<size_t>(number);
      if (link >= links.size()) links.resize(link + 1);
      links[link].push_back(ctx->input(0).vec<tstring>()(i));
    }
    ShardHead head = head_;
    head.generation = TextArg(ctx, 2, "generation");
    const TfExecutor executor(ctx);
    StoreSummary(ctx, CompactShards({executor}, links, head, passes_, TextArg(ctx, 3, "path")));
  }

 private:
  ShardHead head_;
  int64_t passes_ = 1;
};
SOK_HOST_KERNEL("Sok>ShardsCompact", ShardsCompactOp, "paths", "links", "generation", "path", "summary");

REGISTER_OP("Sok>ShardVerify").Input("path: string").Output("summary: string").SetIsStateful().SetShapeFn(ScalarShape);

void ShardVerify(OpKernelContext* ctx) { StoreSummary(ctx, VerifyShard(TextArg(ctx, 0, "path"))); }
SOK_HOST_KERNEL("Sok>ShardVerify", FunctionOp<ShardVerify>, "path", "summary");

}  // namespace
}  // namespace sok
