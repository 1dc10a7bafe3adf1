// Making tables, and everything that looks at one from outside: size, export, slots, assign, erase.
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "op.h"
#include "shapes.h"
#include "table_handle_op.h"
#include "table_resource.h"

namespace sok {

RefCountPtr<TableResource> TableArg(OpKernelContext* ctx, int index) {
  RefCountPtr<TableResource> resource;
  Check(tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, index), &resource));
  resource->CheckIsHere();
  return resource;
}

namespace {

REGISTER_OP("Sok>TableHandle")
    .Output("handle: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Attr("anonymous: bool = false")
    .Attr("table: string")
    .Attr("key_dtype: " SOK_KEY_TYPES)
    .Attr("dtype: {float} = DT_FLOAT")
    .Attr("dim: int >= 1")
    .Attr("capacity: int >= 1")
    .Attr("hashed: bool")
    .Attr("world_size: int >= 1")
    .Attr("rank: int >= 0")
    .Attr("owner: int = -1")
    .Attr("num_keys: int >= 0 = 0")
    .Attr("seed: int")
    .Attr("initializer: string")
    .Attr("init_a: float")
    .Attr("init_b: float")
    .Attr("bank: list(float) = []")
    .Attr("first_column: int >= 0 = 0")
    .Attr("memory_bytes: int >= 0 = 0")
    .Attr("admit_after: int >= 0 = 0")
    .Attr("admit_cells: int >= 0 = 0")
    .Attr("admit_hashes: int >= 0 = 0")
    .Attr("admit_below: int = 0")
    .Attr("evict_older_than: int >= 0 = 0")
    .Attr("evict_norm_below: float = 0.0")
    .Attr("evict_max_rows: int >= 0 = 0")
    .Attr("evict_keeps_frequent: bool = false")
    .Attr("evict_half_life: int >= 0 = 0")
    .Attr("admit_shared_rows: int >= 0 = 0")
    .Attr("admit_reads_constant: bool = false")
    .Attr("admit_constant: float = 0.0")
    .Attr("evict_when_full: bool = false")
    .Attr("evict_protect: list(int) = []")
    .Attr("evict_every: int >= 1 = 1")
    .Attr("storage_memory_bytes: int >= 0 = 0")
    .Attr("storage_path: string = ''")
    .Attr("storage_device_bytes: int >= 0 = 0")
    .Attr("always_on_host: bool = false")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

class HostTableHandleOp final : public TableHandleOp {
 public:
  using TableHandleOp::TableHandleOp;

 private:
  TableResource* Make(OpKernelContext*) const override { return new TableResource(config(), key_dtype()); }
};
SOK_CPU_KERNEL("Sok>TableHandle", HostTableHandleOp);

REGISTER_OP("Sok>TableSize").Input("handle: resource").Output("size: int64").SetIsStateful().SetShapeFn(ScalarShape);

void TableSize(OpKernelContext* ctx) { ScalarOutput<int64_t>(ctx, 0) = TableArg(ctx, 0)->store().size(); }
SOK_HOST_KERNEL("Sok>TableSize", FunctionOp<TableSize>, "handle", "size");

REGISTER_OP("Sok>TableKeys")
    .Input("handle: resource")
    .Output("keys: key_dtype")
    .Attr("key_dtype: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn(VectorShape);

void TableKeys(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  resource->CheckKeyType(Tensor(ctx->expected_output_dtype(0), TensorShape({0})));
  const std::vector<uint64_t> words = resource->store().Keys();
  const auto n = static_cast<int64_t>(words.size());
  Tensor* keys = Output(ctx, 0, CheckedShape({n}));
  StoreKeys(words.data(), n, keys);
}
SOK_HOST_KERNEL("Sok>TableKeys", FunctionOp<TableKeys>, "handle", "keys");

REGISTER_OP("Sok>TableExport")
    .Input("handle: resource")
    .Output("keys: key_dtype")
    .Output("rows: float")
    .Attr("key_dtype: " SOK_KEY_TYPES)
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int64_t dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Matrix(n, dim));
      return absl::OkStatus();
    });

// Output 0: the keys of a table, in the order of rows. Others: where `outputs(n, slot floats)` puts rows or slots.
template <class F>
void ExportTable(OpKernelContext* ctx, TableStore& table, const std::string& slot_set, const F& outputs) {
  const TfExecutor executor(ctx);
  const ScratchLease scratch;
  Tensor* keys = nullptr;
  uint64_t* words = nullptr;
  table.Export({executor}, slot_set, [&](int64_t n, int64_t floats) {
    keys = Output(ctx, 0, CheckedShape({n}));
    TableStore::ExportTarget target = outputs(n, floats);
    target.keys = words = scratch.get()->Get<uint64_t>(n);
    return target;
  });
  StoreKeys(words, keys->NumElements(), keys);
}

class TableExportOp : public GuardedOp {
 public:
  explicit TableExportOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("dim", &dim_)); }
  void Run(OpKernelContext* ctx) override {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    resource->CheckKeyType(Tensor(ctx->expected_output_dtype(0), TensorShape({0})));
    resource->CheckDim(dim_);
    ExportTable(ctx, resource->store(), "", [&](int64_t n, int64_t) {
      Tensor* rows = Output(ctx, 1, CheckedShape({n, dim_}));
      return TableStore::ExportTarget{nullptr, rows->flat<float>().data(), nullptr, nullptr};
    });
  }

 private:
  int64_t dim_;
};
SOK_HOST_KERNEL("Sok>TableExport", TableExportOp, "handle", "keys", "rows");

