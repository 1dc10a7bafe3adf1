// The table as a TensorFlow resource.
#pragma once

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

class TableResource : public tensorflow::ResourceBase {
 public:
  TableResource(TableConfig config, tensorflow::DataType key_dtype)
      : table_(std::move(config)), key_dtype_(key_dtype) {}

  std::string DebugString() const override { return table_.Label(); }
  int64_t MemoryUsed() const override { return table_.memory_bytes(); }

  EmbeddingTable& table() { return table_; }
  tensorflow::DataType key_dtype() const { return key_dtype_; }

  void CheckKeyType(const tensorflow::Tensor& keys) const {
    if (keys.dtype() == key_dtype_) return;
    throw InvalidArgument(table_.Label() + ": keys must be " + tensorflow::DataTypeString(key_dtype_) +
                          ". Received: " + tensorflow::DataTypeString(keys.dtype()) + ".");
  }

  // How messages name the table alone, without the shard: for text that every rank shows.
  std::string Name() const { return "table '" + table_.config().name + "': "; }

  void CheckDim(int64_t dim) const {
    if (dim == table_.dim()) return;
    throw InvalidArgument(table_.Label() + ": rows have dim " + std::to_string(table_.dim()) +
                          ". Received: " + std::to_string(dim) + ".");
  }

 private:
  EmbeddingTable table_;
  const tensorflow::DataType key_dtype_;
};

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
