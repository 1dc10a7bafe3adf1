// Shape functions of several ops.
#pragma once

#include <cstdint>
#include <vector>

#include "op.h"

namespace sok {

// Output 0 is as an input.
template <int kInput>
absl::Status ShapeOfInput(InferenceContext* c) {
  c->set_output(0, c->input(kInput));
  return absl::OkStatus();
}

// Output 0 is a vector.
inline absl::Status VectorShape(InferenceContext* c) {
  c->set_output(0, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

// Output 0 is a vector of messages, and output 1 has their sizes, of which there are as many as of those of input 1.
inline absl::Status MessagesShape(InferenceContext* c) {
  c->set_output(1, c->input(1));
  return VectorShape(c);
}

// Outputs are the row ids of each table, as many as there are distinct ones, and behind those of all tables what belongs to
// each: rows of dims[t].
inline absl::Status DistinctRowsShape(InferenceContext* c, const std::vector<int64_t>& dims) {
  const int m = static_cast<int>(dims.size());
  for (int t = 0; t < m; ++t) {
    const DimensionHandle rows = c->UnknownDim();
    c->set_output(t, c->Vector(rows));
    c->set_output(m + t, c->Matrix(rows, dims[static_cast<size_t>(t)]));
  }
  return absl::OkStatus();
}

// Input 1 is a scalar. There are no outputs.
inline absl::Status TakesScalar(InferenceContext* c) {
  ShapeHandle unused;
  return c->WithRank(c->input(1), 0, &unused);
}

}  // namespace sok
