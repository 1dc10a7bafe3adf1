// An all-to-all among processes (shared_parcels.h), and how they find each other.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "exchange_op.h"
#include "op.h"
#include "output_pool.h"
#include "shared_parcels.h"
#include "trace.h"

namespace sok {
namespace {

constexpr double kSecondsToConnect = 60.0, kSecondsToDrain = 10.0;

struct WorldSplits {
  std::vector<int64_t> counts;
  WorldSplits(const Tensor& splits, int64_t total, const char* name) {
    CheckRank(splits, 1, name);
    int64_t sum = 0;
    for (int64_t r = 0; r < splits.NumElements(); ++r) {
      counts.push_back(splits.flat<int32_t>()(r));
      if (counts.back() < 0) throw InvalidArgument(std::string("`") + name + "` must not be negative.");
      sum += counts.back();
    }
    if (sum != total) {
      throw InvalidArgument(std::string("`") + name + "` must sum to the number of entries, " + std::to_string(total) +
                            ". Received: " + std::to_string(sum) + ".");
    }
  }
};

#define SOK_SHARED_TYPES "{int32, int64, float, double}"

// Stateful, so that equal ones are not merged. `turns`: of those that wait for each other (trace_ops.cc says why).
REGISTER_OP("Sok>SharedAllToAll")
    .Input("x: T")
    .Input("splits: int32")
    .Input("turns: num_turns * resource")
    .Output("received: T")
    .Output("received_splits: int32")
    .Attr("T: " SOK_SHARED_TYPES)
    .Attr("num_turns: int >= 0")
    .Attr("collective: string")
    .Attr("rank: int >= 0")
    .Attr("in_graph: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    });

class SharedAllToAllOp final : public tensorflow::AsyncOpKernel {
 public:
  explicit SharedAllToAllOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    bool in_graph = true;
    Check(ctx->GetAttr("rank", &rank_));
    Check(ctx->GetAttr("collective", &collective_));
    Check(ctx->GetAttr("in_graph", &in_graph));
    // Eager calls meet in the order in which they are made, so that ranks which are out of step notice it.
    name_ = in_graph ? collective_ : "";
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    Mail* const mail = TheMail::Get();
    std::vector<Mail::Words> envelopes;
    Guard(ctx, [&] {
      if (mail == nullptr) throw FailedPrecondition("the job of collective '" + collective_ + "' has ended.");
      const Tensor& x = ctx->input(0);
      CheckRank(x, 1, "x");
      const WorldSplits splits(ctx->input(1), x.NumElements(), "splits");
      envelopes = ParcelsOf(x).Pack(*mail, static_cast<const char*>(x.data()), splits.counts);
    });
    if (!ctx->status().ok()) return done();
    mail->AllToAll(name_, std::move(envelopes),
                   [this, ctx, done = std::move(done)](const std::string& error, const std::vector<Mail::Words>& all) {
                     if (error.empty()) {
                       Guard(ctx, [&] { Collect(ctx, all); });
                     } else {
                       ctx->CtxFailure(__FILE__, __LINE__, absl::UnavailableError(collective_ + ": " + error));
                     }
                     // A program may catch the error and go on: it must not be taken for one that waits.
                     if (!ctx->status().ok()) TraceWaitsNoMore(collective_);
                     done();
                   });
  }

 private:
  Parcels ParcelsOf(const Tensor& x) const { return {collective_, rank_, x.dtype()}; }

  void Collect(OpKernelContext* ctx, const std::vector<Mail::Words>& envelopes) const {
    const Tensor& x = ctx->input(0);
    const Parcels parcels = ParcelsOf(x);
    const std::vector<int64_t> counts = parcels.Counts(envelopes);
    Tensor* received_splits = Output(ctx, 1, TensorShape({static_cast<int64_t>(counts.size())}));
    std::copy(counts.begin(), counts.end(), received_splits->flat<int32_t>().data());
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const int32_t* splits = ctx->input(1).flat<int32_t>().data();
    const int64_t before = std::accumulate(splits, splits + rank_, int64_t{0}) * tensorflow::DataTypeSize(x.dtype());
    char* to = static_cast<char*>(AllocateOutput(ctx, 0, CheckedShape({total}))->data());
    parcels.Unpack(envelopes, static_cast<const char*>(x.data()) + before, to);
  }

  int64_t rank_ = 0;
  std::string collective_, name_;
};
SOK_CPU_KERNEL("Sok>SharedAllToAll", SharedAllToAllOp);

// How ranks find out that they can: each offers a region that holds its own number, and an address for mail; and tries to
// read those of the others (SharedCanRead), then to connect (MailConnect).
constexpr int64_t kOfferWords = 10, kAddressAt = 5;

REGISTER_OP("Sok>SharedOffer")
    .Output("offer: int64")
    .Attr("rank: int >= 0")
    .Attr("size: int >= 1")
    .Attr("host: string = ''")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->MakeShape({kOfferWords}));
      return absl::OkStatus();
    });

