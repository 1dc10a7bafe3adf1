// Making tables: what the attributes say, and where handles come from. Where the rows lie is up to the device's kernel.
#pragma once

#include <cstdint>
#include <string>

#include "op.h"
#include "sok/initializer.h"
#include "table_resource.h"

namespace sok {

using tensorflow::ResourceHandle;

// Reads the attributes that say what a fresh row holds.
inline Initializer InitializerAttrs(OpKernelConstruction* ctx) {
  Initializer init;
  std::string kind;
  int64_t seed;
  Check(ctx->GetAttr("initializer", &kind));
  Check(ctx->GetAttr("init_a", &init.a));
  Check(ctx->GetAttr("init_b", &init.b));
  Check(ctx->GetAttr("seed", &seed));
  init.kind = ParseInitKind(kind);
  init.seed = static_cast<uint64_t>(seed);
  return init;
}

class TableHandleOp : public OpKernel {
 public:
  explicit TableHandleOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    Guard(ctx, [&] {
      Check(ctx->GetAttr("container", &container_));
      Check(ctx->GetAttr("shared_name", &shared_name_));
      Check(ctx->GetAttr("anonymous", &anonymous_));
      Check(ctx->GetAttr("key_dtype", &key_dtype_));
      Check(ctx->GetAttr("table", &config_.name));
      Check(ctx->GetAttr("dim", &config_.dim));
      Check(ctx->GetAttr("capacity", &config_.capacity));
      Check(ctx->GetAttr("hashed", &config_.hashed));
      Check(ctx->GetAttr("world_size", &config_.world_size));
      Check(ctx->GetAttr("rank", &config_.rank));
      Check(ctx->GetAttr("owner", &config_.owner));
      Check(ctx->GetAttr("num_keys", &config_.num_keys));
      Check(ctx->GetAttr("memory_bytes", &memory_bytes_));
      config_.is_unsigned = IsUnsigned(key_dtype_);
      config_.initializer = InitializerAttrs(ctx);
      Check(ctx->GetAttr("bank", &config_.initializer.bank));
      config_.initializer.bank_rows = static_cast<int64_t>(config_.initializer.bank.size()) / config_.dim;
      if (shared_name_.empty()) shared_name_ = name();
    });
  }

  void Compute(OpKernelContext* ctx) override {
    Guard(ctx, [&] {
      Tensor* handle;
      Check(ctx->allocate_output(0, TensorShape({}), &handle));
      if (anonymous_) {
        // The handle counts references: the table lives as long as a variable or a traced function holds it.
        handle->scalar<ResourceHandle>()() = ResourceHandle::MakeRefCountingHandle(Make(), ctx->device()->name());
        return;
      }
      const ResourceHandle by_name = tensorflow::MakeResourceHandle<TableResource>(ctx, container_, shared_name_);
      RefCountPtr<TableResource> resource;
      Check(tensorflow::LookupOrCreateResource<TableResource>(ctx, by_name, &resource, [&](TableResource** made) {
        *made = Make();
        return absl::OkStatus();
      }));
      handle->scalar<ResourceHandle>()() = by_name;
    });
  }

 protected:
  const TableConfig& config() const { return config_; }
  tensorflow::DataType key_dtype() const { return key_dtype_; }
  int64_t memory_bytes() const { return memory_bytes_; }

 private:
  virtual TableResource* Make() const = 0;

  std::string container_, shared_name_;
  bool anonymous_ = false;
  tensorflow::DataType key_dtype_ = tensorflow::DT_INT64;
  TableConfig config_;
  int64_t memory_bytes_ = 0;
};

}  // namespace sok
