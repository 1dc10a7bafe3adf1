// Counting collectives and their bytes as they run, what this worker waits for, and the profile of where time goes.
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "op.h"
#include "shapes.h"
#include "sok/json.h"
#include "sok/profile.h"
#include "trace.h"

namespace sok {
namespace {

using Clock = std::chrono::steady_clock;

struct Count {
  std::string kind;
  int64_t calls = 0;
  int64_t bytes = 0;
  int64_t begun = 0;  // since the job began: workers compare theirs
  bool waits = false;
  Clock::time_point changed;  // when it began to wait, or was done
  double seconds = 0;         // from begin to done, of all
};

struct Counts {
  std::mutex mutex;
  std::map<std::string, Count> by_name;
};

Counts& TheCounts() {
  static Counts* counts = new Counts;  // leaked: kernels may run while the process ends
  return *counts;
}

// TensorFlow runs the stateful ops of a function one after the other, except for those that touch resources, which wait
// for their own resource only: `turns` keeps one layer's exchange from waiting for another's.
REGISTER_OP("Sok>TraceCollective")
    .Input("x: T")
    .Input("turns: num_turns * resource")
    .Output("y: T")
    .Attr("num_turns: int >= 0")
    .Attr("T: type")
    .Attr("collective: string")
    .Attr("kind: string")
    .Attr("more_bytes: int = 0")  // of the other tensors of a grouped collective
    .SetIsStateful()
    .SetShapeFn(ShapeOfInput<0>);

class TraceCollectiveOp : public GuardedOp {
 public:
  explicit TraceCollectiveOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("collective", &name_));
    Check(ctx->GetAttr("kind", &kind_));
    Check(ctx->GetAttr("more_bytes", &more_bytes_));
  }
  void Run(OpKernelContext* ctx) override {
    const int64_t bytes = static_cast<int64_t>(ctx->input(0).TotalBytes()) + more_bytes_;
    {
      Counts& counts = TheCounts();
      std::lock_guard<std::mutex> lock(counts.mutex);
      Count& count = counts.by_name[name_];
      count.kind = kind_;
      ++count.calls;
      ++count.begun;
      count.bytes += bytes;
      count.waits = true;
      count.changed = Clock::now();
    }
    ProfileBegin(kind_ == "all_to_all" ? "exchange" : "collective", name_, {-1, -1, bytes});
    ctx->set_output(0, ctx->input(0));
  }

 private:
  std::string name_, kind_;
  int64_t more_bytes_;
};
SOK_HOST_KERNEL("Sok>TraceCollective", TraceCollectiveOp, "turns");  // the tensor stays where it is

}  // namespace

void TraceWaitsNoMore(const std::string& collective) {
  Counts& counts = TheCounts();
  std::lock_guard<std::mutex> lock(counts.mutex);
  Count& count = counts.by_name[collective];
  const auto now = Clock::now();
  if (count.waits) count.seconds += std::chrono::duration<double>(now - count.changed).count();
  count.waits = false;
  count.changed = now;
}

namespace {

// Stands after a collective, as TraceCollective before it: Horovod's op between them is not ours to time.
REGISTER_OP("Sok>TraceCollectiveDone")
    .Input("x: T")
    .Input("turns: num_turns * resource")
    .Output("y: T")
    .Attr("num_turns: int >= 0")
    .Attr("T: type")
    .Attr("collective: string")
    .SetIsStateful()
    .SetShapeFn(ShapeOfInput<0>);

class TraceCollectiveDoneOp : public GuardedOp {
 public:
  explicit TraceCollectiveDoneOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("collective", &name_));
  }
  void Run(OpKernelContext* ctx) override {
    TraceWaitsNoMore(name_);
    ProfileEnd("", name_, {-1, -1, static_cast<int64_t>(ctx->input(0).TotalBytes())});
    ctx->set_output(0, ctx->input(0));
  }

 private:
  std::string name_;
};
SOK_HOST_KERNEL("Sok>TraceCollectiveDone", TraceCollectiveDoneOp, "turns");

REGISTER_OP("Sok>TraceRead").Input("reset: bool").Output("json: string").SetIsStateful().SetShapeFn(ScalarShape);

