// The table as a TensorFlow resource.
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/profile.h"
#include "tensor_args.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok {

class DeviceTable;

class TableResource : public tensorflow::ResourceBase {
 public:
  // A table in the memory of this process.
  TableResource(TableConfig config, tensorflow::DataType key_dtype) : key_dtype_(key_dtype) {
    auto table = std::make_shared<EmbeddingTable>(std::move(config));
    host_ = table.get();
    store_ = std::move(table);
  }
  // What another table has inside.
  TableResource(std::shared_ptr<EmbeddingTable> table, tensorflow::DataType key_dtype)
      : store_(table), host_(table.get()), key_dtype_(key_dtype) {}
  // A table on a device: `store` has `device` inside.
  TableResource(std::shared_ptr<TableStore> store, DeviceTable* device, tensorflow::DataType key_dtype)
      : store_(std::move(store)), device_(device), key_dtype_(key_dtype) {}

  std::string DebugString() const override { return is_moved_ ? moved_ : store_->Label(); }
  int64_t MemoryUsed() const override { return is_moved_ ? 0 : store_->memory_bytes(); }

  const TableConfig& config() const { return store_->config(); }
  tensorflow::DataType key_dtype() const { return key_dtype_; }

  // Wherever the table is.
  TableStore& store() { return *store_; }

  // Its rows are in another table now, under another handle: this one gives its memory back, and refuses all that is asked of
  // it, as functions do that were traced before.
  void Leave() {
    moved_ = config().Label();
    is_moved_ = true;
    host_ = nullptr;
    store_.reset();
  }
  // Throws FailedPrecondition after Leave.
  void CheckIsHere() const {
    if (!is_moved_) return;
    throw FailedPrecondition(moved_ +
                             " has another placement now. A function that was traced before must be made anew: call " +
                             "tf.function again, or compile the model again.");
  }

  // Ids, with their repeats, that lookups of this process have asked for where they make rows.
  std::atomic<int64_t> ids{0};

  // Rows and sums that went ahead of their step to workers that asked for them, and those sent again in it.
  std::atomic<int64_t> rows_ahead{0}, rows_repaired{0};

  // For kernels of the CPU, and for those of a device. Both throw InvalidArgument where the table is elsewhere.
  EmbeddingTable& table() {
    if (host_ == nullptr) throw InvalidArgument(config().Label() + " is on a GPU, and this op runs on the CPU.");
    return *host_;
  }
  // For kernels that ask what only a table of the host knows, also one whose rows in use lie on a device (TableStore::OnHost).
  EmbeddingTable& host_table() {
    if (EmbeddingTable* table = store_->OnHost(); table != nullptr) return *table;
    throw InvalidArgument(config().Label() + " is on a GPU alone: it has no policies, and no storage.");
  }
  DeviceTable& device_table() {
    if (device_ == nullptr) throw InvalidArgument(config().Label() + " is not on a GPU, where this op runs.");
    return *device_;
  }

  void CheckKeyType(const tensorflow::Tensor& keys) const {
    if (keys.dtype() == key_dtype_) return;
    throw InvalidArgument(config().Label() + ": keys must be " + tensorflow::DataTypeString(key_dtype_) +
                          ". Received: " + tensorflow::DataTypeString(keys.dtype()) + ".");
  }

  // How messages name the table alone, without the shard: for text that every rank shows.
  std::string Name() const { return "table '" + config().name + "': "; }

  void CheckDim(int64_t dim) const {
    if (dim == config().dim) return;
    throw InvalidArgument(config().Label() + ": rows have dim " + std::to_string(config().dim) +
                          ". Received: " + std::to_string(dim) + ".");
  }

 private:
  std::shared_ptr<TableStore> store_;
  EmbeddingTable* host_ = nullptr;
  DeviceTable* device_ = nullptr;
  const tensorflow::DataType key_dtype_;
  std::atomic<bool> is_moved_{false};
  std::string moved_;  // what its label was
};

// Attributes that say how wide rows are, where no table tells. Throws InvalidArgument.
inline void CheckDims(const std::vector<int64_t>& dims) {
  for (const int64_t dim : dims) {
    if (dim >= 1 && dim <= kMaxDim) continue;
    throw InvalidArgument("`dims` must lie in [1, " + std::to_string(kMaxDim) + "]. Received: " + std::to_string(dim) +
                          ".");
  }
}

// What a profile says of an op on several tables.
struct ProfileGroup {
  std::string tables;
  ProfileCounts counts;
};

// Of items with a `table` each: their tables' names and the sums of count(item); nothing while no profile runs.
template <class Item, class Count>
ProfileGroup DescribeGroup(const std::vector<Item>& items, const Count& count) {
  ProfileGroup group;
  if (!ProfileRuns()) return group;
  std::set<const EmbeddingTable*> seen;
  for (const Item& item : items) {
    if (seen.insert(item.table).second) group.tables += (seen.size() > 1 ? "," : "") + item.table->config().name;
    group.counts += count(item);
  }
  return group;
}

// The table behind input `index`. Throws InvalidArgument if there is none.
tensorflow::core::RefCountPtr<TableResource> TableArg(tensorflow::OpKernelContext* ctx, int index);

}  // namespace sok
