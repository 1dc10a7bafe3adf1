// Messages of 16-bit values: where they begin, on every device (docs/design/exchange.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "exchange_op.h"
#include "sok/exchange_wire.h"

namespace sok {

// What ExchangeNarrow and ExchangeWiden have in common. The sizes of messages are on the host.
class WireOp : public GuardedOp {
 public:
  explicit WireOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    std::string type;
    Check(ctx->GetAttr("type", &type));
    type_ = ParseFloatType(type);
  }

 protected:
  struct Begins {
    std::vector<int64_t> floats{0}, words{0};

    void Add(int64_t num_floats, int64_t num_words) {
      floats.push_back(floats.back() + num_floats);
      words.push_back(words.back() + num_words);
    }
    WireLayout layout() const { return {floats.data(), words.data(), static_cast<int64_t>(floats.size()) - 1}; }
  };

  // Of messages of splits [world] floats. Throws InvalidArgument.
  static Begins OfFloats(const Tensor& floats, const Tensor& splits) {
    CheckRank(floats, 1, "floats");
    CheckRank(splits, 1, "splits");
    Begins begins;
    for (int64_t r = 0; r < splits.NumElements(); ++r) {
      const int64_t size = SizeOf(splits, r);
      begins.Add(size, WireWords(size));
    }
    if (begins.floats.back() != floats.NumElements())
      throw InvalidArgument("`splits` must sum to the number of floats.");
    return begins;
  }

  // Of messages of splits [world] words. An odd number of values looks like one more: expected [world] says which it is. A
  // message of another size than that may be bad news, and is given whole. Throws InvalidArgument.
  static Begins OfWords(const Tensor& words, const Tensor& splits, const Tensor& expected) {
    CheckRank(words, 1, "words");
    CheckRank(splits, 1, "splits");
    CheckShape(expected, splits.shape(), "expected");
    Begins begins;
    for (int64_t r = 0; r < splits.NumElements(); ++r) {
      const int64_t size = SizeOf(splits, r), wanted = expected.flat<int32_t>()(r);
      const bool fits = wanted >= kAnswerHeader && WireWords(wanted) == size;
      begins.Add(fits ? wanted : WireFloats(size), size);
      if (begins.floats.back() - begins.floats[static_cast<size_t>(r)] > kPlaceMask) {
        throw InvalidArgument("a message has 2^31 floats or more.");
      }
    }
    if (begins.words.back() != words.NumElements()) throw InvalidArgument("`splits` must sum to the number of words.");
    return begins;
  }

  // The sizes of messages that begin there, as output 1.
  static void OutputSplits(OpKernelContext* ctx, const std::vector<int64_t>& begins) {
    const int64_t world = static_cast<int64_t>(begins.size()) - 1;
    Tensor* splits = Output(ctx, 1, CheckedShape({world}));
    for (int64_t r = 0; r < world; ++r) {
      const size_t at = static_cast<size_t>(r);
      splits->flat<int32_t>()(r) = static_cast<int32_t>(begins[at + 1] - begins[at]);
    }
  }

  FloatType type_ = FloatType::kFloat16;

 private:
  static int64_t SizeOf(const Tensor& splits, int64_t rank) {
    const int64_t size = splits.flat<int32_t>()(rank);
    if (size < kAnswerHeader) throw InvalidArgument("`splits` must be the sizes of messages, each with its header.");
    return size;
  }
};

}  // namespace sok