void TraceRead(OpKernelContext* ctx) {
  const bool reset = ScalarArg<bool>(ctx->input(0), "reset");
  Tensor* json = Output(ctx, 0, TensorShape({}));
  std::ostringstream names;
  int64_t calls = 0, bytes = 0;
  Counts& counts = TheCounts();
  std::lock_guard<std::mutex> lock(counts.mutex);
  for (auto& [name, count] : counts.by_name) {
    if (count.calls == 0) continue;  // none since the last reset
    names << (calls == 0 ? "" : ", ") << JsonText(name) << ": {\"kind\": " << JsonText(count.kind)
          << ", \"collectives\": " << count.calls << ", \"bytes\": " << count.bytes
          << ", \"seconds\": " << count.seconds << "}";
    calls += count.calls;
    bytes += count.bytes;
    if (reset) {
      count.calls = count.bytes = 0;
      count.seconds = 0;
    }
  }
  std::ostringstream out;
  out << "{\"collectives\": " << calls << ", \"bytes\": " << bytes << ", \"by_name\": {" << names.str() << "}}";
  json->scalar<tensorflow::tstring>()() = out.str();
}
SOK_HOST_KERNEL("Sok>TraceRead", FunctionOp<TraceRead>, "reset", "json");

REGISTER_OP("Sok>Profile")
    .Input("path: string")
    .Input("max_spans: int64")
    .Output("json: string")
    .Attr("action: {'start', 'stop'}")
    .Attr("rank: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(ScalarShape);

class ProfileOp : public GuardedOp {
 public:
  explicit ProfileOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    std::string action;
    Check(ctx->GetAttr("action", &action));
    Check(ctx->GetAttr("rank", &rank_));
    starts_ = action == "start";
  }
  void Run(OpKernelContext* ctx) override {
    ProfileSummary summary;
    if (starts_) {
      const std::string path = ScalarArg<tensorflow::tstring>(ctx->input(0), "path");
      StartProfile(path, rank_, ScalarArg<int64_t>(ctx->input(1), "max_spans"));
    } else {
      summary = StopProfile();
    }
    ScalarOutput<tensorflow::tstring>(ctx, 0) =
        "{\"spans\": " + std::to_string(summary.spans) + ", \"dropped\": " + std::to_string(summary.dropped) + "}";
  }

 private:
  bool starts_ = false;
  int rank_ = 0;
};
SOK_HOST_KERNEL("Sok>Profile", ProfileOp, "path", "max_spans", "json");

}  // namespace
}  // namespace sok

// Begins to count anew: what a job before this one has begun, maybe in a step that failed, nobody waits for any more.
extern "C" void SokForgetCollectives() {
  sok::Counts& counts = sok::TheCounts();
  std::lock_guard<std::mutex> lock(counts.mutex);
  for (auto& [name, count] : counts.by_name) count.begun = 0;
}

// Writes what collectives this worker has begun, as JSON: for each name its kind, how often it was begun, whether the last
// of them is still waited for, and the seconds since that began or ended. Returns the bytes that it takes; writes nothing
// into less. No op, since the thread that asks must not wait for TensorFlow: it asks when that may hang.
extern "C" int64_t SokCollectives(char* out, int64_t size) {
  std::ostringstream json;
  {
    sok::Counts& counts = sok::TheCounts();
    std::lock_guard<std::mutex> lock(counts.mutex);
    const auto now = sok::Clock::now();
    for (const auto& [name, count] : counts.by_name) {
      if (count.begun == 0) continue;
      json << (json.tellp() == 0 ? "{" : ", ") << sok::JsonText(name) << ": [" << sok::JsonText(count.kind) << ", "
           << count.begun << ", " << (count.waits ? "true" : "false") << ", "
           << std::chrono::duration<double>(now - count.changed).count() << "]";
    }
  }
  if (json.tellp() == 0) json << "{";
  json << "}";
  const std::string text = json.str();
  const auto needed = static_cast<int64_t>(text.size());
  if (needed <= size) std::memcpy(out, text.data(), text.size());
  return needed;
}
