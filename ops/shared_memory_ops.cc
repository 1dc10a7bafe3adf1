// An all-to-all among processes of one host: what is large lies in shared memory, and only small envelopes that say where
// travel through the collective, which also says when.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>

#include "op.h"
#include "output_pool.h"
#include "sok/shared_memory.h"

namespace sok {
namespace {

// Stateful, so that equal ones are not merged. `turns`: of those that wait for each other (trace_ops.cc says why).

// An envelope is seven words, and behind them the data themselves if they are few (filled up to whole words).
enum EnvelopeWord { kCount, kPid, kFd, kId, kOffset, kIsInline, kName, kEnvelopeWords };
constexpr int64_t kInlineBytes = 16 << 10;  // below, opening a region costs more than a socket

SharedPool& ThePool() {
  static SharedPool* pool = new SharedPool;  // leaked: kernels may run while the process ends
  return *pool;
}

SharedReader& TheReader() {
  static SharedReader* reader = new SharedReader;
  return *reader;
}

// Eagerly Horovod matches collectives by their kind alone: ranks that are out of step meet in different ones.
int64_t NumberOf(const std::string& collective) { return static_cast<int64_t>(std::hash<std::string>()(collective)); }

int64_t WordsOf(int64_t bytes) { return (bytes + 7) / 8; }

struct Splits {
  const int32_t* counts;
  int64_t world;
  Splits(const Tensor& splits, int64_t total, const char* name) : world(splits.NumElements()) {
    CheckRank(splits, 1, name);
    counts = splits.flat<int32_t>().data();
    int64_t sum = 0;
    for (int64_t r = 0; r < world; ++r) {
      if (counts[r] < 0) throw InvalidArgument(std::string("`") + name + "` must not be negative.");
      sum += counts[r];
    }
    if (sum != total) {
      throw InvalidArgument(std::string("`") + name + "` must sum to the number of entries, " + std::to_string(total) +
                            ". Received: " + std::to_string(sum) + ".");
    }
  }
};

#define SOK_SHARED_TYPES "{int32, int64, float, double}"

REGISTER_OP("Sok>SharedPost")
    .Input("x: T")
    .Input("splits: int32")
    .Input("turns: num_turns * resource")
    .Output("envelopes: int64")
    .Output("envelope_splits: int32")
    .Attr("T: " SOK_SHARED_TYPES)
    .Attr("num_turns: int >= 0")
    .Attr("collective: string")
    .Attr("rank: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    });

class SharedPostOp : public GuardedOp {
 public:
  explicit SharedPostOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("rank", &rank_));
    Check(ctx->GetAttr("collective", &collective_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    CheckRank(x, 1, "x");
    const Splits splits(ctx->input(1), x.NumElements(), "splits");
    const int64_t width = tensorflow::DataTypeSize(x.dtype());
    const char* data = static_cast<const char*>(x.data());
    auto bytes_for = [&](int64_t r) { return r == rank_ ? 0 : splits.counts[r] * width; };

    int64_t shared_bytes = 0;
    int readers = 0;
    for (int64_t r = 0; r < splits.world; ++r) {
      if (bytes_for(r) <= kInlineBytes) continue;
      shared_bytes += (bytes_for(r) + 63) & ~int64_t{63};
      ++readers;
    }
    SharedPool::Lease lease;
    bool has_memory = readers > 0;
    try {
      if (has_memory) lease = ThePool().Take(collective_, shared_bytes, readers);
    } catch (const OutOfMemory&) {
      has_memory = false;  // the long way then: peers wait
    }
    auto is_inline = [&](int64_t r) { return bytes_for(r) <= kInlineBytes || !has_memory; };

    int64_t num_words = 0;
    for (int64_t r = 0; r < splits.world; ++r) {
      num_words += kEnvelopeWords + (is_inline(r) ? WordsOf(bytes_for(r)) : 0);
    }
    Tensor* envelopes = AllocateOutput(ctx, 0, CheckedShape({num_words}));
    Tensor* envelope_splits = Output(ctx, 1, TensorShape({splits.world}));
    int64_t* word = reinterpret_cast<int64_t*>(envelopes->flat<int64_t>().data());
    int64_t offset = 0;
    for (int64_t r = 0; r < splits.world; ++r) {
      const int64_t bytes = bytes_for(r);
      int64_t* const begin = word;
      word[kCount] = splits.counts[r];
      word[kPid] = lease.region.pid;
      word[kFd] = lease.region.fd;
      word[kId] = lease.region.id;
      word[kOffset] = offset;
      word[kIsInline] = is_inline(r) ? 1 : 0;
      word[kName] = NumberOf(collective_);
      word += kEnvelopeWords;
      if (!is_inline(r)) {
        std::memcpy(lease.data + offset, data, static_cast<size_t>(bytes));
        offset += (bytes + 63) & ~int64_t{63};
      } else if (bytes > 0) {
        word[WordsOf(bytes) - 1] = 0;
        std::memcpy(word, data, static_cast<size_t>(bytes));
        word += WordsOf(bytes);
      }
      envelope_splits->flat<int32_t>()(r) = static_cast<int32_t>(word - begin);
      data += splits.counts[r] * width;
    }
  }

 private:
  int64_t rank_ = 0;
  std::string collective_;
};
SOK_CPU_KERNEL("Sok>SharedPost", SharedPostOp);

REGISTER_OP("Sok>SharedCollect")
    .Input("envelopes: int64")
    .Input("envelope_splits: int32")
    .Input("x: T")
    .Input("splits: int32")
    .Input("turns: num_turns * resource")
    .Output("received: T")
    .Output("received_splits: int32")
    .Attr("T: " SOK_SHARED_TYPES)
    .Attr("num_turns: int >= 0")
    .Attr("collective: string")
    .Attr("rank: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->input(3));
      return absl::OkStatus();
    });

class SharedCollectOp : public GuardedOp {
 public:
  explicit SharedCollectOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("rank", &rank_));
    Check(ctx->GetAttr("collective", &collective_));
  }

