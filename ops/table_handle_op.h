// Making tables: what the attributes say, and where handles come from. Where the rows lie is up to the device's kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "handle_op.h"
#include "sok/initializer.h"
#include "table_resource.h"

namespace sok {

// Reads the attributes that say what a fresh row holds.
inline Initializer InitializerAttrs(OpKernelConstruction* ctx) {
  Initializer init;
  std::string kind;
  int64_t seed;
  Check(ctx->GetAttr("initializer", &kind));
  Check(ctx->GetAttr("init_a", &init.a));
  Check(ctx->GetAttr("init_b", &init.b));
  Check(ctx->GetAttr("seed", &seed));
  Check(ctx->GetAttr("first_column", &init.first_column));
  init.kind = ParseInitKind(kind);
  init.seed = static_cast<uint64_t>(seed);
  if (init.kind == InitKind::kOwn) {
    init.function = OwnInitializer(kind);
    init.a = 0.0f;  // it is given uniforms in [0, 1)
    init.b = 1.0f;
  }
  return init;
}

// Reads the attributes that say when a key gets a row, and when it leaves.
inline Policies PoliciesAttrs(OpKernelConstruction* ctx) {
  Policies policies;
  int64_t admit_below, seed;
  Check(ctx->GetAttr("admit_after", &policies.after));
  Check(ctx->GetAttr("admit_cells", &policies.bloom_cells));
  Check(ctx->GetAttr("admit_hashes", &policies.bloom_hashes));
  Check(ctx->GetAttr("admit_below", &admit_below));
  Check(ctx->GetAttr("seed", &seed));
  Check(ctx->GetAttr("evict_older_than", &policies.older_than));
  Check(ctx->GetAttr("evict_norm_below", &policies.norm_below));
  Check(ctx->GetAttr("evict_max_rows", &policies.max_rows));
  Check(ctx->GetAttr("evict_keeps_frequent", &policies.keeps_frequent));
  Check(ctx->GetAttr("evict_half_life", &policies.half_life));
  Check(ctx->GetAttr("evict_every", &policies.every));
  Check(ctx->GetAttr("admit_shared_rows", &policies.shared_rows));
  Check(ctx->GetAttr("admit_reads_constant", &policies.reads_constant));
  Check(ctx->GetAttr("admit_constant", &policies.constant));
  Check(ctx->GetAttr("evict_when_full", &policies.when_full));
  std::vector<int64_t> kept;
  Check(ctx->GetAttr("evict_protect", &kept));
  policies.kept.assign(kept.begin(), kept.end());
  std::sort(policies.kept.begin(), policies.kept.end());
  policies.admit_below = static_cast<uint64_t>(admit_below);
  if (admit_below != 0) policies.chance_seed = static_cast<uint64_t>(seed);
  return policies;
}

class TableHandleOp : public HandleOp<TableResource> {
 public:
  explicit TableHandleOp(OpKernelConstruction* ctx) : HandleOp(ctx) {
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
    Check(ctx->GetAttr("always_on_host", &is_always_on_host_));
    config_.policies = PoliciesAttrs(ctx);
    Check(ctx->GetAttr("storage_memory_bytes", &config_.storage.memory_bytes));
    Check(ctx->GetAttr("storage_path", &config_.storage.path));
    Check(ctx->GetAttr("storage_device_bytes", &config_.storage.device_bytes));
    config_.is_unsigned = IsUnsigned(key_dtype_);
    config_.initializer = InitializerAttrs(ctx);
    Check(ctx->GetAttr("bank", &config_.initializer.bank));
    config_.initializer.bank_rows = static_cast<int64_t>(config_.initializer.bank.size()) / config_.dim;
  }

 protected:
  const TableConfig& config() const { return config_; }
  tensorflow::DataType key_dtype() const { return key_dtype_; }
  int64_t memory_bytes() const { return memory_bytes_; }
  // Whatever device the handle is of: what a table of a device counts of keys without rows lies on its host.
  bool is_always_on_host() const { return is_always_on_host_; }

 private:
  tensorflow::DataType key_dtype_ = tensorflow::DT_INT64;
  TableConfig config_;
  int64_t memory_bytes_ = 0;
  bool is_always_on_host_ = false;
};

}  // namespace sok
