// The exchange on GPUs (docs/design/exchange.md): messages are read on the host, and made there (exchange_keys_ops.cc);
// rows and gradients stay on the device.
#include "sok/exchange.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "../exchange_copies.h"
#include "../exchange_pool.h"
#include "../exchange_serve.h"
#include "../exchange_sum_grad.h"
#include "gpu_group.h"
#include "gpu_op.h"
#include "sok/combine.h"
#include "sok/device_table.h"

namespace sok {
namespace {

class GpuExchangeServeOp final : public ExchangeServeOp {
 public:
  using ExchangeServeOp::ExchangeServeOp;

 private:
  // What goes to the device in one copy: the row splits of all pieces, and the keys of table after table.
  struct OnHost {
    std::vector<int64_t> first_key;  // [T + 1], of each table, counted from the first word
    uint64_t* words;                 // [first_key[T]]
  };

  void Serve(OpKernelContext* ctx, const Tables& tables, const Requests& requests, bool insert) const override {
    const Cuda cuda = CudaOf(ctx);
    const TfExecutor executor(ctx);
    TfDeviceScratch scratch(ctx);
    watch_.ThrowIfBadIsKnown(cuda, &scratch, DeviceTablesOf(tables));  // and tell those who wait
    const ScratchLease host_scratch;
    const OnHost on_host = Collect(ctx, tables, requests, host_scratch.get());
    const int64_t num_words = on_host.first_key.back();
    const AnswerLayout& layout = requests.layout;
    const int64_t size = layout.end(requests.answer_splits.NumElements() - 1);
    Tensor answers, on_device;
    Check(ctx->allocate_temp(tensorflow::DT_FLOAT, CheckedShape({size}), &answers));
    Check(ctx->allocate_temp(tensorflow::DT_INT64, CheckedShape({num_words}), &on_device));
    float* out = answers.flat<float>().data();
    ZeroOnDevice(cuda, out, size * int64_t{sizeof(float)});  // the headers; a lookup writes the rest
    static_assert(kServed == 0);

    auto* splits = static_cast<int64_t*>(on_device.data());
    const auto* words = static_cast<const uint64_t*>(on_device.data());
    CopyToDevice(cuda, splits, on_host.words, num_words * int64_t{sizeof(uint64_t)});

    std::vector<Tensor> row_ids(tables.size());
    GpuAsked asked_of;
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t n = requests.num_keys[t];
      Check(ctx->allocate_temp(tensorflow::DT_INT64, CheckedShape({n}), &row_ids[t]));
      asked_of.Add(tables[t].get(), words + on_host.first_key[t], n, static_cast<int64_t*>(row_ids[t].data()),
                   on_host.words + on_host.first_key[t]);
    }
    const std::vector<DeviceTable::Reading> found = RowsOf(cuda, {executor}, &scratch, &asked_of, insert);
    std::vector<int64_t> next(tables.size());  // of the keys of each table
    std::vector<DeviceFeature> features;
    for (const Asked& asked : requests.all) {
      const int64_t first = next[asked.table];
      DeviceFeature feature;
      feature.dim = feature.output_stride = dims()[asked.table];
      SetRows(asked_of.all[asked.table], found[asked.table], first, &feature);
      feature.segments.n = asked.keys;
      feature.segments.segments = asked.rows;
      if (asked.feature >= 0) {
        feature.segments.row_splits = splits;
        splits += asked.rows + 1;
      }
      feature.output = out + layout.begin(asked.rank, asked.column);
      next[asked.table] += asked.keys;
      if (copies_.AnswersTo(asked.rank, asked.table)) features.push_back(feature);
    }
    CombineGroup(cuda, &scratch, features.data(), static_cast<int64_t>(features.size()), FloatType::kFloat32, nullptr);
    ctx->set_output(0, answers);
    ctx->set_output(1, requests.answer_splits);
    ctx->set_output(2, requests.counts);
    ctx->set_output(3, on_device.Slice(0, requests.num_splits));  // the keys stay with it, until the gradient
    for (size_t t = 0; t < tables.size(); ++t) ctx->set_output(4 + static_cast<int>(t), row_ids[t]);
  }

