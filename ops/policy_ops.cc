// What a table knows of its keys and rows: of admission, eviction and storage.
#include "op.h"
#include "shapes.h"
#include "table_resource.h"

namespace sok {
namespace {

REGISTER_OP("Sok>TableHistory")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Output("counts: int64")
    .Output("last: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      c->set_output(0, keys);
      c->set_output(1, keys);
      return absl::OkStatus();
    });

void TableHistory(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  resource->CheckKeyType(ctx->input(1));
  CheckRank(ctx->input(1), 1, "keys");
  const int64_t n = ctx->input(1).NumElements();
  Tensor *counts = Output(ctx, 0, CheckedShape({n})), *last = Output(ctx, 1, CheckedShape({n}));
  const ScratchLease scratch;
  RowHistory* histories = scratch.get()->Get<RowHistory>(n);
  resource->host_table().Histories(KeyWords(ctx->input(1), scratch.get()), n, histories);
  for (int64_t i = 0; i < n; ++i) {
    counts->flat<int64_t>()(i) = histories[i].count;
    last->flat<int64_t>()(i) = histories[i].last;
  }
}
SOK_HOST_KERNEL("Sok>TableHistory", FunctionOp<TableHistory>, "handle", "keys", "counts", "last");

// Rows, candidates, made, refused, evicted; collisions in the index; bytes of memory.
REGISTER_OP("Sok>TableStats")
    .Input("handle: resource")
    .Output("stats: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(7));
      return absl::OkStatus();
    });

void TableStats(OpKernelContext* ctx) {
  const TableStore& table = TableArg(ctx, 0)->store();
  const PolicyCounts counts = table.policy_counts();
  const int64_t all[] = {table.size(),   counts.candidates,  counts.made,         counts.refused,
                         counts.evicted, table.collisions(), table.memory_bytes()};
  Tensor* stats = Output(ctx, 0, CheckedShape({7}));
  std::copy(std::begin(all), std::end(all), stats->flat<int64_t>().data());
}
SOK_HOST_KERNEL("Sok>TableStats", FunctionOp<TableStats>, "handle", "stats");

// Rows in memory, and how many there can be; rows of calls that were there, rows that were read, and those read ahead of a call; bytes
// read and written; bytes of the file and of the memory. Of a device: rows there, and how many there can be; rows of calls that were
// there, and that were brought; its bytes.
REGISTER_OP("Sok>TableStorage")
    .Input("handle: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(14));
      return absl::OkStatus();
    });

void TableStorage(OpKernelContext* ctx) {
  const StorageCounts counts = TableArg(ctx, 0)->store().storage_counts();
  const int64_t all[] = {counts.rows_in_memory, counts.most_rows_in_memory, counts.hits,
                         counts.misses,         counts.read_ahead,          counts.read_bytes,
                         counts.written_bytes,  counts.file_bytes,          counts.memory_bytes,
                         counts.rows_on_device, counts.most_rows_on_device, counts.device_hits,
                         counts.device_misses,  counts.device_bytes};
  Tensor* out = Output(ctx, 0, CheckedShape({std::size(all)}));
  std::copy(std::begin(all), std::end(all), out->flat<int64_t>().data());
}
SOK_HOST_KERNEL("Sok>TableStorage", FunctionOp<TableStorage>, "handle", "counts");

// Keys and rows that have left the shard since the last call, by key. keeps: those that leave from now on are kept for the next.
REGISTER_OP("Sok>TableTakeEvicted")
    .Input("handle: resource")
    .Output("keys: key_dtype")
    .Output("rows: float")
    .Attr("key_dtype: " SOK_KEY_TYPES)
    .Attr("dim: int >= 1")
    .Attr("keeps: bool = true")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Matrix(InferenceContext::kUnknownDim, dim));
      return absl::OkStatus();
    });

class TableTakeEvictedOp : public GuardedOp {
 public:
  explicit TableTakeEvictedOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("dim", &dim_));
    Check(ctx->GetAttr("keeps", &keeps_));
  }
  void Run(OpKernelContext* ctx) override {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    resource->CheckKeyType(Tensor(ctx->expected_output_dtype(0), TensorShape({0})));
    resource->CheckDim(dim_);
    const EmbeddingTable::Evicted evicted = resource->host_table().TakeEvicted(keeps_);
    const int64_t n = static_cast<int64_t>(evicted.keys.size());
    Tensor *keys = Output(ctx, 0, CheckedShape({n})), *rows = Output(ctx, 1, CheckedShape({n, dim_}));
    StoreKeys(evicted.keys.data(), n, keys);
    std::copy(evicted.rows.begin(), evicted.rows.end(), rows->flat<float>().data());
  }

 private:
  int64_t dim_;
  bool keeps_;
};
SOK_HOST_KERNEL("Sok>TableTakeEvicted", TableTakeEvictedOp, "handle", "keys", "rows");

// What is counted of keys that have no row yet, as a table of its own: histories by key, or the cells of a Bloom filter by
// bucket, whose keys are uint64.
REGISTER_OP("Sok>TableCounted")
    .Input("handle: resource")
    .Output("counted: resource")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

void TableCounted(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  const std::shared_ptr<EmbeddingTable>& counted = resource->host_table().counted();
  if (counted == nullptr) {
    throw FailedPrecondition(resource->config().Label() + " counts no keys before they have rows.");
  }
  const bool is_filter = resource->config().policies.bloom_cells > 0;
  ScalarOutput<tensorflow::ResourceHandle>(ctx, 0) = tensorflow::ResourceHandle::MakeRefCountingHandle(
      new TableResource(counted, is_filter ? tensorflow::DT_UINT64 : resource->key_dtype()), ctx->device()->name());
}
SOK_HOST_KERNEL("Sok>TableCounted", FunctionOp<TableCounted>, "handle", "counted");

}  // namespace
}  // namespace sok