REGISTER_OP("Sok>TableSlots")
    .Input("handle: resource")
    .Output("keys: key_dtype")
    .Output("slots: float")
    .Output("stamps: int64")
    .Attr("key_dtype: " SOK_KEY_TYPES)
    .Attr("slot_set: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      const DimensionHandle n = c->UnknownDim();
      c->set_output(0, c->Vector(n));
      c->set_output(1, c->Matrix(n, c->UnknownDim()));
      c->set_output(2, c->Vector(n));
      return absl::OkStatus();
    });

class TableSlotsOp : public GuardedOp {
 public:
  explicit TableSlotsOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("slot_set", &slot_set_)); }
  void Run(OpKernelContext* ctx) override {
    const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
    resource->CheckKeyType(Tensor(ctx->expected_output_dtype(0), TensorShape({0})));
    if (slot_set_.empty()) throw InvalidArgument("`slot_set` must not be empty.");
    ExportTable(ctx, resource->store(), slot_set_, [&](int64_t n, int64_t floats) {
      Tensor *slots = Output(ctx, 1, CheckedShape({n, floats})), *stamps = Output(ctx, 2, CheckedShape({n}));
      return TableStore::ExportTarget{nullptr, nullptr, slots->flat<float>().data(),
                                      reinterpret_cast<int64_t*>(stamps->flat<int64_t>().data())};
    });
  }

 private:
  std::string slot_set_;
};
SOK_HOST_KERNEL("Sok>TableSlots", TableSlotsOp, "handle", "keys", "slots", "stamps");

REGISTER_OP("Sok>TableAssign")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("rows: float")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      return c->WithRank(c->input(2), 2, &unused);
    });

void TableAssign(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  TableStore& table = resource->store();
  resource->CheckKeyType(ctx->input(1));
  CheckRank(ctx->input(1), 1, "keys");
  const int64_t n = ctx->input(1).NumElements();
  CheckShape(ctx->input(2), {n, table.dim()}, "rows");
  const TfExecutor executor(ctx);
  const ScratchLease scratch;
  table.Assign({executor}, scratch.get(), KeyWords(ctx->input(1), scratch.get()), ctx->input(2).flat<float>().data(),
               n);
}
SOK_HOST_KERNEL("Sok>TableAssign", FunctionOp<TableAssign>, "handle", "keys", "rows");

// What cannot be done is told, not raised: in a graph nothing else could tell it to peers that wait in the next collective.
template <void (*kRun)(OpKernelContext*)>
void Tell(OpKernelContext* ctx) {
  auto& text = ScalarOutput<tensorflow::tstring>(ctx, 0);
  try {
    kRun(ctx);
  } catch (const TableFull& full) {
    text = std::string("TableFull: ") + full.what();
  } catch (const OutOfMemory& out) {
    text = std::string("TableFull: ") + out.what();
  } catch (const std::bad_alloc&) {
    text = "TableFull: out of memory";
  } catch (const std::exception& other) {
    text = std::string("RuntimeError: ") + other.what();
  }
}

REGISTER_OP("Sok>TableTryAssign")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Input("rows: float")
    .Output("error: string")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn(ScalarShape);
SOK_HOST_KERNEL("Sok>TableTryAssign", FunctionOp<Tell<TableAssign>>, "handle", "keys", "rows", "error");

REGISTER_OP("Sok>TableErase")
    .Input("handle: resource")
    .Input("keys: Tkey")
    .Output("erased: int64")
    .Attr("Tkey: " SOK_KEY_TYPES)
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      c->set_output(0, c->Scalar());
      return c->WithRank(c->input(1), 1, &unused);
    });

void TableErase(OpKernelContext* ctx) {
  const RefCountPtr<TableResource> resource = TableArg(ctx, 0);
  resource->CheckKeyType(ctx->input(1));
  CheckRank(ctx->input(1), 1, "keys");
  const ScratchLease scratch;
  int64_t& erased = ScalarOutput<int64_t>(ctx, 0);  // memory first: afterwards nothing can fail
  erased = resource->store().Erase(KeyWords(ctx->input(1), scratch.get()), ctx->input(1).NumElements());
}
SOK_HOST_KERNEL("Sok>TableErase", FunctionOp<TableErase>, "handle", "keys", "erased");

REGISTER_OP("Sok>TableReserve")
    .Input("handle: resource")
    .Input("num_rows: int64")
    .Attr("keys_only: bool = false")
    .SetIsStateful()
    .SetShapeFn(TakesScalar);

class TableReserveOp : public GuardedOp {
 public:
  explicit TableReserveOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("keys_only", &keys_only_)); }
  void Run(OpKernelContext* ctx) override {
    const TfExecutor executor(ctx);
    TableArg(ctx, 0)->store().Reserve({executor}, ScalarArg<int64_t>(ctx->input(1), "num_rows"), !keys_only_);
  }

 private:
  bool keys_only_ = false;
};
SOK_HOST_KERNEL("Sok>TableReserve", TableReserveOp, "handle", "num_rows");

REGISTER_OP("Sok>TableTryReserve")
    .Input("handle: resource")
    .Input("num_rows: int64")
    .Output("error: string")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

void ReserveRows(OpKernelContext* ctx) {
  const TfExecutor executor(ctx);
  TableArg(ctx, 0)->store().Reserve({executor}, ScalarArg<int64_t>(ctx->input(1), "num_rows"));
}
SOK_HOST_KERNEL("Sok>TableTryReserve", FunctionOp<Tell<ReserveRows>>, "handle", "num_rows", "error");

}  // namespace
}  // namespace sok
