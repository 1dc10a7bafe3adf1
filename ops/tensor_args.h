// Argument checks and views of tensors. All throw InvalidArgument naming the argument; all are cheap.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "sok/error.h"
#include "sok/scratch.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace sok {

inline void CheckRank(const tensorflow::Tensor& t, int rank, const char* name) {
  if (t.dims() == rank) return;
  throw InvalidArgument(std::string("`") + name + "` must have rank " + std::to_string(rank) + ". Received: shape " +
                        t.shape().DebugString() + ".");
}

inline void CheckShape(const tensorflow::Tensor& t, const tensorflow::TensorShape& shape, const char* name) {
  if (t.shape() == shape) return;
  throw InvalidArgument(std::string("`") + name + "` must have shape " + shape.DebugString() +
                        ". Received: " + t.shape().DebugString() + ".");
}

void CheckShape(const tensorflow::Tensor& t, std::initializer_list<int64_t> sizes, const char* name);

// Keys of any of the four dtypes as 64-bit words: signed ones sign-extended, unsigned ones zero-extended.
// 64-bit keys are viewed in place.
const uint64_t* KeyWords(const tensorflow::Tensor& keys, Scratch* scratch);

// The reverse, for keys that leave the library.
void StoreKeys(const uint64_t* words, int64_t n, tensorflow::Tensor* keys);

inline bool IsUnsigned(tensorflow::DataType t) { return t == tensorflow::DT_UINT32 || t == tensorflow::DT_UINT64; }

// row_splits [S + 1] over n values: starts at 0, never falls, ends at n. Gives S.
int64_t CheckRowSplits(const tensorflow::Tensor& row_splits, int64_t n);

// What `body` gives. If it throws InvalidArgument, `label()` and a colon come before the text: whose argument it was.
template <class Label, class Body>
auto Labelled(Label label, Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const InvalidArgument& e) {
    throw InvalidArgument(label() + ": " + e.what());
  }
}

// Weights [n], or null for the empty tensor that means none.
const float* WeightsOrNull(const tensorflow::Tensor& weights, int64_t n);

inline const int64_t* Int64(const tensorflow::Tensor& t) {
  return reinterpret_cast<const int64_t*>(t.flat<int64_t>().data());
}

// int32 or int64 numbers as int64; the latter in place.
const int64_t* AsInt64(const tensorflow::Tensor& t, Scratch* scratch);

// A shape of sizes that came in tensors or attributes: TensorShape's constructors end the process where a size makes no
// sense. Bytes of such a shape fit 64 bits, whatever the dtype.
tensorflow::TensorShape CheckedShape(std::initializer_list<int64_t> sizes);

template <class T>
T ScalarArg(const tensorflow::Tensor& t, const char* name) {
  CheckRank(t, 0, name);
  return t.scalar<T>()();
}

}  // namespace sok
