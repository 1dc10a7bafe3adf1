// A sum of tensors over all processes by mail (shared_parcels.h), in one op: each rank adds up its part of all numbers, in
// the order of ranks, and all get all parts. Of few numbers each rank gets those of all and adds up all: one message less.
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
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

// Stateful, so that equal ones are not merged. `turns`: of those that wait for each other (trace_ops.cc says why).
REGISTER_OP("Sok>SharedAllReduce")
    .Input("values: num_values * T")
    .Input("turns: num_turns * resource")
    .Output("sums: num_values * T")
    .Attr("T: {int32, int64, float, double}")
    .Attr("num_values: int >= 1")
    .Attr("num_turns: int >= 0")
    .Attr("collective: string")
    .Attr("rank: int >= 0")
    .Attr("average: bool")
    .Attr("in_graph: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
      return absl::OkStatus();
    });

constexpr int64_t kWholeBytes = 64 << 10;  // that a rank gets where each adds up all

template <class T>
void AddParts(const Tensor& parts, int64_t world, bool average, Tensor* sums) {
  const int64_t n = sums->NumElements();
  const T* from = parts.flat<T>().data();
  T* to = sums->flat<T>().data();
  std::copy(from, from + n, to);
  for (int64_t r = 1; r < world; ++r) {
    from += n;
    for (int64_t i = 0; i < n; ++i) to[i] += from[i];
  }
  if (average) {
    for (int64_t i = 0; i < n; ++i) to[i] /= static_cast<T>(world);
  }
}