  void Run(OpKernelContext* ctx) override {
    const Tensor &envelopes = ctx->input(0), &x = ctx->input(2);
    CheckRank(envelopes, 1, "envelopes");
    CheckRank(x, 1, "x");
    const Splits sizes(ctx->input(1), envelopes.NumElements(), "envelope_splits");
    const Splits splits(ctx->input(3), x.NumElements(), "splits");
    if (sizes.world != splits.world || rank_ >= splits.world) {
      throw InvalidArgument("`envelope_splits` and `splits` must have one value per rank.");
    }
    const int64_t width = tensorflow::DataTypeSize(x.dtype());
    const int64_t* word = Int64(envelopes);
    Tensor* received_splits = Output(ctx, 1, TensorShape({splits.world}));
    int64_t total = 0;
    for (int64_t r = 0; r < splits.world; ++r) {
      const bool is_whole = sizes.counts[r] >= kEnvelopeWords;
      if (is_whole && word[kName] != NumberOf(collective_)) {
        throw FailedPrecondition("what rank " + std::to_string(r) + " sent is not of collective '" + collective_ +
                                 "': it was in another call. All workers must make the same lookups, in the same "
                                 "order.");
      }
      const int64_t count = !is_whole || word[kCount] > INT32_MAX ? -1 : word[kCount];
      const int64_t words = count < 0 || r == rank_ || word[kIsInline] == 0 ? 0 : WordsOf(count * width);
      // What this rank sent to itself lies in `x` alone.
      const bool is_right = r != rank_ || count == splits.counts[r];
      if (count < 0 || !is_right || sizes.counts[r] != kEnvelopeWords + words) {
        throw InvalidArgument("what rank " + std::to_string(r) + " sent for collective '" + collective_ +
                              "' is no envelope.");
      }
      received_splits->flat<int32_t>()(r) = static_cast<int32_t>(count);
      total += count;
      word += sizes.counts[r];
    }
    Tensor* received = AllocateOutput(ctx, 0, CheckedShape({total}));
    char* to = static_cast<char*>(received->data());
    word = Int64(envelopes);
    for (int64_t r = 0; r < splits.world; ++r) {
      const int64_t bytes = word[kCount] * width;
      if (r == rank_) {
        int64_t before = 0;
        for (int64_t p = 0; p < rank_; ++p) before += splits.counts[p];
        std::memcpy(to, static_cast<const char*>(x.data()) + before * width, static_cast<size_t>(bytes));
      } else if (word[kIsInline] != 0) {
        std::memcpy(to, word + kEnvelopeWords, static_cast<size_t>(bytes));
      } else {
        TheReader().Read({word[kPid], word[kFd], word[kId]}, word[kOffset], bytes, to);
      }
      to += bytes;
      word += sizes.counts[r];
    }
  }

