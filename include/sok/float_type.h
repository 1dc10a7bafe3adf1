// The floating-point types of vectors and gradients. Rows of tables, and all sums, are float32.
#pragma once

#include <string>

#include "sok/error.h"

namespace sok {

enum class FloatType { kFloat32, kFloat16, kBFloat16 };

// Throws InvalidArgument for anything but "float32", "float16", "bfloat16".
inline FloatType ParseFloatType(const std::string& name) {
  if (name == "float32") return FloatType::kFloat32;
  if (name == "float16") return FloatType::kFloat16;
  if (name == "bfloat16") return FloatType::kBFloat16;
  throw InvalidArgument("type must be 'float32', 'float16' or 'bfloat16'. Received: '" + name + "'.");
}

}  // namespace sok