class SharedOfferOp : public GuardedOp {
 public:
  explicit SharedOfferOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("rank", &rank_));
    Check(ctx->GetAttr("size", &size_));
    Check(ctx->GetAttr("host", &host_));
    if (rank_ >= size_ || size_ > INT32_MAX) throw InvalidArgument("`rank` must be below `size`.");
  }
  void Run(OpKernelContext* ctx) override {
    auto out = Output(ctx, 0, TensorShape({kOfferWords}))->flat<int64_t>();
    out.setZero();
    // The kernel's boot id tells hosts apart, and the network containers of one: mail does not reach another network.
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    struct stat network = {};
    if (stat("/proc/self/ns/net", &network) == 0) boot += "/" + std::to_string(network.st_ino);
    const int64_t host = static_cast<int64_t>(std::hash<std::string>()(boot));
    try {
      std::unique_ptr<Mail> mail = Listen();
      // Random: two containers may have equal process numbers, and a worker then finds a region of its own.
      const int64_t number = mail->address()[0];
      const SharedPool::Lease lease = PoolToSend().Take("offer", sizeof(number), static_cast<int>(size_ - 1));
      std::memcpy(lease.data, &number, sizeof(number));
      const int64_t offer[kAddressAt] = {lease.region.pid, lease.region.fd, lease.region.id, host, number};
      std::copy(offer, offer + kAddressAt, out.data());
      std::copy(mail->address().begin(), mail->address().end(), out.data() + kAddressAt);
      TheMail::Set(std::move(mail));
    } catch (const OutOfMemory&) {  // no region has the number 0, so nobody can read this
    } catch (const FailedPrecondition&) {
    }
  }

 private:
  // Where nobody can listen at that address, workers of one host still reach each other.
  std::unique_ptr<Mail> Listen() const {
    const int rank = static_cast<int>(rank_), size = static_cast<int>(size_);
    try {
      return std::make_unique<Mail>(rank, size, host_);
    } catch (const FailedPrecondition&) {
      return std::make_unique<Mail>(rank, size);
    }
  }

  int64_t rank_ = 0, size_ = 1;
  std::string host_;
};
SOK_CPU_KERNEL("Sok>SharedOffer", SharedOfferOp);

// Of each rank whether its memory can be read, and so whether it is on this host.
REGISTER_OP("Sok>SharedCanRead")
    .Input("offers: int64")
    .Output("ok: bool")
    .Attr("rank: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle offers;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &offers));
      c->set_output(0, c->Vector(c->Dim(offers, 0)));
      return absl::OkStatus();
    });