  // The words of the messages side by side, checked: a device would tell of a bad key too late for those who wait. In
  // pageable memory, since those of the messages may be pinned, and gone when the copy happens.
  OnHost Collect(OpKernelContext* ctx, const Tables& tables, const Requests& requests, Scratch* scratch) const {
    OnHost on_host;
    on_host.first_key.push_back(requests.num_splits);
    for (const int64_t n : requests.num_keys) on_host.first_key.push_back(on_host.first_key.back() + n);
    on_host.words = scratch->Get<uint64_t>(on_host.first_key.back());
    std::vector<int64_t> next = on_host.first_key;
    auto* splits = reinterpret_cast<int64_t*>(on_host.words);
    for (size_t i = 0; i < requests.all.size(); ++i) {
      const Asked& asked = requests.all[i];
      ReadKeys(requests, i, tables[asked.table]->config().is_unsigned, on_host.words + next[asked.table]);
      next[asked.table] += asked.keys;
      if (asked.feature < 0) continue;
      PieceSplits(requests, i, splits);
      splits += asked.rows + 1;
    }
    const TfExecutor executor(ctx);
    for (size_t t = 0; t < tables.size(); ++t) {
      CheckOwned({executor}, tables[t]->config(), on_host.words + on_host.first_key[t], requests.num_keys[t]);
    }
    return on_host;
  }

  static void CheckOwned(const Cpu& cpu, const TableConfig& config, const uint64_t* keys, int64_t n) {
    constexpr int64_t kBlock = 4096, kCyclesPerKey = 12;
    const Partition partition = config.partition();
    const uint64_t num_legal = config.hashed ? 0 : config.num_legal();
    std::vector<char> is_bad(static_cast<size_t>((n + kBlock - 1) / kBlock));
    cpu.executor.For(static_cast<int64_t>(is_bad.size()), kBlock * kCyclesPerKey, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        bool bad = false;
        for (int64_t i = block * kBlock; i < std::min(n, (block + 1) * kBlock); ++i) {
          bad = bad || partition.OwnerOf(keys[i]) != config.rank || (num_legal != 0 && keys[i] >= num_legal);
        }
        is_bad[static_cast<size_t>(block)] = bad;
      }
    });
    for (size_t block = 0; block < is_bad.size(); ++block) {
      if (!is_bad[block]) continue;
      const int64_t begin = static_cast<int64_t>(block) * kBlock;
      for (int64_t i = begin; i < std::min(n, begin + kBlock); ++i) config.CheckOwned(keys[i]);
    }
  }

  void OutputBadNews(OpKernelContext* ctx, const std::vector<float>& answers) const override {
    const int64_t size = static_cast<int64_t>(answers.size());
    CopyToDevice(CudaOf(ctx), Output(ctx, 0, CheckedShape({size}))->data(), answers.data(),
                 size * int64_t{sizeof(float)});
  }

  mutable DeviceTableWatch watch_;  // safe from several threads
};
SOK_GPU_KERNEL(Name("Sok>ExchangeServe")
                   .HostMemory("handles")
                   .HostMemory("words")
                   .HostMemory("splits")
                   .HostMemory("call")
                   .HostMemory("insert")
                   .HostMemory("answer_splits")
                   .HostMemory("counts"),
               GpuExchangeServeOp);

// Pieces that are not what `counts` says are left out.
class GpuExchangeSumGradOp final : public ExchangeSumGradOp {
 public:
  using ExchangeSumGradOp::ExchangeSumGradOp;

  void Run(OpKernelContext* ctx) override {
    std::vector<std::vector<DeviceAddends>> addends(dims().size());
    for (const AskedGrad& grad : Grads(ctx)) {
      DeviceAddends a;
      a.row_ids = grad.row_ids;
      a.values = grad.values;
      a.values_stride = dims()[grad.table];
      a.segments.row_splits = grad.row_splits;
      a.segments.segments = grad.row_splits == nullptr ? grad.n : grad.segments;
      a.segments.n = grad.n;
      addends[grad.table].push_back(a);
    }
    OutputRowSums(ctx, addends, dims(), capacities());
  }
};
SOK_GPU_KERNEL(Name("Sok>ExchangeSumGrad").HostMemory("counts"), GpuExchangeSumGradOp);

class GpuExchangeToCopiesOp final : public ExchangeToCopiesOp {
 public:
  using ExchangeToCopiesOp::ExchangeToCopiesOp;

  void Run(OpKernelContext* ctx) override {
    const Cuda cuda = CudaOf(ctx);
    const std::vector<Piece> pieces = Pieces(ctx);
    const float* from = ctx->input(0).flat<float>().data();
    float* to = Output(ctx, 0, CheckedShape({SizeOf(pieces)}))->flat<float>().data();
    for (const Piece& piece : pieces) {
      CopyOnDevice(cuda, to + piece.to, from + piece.from, piece.size * int64_t{sizeof(float)});
    }
  }
};
SOK_GPU_KERNEL(Name("Sok>ExchangeToCopies")
                   .HostMemory("splits")
                   .HostMemory("counts")
                   .HostMemory("sent_splits")
                   .HostMemory("expected"),
               GpuExchangeToCopiesOp);