class SharedAllReduceOp final : public tensorflow::AsyncOpKernel {
 public:
  explicit SharedAllReduceOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    bool in_graph = true;
    Check(ctx->GetAttr("T", &dtype_));
    Check(ctx->GetAttr("num_values", &num_values_));
    Check(ctx->GetAttr("collective", &collective_));
    Check(ctx->GetAttr("rank", &rank_));
    Check(ctx->GetAttr("average", &average_));
    Check(ctx->GetAttr("in_graph", &in_graph));
    if (average_ && !tensorflow::DataTypeIsFloating(dtype_)) {
      throw InvalidArgument("`average` takes floats: " + tensorflow::DataTypeString(dtype_) + " has no half.");
    }
    // Eager calls meet in the order in which they are made, so that ranks which are out of step notice it.
    parts_name_ = in_graph ? collective_ + "/parts" : "";
    sums_name_ = in_graph ? collective_ + "/sums" : "";
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const auto call = std::make_shared<Call>(ctx, std::move(done));
    std::vector<Mail::Words> envelopes;
    Guard(ctx, [&] {
      if (call->mail == nullptr) throw FailedPrecondition("the job of collective '" + collective_ + "' has ended.");
      envelopes = PackParts(call.get());
    });
    if (!ctx->status().ok()) return call->done();
    Send(call, parts_name_, std::move(envelopes), [this, call](const std::vector<Mail::Words>& parts) {
      std::vector<Mail::Words> sums;
      Guard(call->ctx, [&] {
        Add(call.get(), parts);
        if (call->is_whole) return Hand(*call, call->sums);
        const std::vector<int64_t> to_each(static_cast<size_t>(call->mail->size()), call->sums.NumElements());
        sums = OfSums(*call).Pack(*call->mail, static_cast<const char*>(call->sums.data()), to_each, true);
      });
      if (call->is_whole || !call->ctx->status().ok()) return Finish(call);
      Send(call, sums_name_, std::move(sums), [this, call](const std::vector<Mail::Words>& all) {
        Guard(call->ctx, [&] { Collect(*call, all); });
        Finish(call);
      });
    });
  }

 private:
  struct Call {
    Call(OpKernelContext* of, DoneCallback then) : ctx(of), done(std::move(then)) {}

    OpKernelContext* const ctx;
    const DoneCallback done;
    Mail* const mail = TheMail::Get();
    int64_t total = 0;
    bool is_whole = false;        // each rank adds up all numbers
    std::vector<int64_t> splits;  // of all numbers: which rank adds up how many
    Tensor flat, sums;            // all of this rank's numbers; the sums of its part
  };
  using Then = std::function<void(const std::vector<Mail::Words>&)>;

  // Calls `then` with what has come; where there is much to add up on a thread of TensorFlow, as that of the mail has others
  // to serve.
  void Send(const std::shared_ptr<Call>& call, const std::string& name, std::vector<Mail::Words> envelopes,
            Then then) const {
    call->mail->AllToAll(
        name, std::move(envelopes),
        [this, call, then = std::move(then)](const std::string& error, const std::vector<Mail::Words>& all) {
          if (error.empty() && call->is_whole) return then(all);
          if (error.empty()) return (*call->ctx->runner())([then, all] { then(all); });
          call->ctx->CtxFailure(__FILE__, __LINE__, absl::UnavailableError(collective_ + ": " + error));
          Finish(call);
        });
  }

  void Finish(const std::shared_ptr<Call>& call) const {
    // A program may catch the error and go on: it must not be taken for one that waits.
    if (!call->ctx->status().ok()) TraceWaitsNoMore(collective_);
    call->done();
  }

  Parcels OfParts(const Call& call) const { return {collective_ + "/parts", rank_, dtype_, call.total}; }
  Parcels OfSums(const Call& call) const { return {collective_ + "/sums", rank_, dtype_, call.total}; }

  std::vector<Mail::Words> PackParts(Call* call) const {
    const int64_t world = call->mail->size();
    for (int i = 0; i < num_values_; ++i) call->total += call->ctx->input(i).NumElements();
    call->is_whole = call->total * Width() <= std::min(kInlineBytes, kWholeBytes / world);
    for (int64_t r = 0; r < world; ++r) {
      call->splits.push_back(call->is_whole ? call->total : call->total / world + (r < call->total % world ? 1 : 0));
    }
    call->flat = AllocateToSend(call->ctx, dtype_, CheckedShape({call->total}));
    char* to = static_cast<char*>(call->flat.data());
    for (int i = 0; i < num_values_; ++i) {
      const Tensor& values = call->ctx->input(i);
      const size_t bytes = static_cast<size_t>(values.NumElements() * tensorflow::DataTypeSize(dtype_));
      if (bytes > 0) std::memcpy(to, values.data(), bytes);
      to += bytes;
    }
    const char* const data = static_cast<const char*>(call->flat.data());
    return OfParts(*call).Pack(*call->mail, data, call->splits, call->is_whole);
  }

  // Adds up this rank's part of what all have sent.
  void Add(Call* call, const std::vector<Mail::Words>& envelopes) const {
    const int64_t world = call->mail->size(), part = call->splits[static_cast<size_t>(rank_)];
    const Parcels parcels = OfParts(*call);
    for (const int64_t count : parcels.Counts(envelopes)) {
      if (count != part) throw FailedPrecondition(Unlike());
    }
    const Tensor parts = AllocateTemp(call->ctx, dtype_, CheckedShape({world, part}));
    int64_t before = 0;
    for (int64_t r = 0; r < rank_ && !call->is_whole; ++r) before += call->splits[static_cast<size_t>(r)];
    parcels.Unpack(envelopes, static_cast<const char*>(call->flat.data()) + before * Width(),
                   static_cast<char*>(parts.data()));
    call->sums = AllocateToSend(call->ctx, dtype_, CheckedShape({part}));
    switch (dtype_) {
      case tensorflow::DT_INT32:
        AddParts<int32_t>(parts, world, average_, &call->sums);
        break;
      case tensorflow::DT_INT64:
        AddParts<int64_t>(parts, world, average_, &call->sums);
        break;
      case tensorflow::DT_FLOAT:
        AddParts<float>(parts, world, average_, &call->sums);
        break;
      default:
        AddParts<double>(parts, world, average_, &call->sums);
    }
  }

  void Collect(const Call& call, const std::vector<Mail::Words>& envelopes) const {
    const Parcels parcels = OfSums(call);
    if (parcels.Counts(envelopes) != call.splits) throw FailedPrecondition(Unlike());
    const Tensor all = AllocateTemp(call.ctx, dtype_, CheckedShape({call.total}));
    parcels.Unpack(envelopes, static_cast<const char*>(call.sums.data()), static_cast<char*>(all.data()));
    Hand(call, all);
  }

  // Gives each output its sums.
  void Hand(const Call& call, const Tensor& all) const {
    const char* from = static_cast<const char*>(all.data());
    for (int i = 0; i < num_values_; ++i) {
      Tensor* sums = Output(call.ctx, i, call.ctx->input(i).shape());
      const size_t bytes = static_cast<size_t>(sums->NumElements() * Width());
      if (bytes > 0) std::memcpy(sums->data(), from, bytes);
      from += bytes;
    }
  }

  int64_t Width() const { return tensorflow::DataTypeSize(dtype_); }

  std::string Unlike() const { return "ranks have different numbers of values in collective '" + collective_ + "'."; }

  tensorflow::DataType dtype_ = tensorflow::DT_FLOAT;
  int num_values_ = 1;
  int64_t rank_ = 0;
  bool average_ = false;
  std::string collective_, parts_name_, sums_name_;
};
SOK_CPU_KERNEL("Sok>SharedAllReduce", SharedAllReduceOp);

}  // namespace
}  // namespace sok