class SharedCanReadOp : public GuardedOp {
 public:
  explicit SharedCanReadOp(OpKernelConstruction* ctx) : GuardedOp(ctx) { Check(ctx->GetAttr("rank", &rank_)); }
  void Run(OpKernelContext* ctx) override {
    const Tensor& offers = ctx->input(0);
    CheckRank(offers, 2, "offers");
    if (offers.dim_size(1) != kOfferWords) throw InvalidArgument("`offers` must have 10 columns.");
    if (rank_ >= offers.dim_size(0)) throw InvalidArgument("`offers` must have one row per rank.");
    auto ok = Output(ctx, 0, TensorShape({offers.dim_size(0)}))->flat<bool>();
    auto offer = offers.matrix<int64_t>();
    for (int64_t r = 0; r < offers.dim_size(0); ++r) {
      ok(r) = offer(r, 3) == offer(rank_, 3);
      if (r == rank_ || !ok(r)) continue;
      int64_t number = 0;
      try {
        ReaderOfSent().Read({offer(r, 0), offer(r, 1), offer(r, 2)}, 0, sizeof(number),
                            reinterpret_cast<char*>(&number));
      } catch (const FailedPrecondition&) {
      }
      ok(r) = number != 0 && number == offer(r, 4);
    }
  }

 private:
  int64_t rank_ = 0;
};
SOK_CPU_KERNEL("Sok>SharedCanRead", SharedCanReadOp);

// Whether this rank has connected with all others, which try at the same time.
REGISTER_OP("Sok>MailConnect")
    .Input("offers: int64")
    .Input("is_here: bool")
    .Output("ok: bool")
    .Attr("lost_after: float = 60")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

class MailConnectOp : public GuardedOp {
 public:
  explicit MailConnectOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("lost_after", &lost_after_));
    if (!(lost_after_ >= 1 && lost_after_ <= 86400)) throw InvalidArgument("`lost_after` must be 1 to 86400 seconds.");
  }
  void Run(OpKernelContext* ctx) override {
    const Tensor& offers = ctx->input(0);
    CheckRank(offers, 2, "offers");
    if (offers.dim_size(1) != kOfferWords) throw InvalidArgument("`offers` must have 10 columns.");
    CheckShape(ctx->input(1), {offers.dim_size(0)}, "is_here");
    bool& ok = ScalarOutput<bool>(ctx, 0);
    ok = false;
    Mail* const mail = TheMail::Get();
    if (mail == nullptr) return;
    std::vector<Mail::Address> addresses;
    std::vector<bool> is_here;
    for (int64_t r = 0; r < offers.dim_size(0); ++r) {
      addresses.emplace_back();
      for (int64_t& word : addresses.back())
        word = offers.matrix<int64_t>()(r, kAddressAt + (&word - addresses.back().data()));
      is_here.push_back(ctx->input(1).flat<bool>()(r));
    }
    try {
      mail->Connect(addresses, is_here, kSecondsToConnect, lost_after_);
      ok = true;
    } catch (const FailedPrecondition&) {
      return;
    }
    // After all that Python does at its end: what this process sent last may be on its way, and its peers wait for it.
    static const int is_registered = std::atexit([] {
      if (Mail* const last = TheMail::Get()) last->Drain(kSecondsToDrain);
    });
    static_cast<void>(is_registered);
  }

 private:
  float lost_after_ = 60.0f;
};
SOK_CPU_KERNEL("Sok>MailConnect", MailConnectOp);

}  // namespace

Tensor AllocateToSend(OpKernelContext* ctx, tensorflow::DataType dtype, const TensorShape& shape) {
  const int64_t bytes = shape.num_elements() * tensorflow::DataTypeSize(dtype);
  try {
    const Mail* const mail = TheMail::Get();
    if (bytes > kInlineBytes && mail != nullptr && mail->IsAnyHere())
      return TensorOthersRead(PoolToSend().Allocate(bytes), dtype, shape);
  } catch (const OutOfMemory&) {  // it will be copied there, or travel in envelopes
  }
  return AllocateTemp(ctx, dtype, shape);
}

}  // namespace sok

// Ends the mail of the job, here and for all peers. Asks nothing of TensorFlow, which may hang.
extern "C" void SokCloseMail() {
  sok::Mail* const mail = sok::TheMail::Get();
  if (mail != nullptr) mail->Close("connection closed by peer: the job was ended.");
}