// Of answers that came on the device, from a transport that moves what lies there. Waits for the stream.
void GpuExchangeCheck(OpKernelContext* ctx) {
  const Cuda cuda = CudaOf(ctx);
  TfDeviceScratch scratch(ctx);
  const Tensor& answers = ctx->input(0);
  CheckRank(answers, 1, "answers");
  const float* floats = answers.flat<float>().data();
  const std::vector<int64_t> begin = AnswerBegins(ctx->input(1), ctx->input(2), answers.NumElements());
  const int64_t world = static_cast<int64_t>(begin.size()) - 1;
  std::vector<float> headers(static_cast<size_t>(2 * world));
  AnswerHeadersToHost(cuda, &scratch, floats, begin.data(), world, headers.data());
  CheckAnswers(begin, ctx->input(2), headers.data(), [&](int64_t at, int64_t n) {
    std::vector<float> text(static_cast<size_t>(n));
    CopyToHost(cuda, text.data(), floats + at, n * int64_t{sizeof(float)});
    return text;
  });
  ctx->set_output(0, answers);
  ctx->set_output(1, ctx->input(1));
}
SOK_GPU_KERNEL(Name("Sok>ExchangeCheck").HostMemory("splits").HostMemory("asked").HostMemory("checked_splits"),
               FunctionOp<GpuExchangeCheck>);

class GpuExchangeCombineOp final : public PoolOp {
 public:
  using PoolOp::PoolOp;

  void Run(OpKernelContext* ctx) override {
    TfDeviceScratch scratch(ctx);
    const Tensor& answers = ctx->input(0);
    CheckRank(answers, 1, "answers");
    const std::vector<PooledFeature> features = Features(ctx);
    std::vector<float*> outputs;
    for (size_t f = 0; f < features.size(); ++f) {
      const TensorShape shape = CheckedShape({features[f].segments, features[f].dim});
      outputs.push_back(Output(ctx, static_cast<int>(f), shape)->flat<float>().data());
    }
    CombineAnswers(CudaOf(ctx), &scratch, answers.flat<float>().data(), answers.NumElements(), features.data(),
                   static_cast<int>(features.size()), outputs.data());
  }
};
SOK_GPU_KERNEL(Name("Sok>ExchangeCombine").HostMemory("splits"), GpuExchangeCombineOp);

class GpuExchangeCombineGradOp final : public PoolOp {
 public:
  using PoolOp::PoolOp;

  void Run(OpKernelContext* ctx) override {
    const int64_t size = AnswerFloats(ctx->input(num_features()));
    const std::vector<PooledFeature> features = Features(ctx);
    const std::vector<const float*> grads = Grads(ctx, features);
    float* packed = Output(ctx, 0, CheckedShape({size}))->flat<float>().data();
    TfDeviceScratch scratch(ctx);
    CombineAnswersGrad(CudaOf(ctx), &scratch, features.data(), num_features(), grads.data(), size, packed);
  }
};
SOK_GPU_KERNEL(Name("Sok>ExchangeCombineGrad").HostMemory("splits"), GpuExchangeCombineGradOp);

class GpuExchangeCombineGradWeightsOp final : public PoolOp {
 public:
  using PoolOp::PoolOp;

  void Run(OpKernelContext* ctx) override {
    if (dims_.size() != 1) throw InvalidArgument("gradients in weights are those of one feature.");
    const Tensor &grad = ctx->input(0), &answers = ctx->input(1);
    CheckRank(answers, 1, "answers");
    const PooledFeature feature = Features(ctx)[0];
    CheckShape(grad, {feature.segments, feature.dim}, "grad");
    float* out = Output(ctx, 0, ctx->input(4).shape())->flat<float>().data();
    if (ctx->input(4).NumElements() == 0) return;  // no weights, or no keys
    TfDeviceScratch scratch(ctx);
    CombineAnswersGradWeights(CudaOf(ctx), &scratch, answers.flat<float>().data(), answers.NumElements(), feature,
                              grad.flat<float>().data(), out);
  }
};
SOK_GPU_KERNEL(Name("Sok>ExchangeCombineGradWeights"), GpuExchangeCombineGradWeightsOp);

}  // namespace
}  // namespace sok
