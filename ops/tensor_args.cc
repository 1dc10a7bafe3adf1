#include "tensor_args.h"

#include "sok/check_ids.h"

namespace sok {

using tensorflow::Tensor;

namespace {

template <class From, class To>
const To* Widen(const Tensor& t, Scratch* scratch) {
  const int64_t n = t.NumElements();
  To* out = scratch->Get<To>(n);
  const From* in = t.flat<From>().data();
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<To>(in[i]);
  return out;
}

template <class To>
void Narrow(const uint64_t* words, int64_t n, Tensor* t) {
  To* out = t->flat<To>().data();
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<To>(words[i]);
}

}  // namespace

const uint64_t* KeyWords(const Tensor& keys, Scratch* scratch) {
  switch (keys.dtype()) {
    case tensorflow::DT_INT64:
      return reinterpret_cast<const uint64_t*>(keys.flat<int64_t>().data());
    case tensorflow::DT_UINT64:
      return reinterpret_cast<const uint64_t*>(keys.flat<uint64_t>().data());
    case tensorflow::DT_INT32:
      return Widen<int32_t, uint64_t>(keys, scratch);
    case tensorflow::DT_UINT32:
      return Widen<uint32_t, uint64_t>(keys, scratch);
    default:
      throw InvalidArgument(
          "keys must be int64, int32, uint32 or uint64. Received: " + tensorflow::DataTypeString(keys.dtype()) + ".");
  }
}

void StoreKeys(const uint64_t* words, int64_t n, Tensor* keys) {
  switch (keys->dtype()) {
    case tensorflow::DT_INT64:
      return Narrow<int64_t>(words, n, keys);
    case tensorflow::DT_UINT64:
      return Narrow<uint64_t>(words, n, keys);
    case tensorflow::DT_INT32:
      return Narrow<int32_t>(words, n, keys);
    default:
      return Narrow<uint32_t>(words, n, keys);
  }
}

int64_t CheckRowSplits(const Tensor& row_splits, int64_t n) {
  CheckRank(row_splits, 1, "row_splits");
  const int64_t size = row_splits.NumElements();
  const int64_t* splits = Int64(row_splits);
  if (size < 1 || splits[0] != 0) throw InvalidArgument("`row_splits` must start with 0.");
  if (const int64_t i = FirstFall(splits, size); i < size) {
    throw InvalidArgument("`row_splits` must not fall. Received: " + std::to_string(splits[i - 1]) + " then " +
                          std::to_string(splits[i]) + " at " + std::to_string(i) + ".");
  }
  if (splits[size - 1] != n) {
    throw InvalidArgument("`row_splits` must end with the number of keys, " + std::to_string(n) +
                          ". Received: " + std::to_string(splits[size - 1]) + ".");
  }
  return size - 1;
}

const float* WeightsOrNull(const Tensor& weights, int64_t n) {
  CheckRank(weights, 1, "weights");
  if (weights.NumElements() == 0) return nullptr;
  if (weights.NumElements() != n) {
    throw InvalidArgument("`weights` must have one value per key (" + std::to_string(n) +
                          ") or none. Received: " + std::to_string(weights.NumElements()) + ".");
  }
  return weights.flat<float>().data();
}

tensorflow::TensorShape CheckedShape(std::initializer_list<int64_t> sizes) {
  constexpr int64_t kMaxElements = int64_t{1} << 48;
  tensorflow::TensorShape shape;
  const absl::Status status = tensorflow::TensorShape::BuildTensorShape(sizes, &shape);
  if (!status.ok()) throw InvalidArgument(std::string(status.message()));
  if (shape.num_elements() > kMaxElements) {
    throw InvalidArgument("no memory holds a tensor of shape " + shape.DebugString() + ".");
  }
  return shape;
}

void CheckShape(const Tensor& t, std::initializer_list<int64_t> sizes, const char* name) {
  std::string wanted;
  bool same = t.dims() == static_cast<int>(sizes.size());
  int at = 0;
  for (const int64_t size : sizes) {
    same = same && t.dim_size(at) == size;
    wanted += (at++ > 0 ? "," : "") + std::to_string(size);
  }
  if (same) return;
  throw InvalidArgument(std::string("`") + name + "` must have shape [" + wanted +
                        "]. Received: " + t.shape().DebugString() + ".");
}

const int64_t* AsInt64(const Tensor& t, Scratch* scratch) {
  return t.dtype() == tensorflow::DT_INT64 ? Int64(t) : Widen<int32_t, int64_t>(t, scratch);
}

}  // namespace sok