 private:
  int64_t rank_ = 0;
  std::string collective_;
};
SOK_CPU_KERNEL("Sok>SharedCollect", SharedCollectOp);

// How ranks find out that they can: each offers a region that holds its own number, and tries to read those of the others.
REGISTER_OP("Sok>SharedOffer")
    .Input("readers: int32")
    .Output("offer: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->MakeShape({5}));
      return absl::OkStatus();
    });

void SharedOffer(OpKernelContext* ctx) {
  const int readers = ScalarArg<int32_t>(ctx->input(0), "readers");
  Tensor* offer = Output(ctx, 0, TensorShape({5}));
  auto out = offer->flat<int64_t>();
  out.setZero();
  // Equal process numbers on two hosts must not meet: the kernel's boot id tells hosts apart.
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const int64_t number = static_cast<int64_t>(std::hash<std::string>()(boot) ^ (static_cast<uint64_t>(getpid()) << 32));
  try {
    const SharedPool::Lease lease = ThePool().Take("offer", sizeof(number), readers);
    std::memcpy(lease.data, &number, sizeof(number));
    out(0) = lease.region.pid;
    out(1) = lease.region.fd;
    out(2) = lease.region.id;
    out(3) = static_cast<int64_t>(std::hash<std::string>()(boot));
    out(4) = number;
  } catch (const OutOfMemory&) {
    // No region has the number 0, so nobody can read this.
  }
}
SOK_CPU_KERNEL("Sok>SharedOffer", FunctionOp<SharedOffer>);

REGISTER_OP("Sok>SharedCanRead")
    .Input("offers: int64")
    .Output("ok: bool")
    .Attr("rank: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

class SharedCanReadOp : public GuardedOp {
 public:
  explicit SharedCanReadOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("rank", &rank_)); }
  void Run(OpKernelContext* ctx) override {
    const Tensor& offers = ctx->input(0);
    CheckRank(offers, 2, "offers");
    if (offers.dim_size(1) != 5) throw InvalidArgument("`offers` must have 5 columns.");
    Tensor* ok = Output(ctx, 0, TensorShape({}));
    auto offer = offers.matrix<int64_t>();
    bool all = rank_ < offers.dim_size(0);
    for (int64_t r = 0; all && r < offers.dim_size(0); ++r) {
      all = offer(r, 3) == offer(rank_, 3);
      if (r == rank_ || !all) continue;
      int64_t number = 0;
      try {
        TheReader().Read({offer(r, 0), offer(r, 1), offer(r, 2)}, 0, sizeof(number), reinterpret_cast<char*>(&number));
      } catch (const FailedPrecondition&) {
      }
      all = number != 0 && number == offer(r, 4);
    }
    ok->scalar<bool>()() = all;
  }

 private:
  int64_t rank_ = 0;
};
SOK_CPU_KERNEL("Sok>SharedCanRead", SharedCanReadOp);

}  // namespace
}  // namespace sok
