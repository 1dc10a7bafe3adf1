// Keys to their owners, of ids that lie on a GPU: distinct ones come to the host, and nothing else.
#include <string>
#include <vector>

#include "../exchange_route.h"
#include "gpu_op.h"

namespace sok {
namespace {

// Waits for the stream twice: for how many keys each rank is asked for, and for the keys.
class GpuExchangeRouteRowsOp final : public ExchangeRouteOp {
 public:
  using ExchangeRouteOp::ExchangeRouteOp;

 private:
  void Route(OpKernelContext* ctx, const Tables& tables, const Inputs& in) const override {
    const int num_features = in.keys.size(), num_tables = static_cast<int>(tables.size());
    const int world = tables[0]->config().world_size;
    const Cuda cuda = CudaOf(ctx);
    TfDeviceScratch scratch(ctx);
    const ScratchLease host_scratch;
    const std::vector<RouteTable> route_tables =
        RouteTables(tables, std::vector<WayHome>(tables.size(), WayHome::kRows));
    std::vector<RouteFeature> features;
    for (int f = 0; f < num_features; ++f) {
      const int64_t n = in.keys[f].NumElements();
      features.push_back({static_cast<int>(table_of_[f]), in.keys[f].data(), IsWide(in.keys[f].dtype()), n,
                          static_cast<int32_t*>(Output(ctx, 3 + f, CheckedShape({n}))->data())});
      // Where rows are pooled decides in which order keys are told, as on the CPU. They lie on the host.
      if (MaySum(in, f)) features.back().row_splits = Int64(in.row_splits[f]);
    }
    DeviceRoute on_device;
    Layout layout;
    const Fault fault = Find(tables, in, [&](Fault* found) {
      on_device =
          RouteKeysToHost(cuda, &scratch, route_tables.data(), num_tables, features.data(), num_features, world);
      if (!on_device.is_legal) {
        found->feature = on_device.bad_feature;
        found->status = {kKeyOutOfRange, static_cast<int64_t>(on_device.bad_key)};
        return;
      }
      layout = LayoutOf(on_device, route_tables, world);
      CheckSizes(layout.route(), num_tables, world);
      int64_t floats = 0;
      for (const int64_t of_rank : layout.floats) floats += of_rank;
      CheckMemory(ctx, tables, in, floats);
    });
    if (fault.status.status != kFine) {
      for (const RouteFeature& feature : features)
        ZeroOnDevice(cuda, feature.index, feature.n * int64_t{sizeof(int32_t)});
      return Tell(ctx, fault, in, world);
    }
    uint64_t* keys = host_scratch.get()->Get<uint64_t>(on_device.begin.back());
    WriteRouteToHost(cuda, &scratch, on_device, route_tables.data(), num_tables, features.data(), num_features,
                     layout.places.data(), keys);
    if (is_wide_) {
      Send<int64_t>(ctx, in, layout, num_tables, keys);
    } else {
      Send<int32_t>(ctx, in, layout, num_tables, keys);
    }
  }

  // What the host makes of how many keys each rank is asked for.
  struct Layout {
    std::vector<int64_t> counts;         // [world, CountsPerRank]
    std::vector<int64_t> words, floats;  // [world]
    std::vector<int64_t> places;         // [world, num_tables]

    sok::Route route() const {
      sok::Route route;
      route.counts = counts.data();
      route.words = words.data();
      route.floats = floats.data();
      return route;
    }
  };

  Layout LayoutOf(const DeviceRoute& on_device, const std::vector<RouteTable>& tables, int world) const {
    const size_t num_tables = tables.size();
    Layout layout;
    layout.places.resize(static_cast<size_t>(world) * num_tables);
    int64_t place = 0, of_others = 0;  // floats of copies, whose gradients travel
    for (size_t r = 0; r < static_cast<size_t>(world); ++r) {
      const int64_t* begin = &on_device.begin[r * num_tables];
      const int64_t first = place;
      place += kAnswerHeader;
      for (const bool of_copies : {false, true}) {
        for (size_t t = 0; t < num_tables; ++t) {
          if (tables[t].is_copy != of_copies) continue;
          layout.places[r * num_tables + t] = place;
          (tables[t].comes_home ? place : of_others) += (begin[t + 1] - begin[t]) * tables[t].dim;
        }
      }
      for (size_t t = 0; t < num_tables; ++t) layout.counts.push_back(begin[t + 1] - begin[t]);
      layout.counts.resize(layout.counts.size() + 2 * table_of_.size());
      layout.words.push_back(begin[num_tables] - begin[0]);
      layout.floats.push_back(place - first);
    }
    if (place + of_others > kPlaceMask) {
      throw InvalidArgument(
          "the rows that one worker asks for in one lookup must have less than 2^31 floats. Received: " +
          std::to_string(place + of_others) + ".");
    }
    return layout;
  }

  template <class Word>
  void Send(OpKernelContext* ctx, const Inputs& in, const Layout& layout, int64_t num_tables,
            const uint64_t* keys) const {
    const int world = static_cast<int>(layout.words.size());
    std::vector<int64_t> word_begin(layout.words.size());
    Word* words = OutputMessages<Word>(ctx, in, layout.route(), world, num_tables, word_begin.data());
    for (size_t r = 0; r < layout.words.size(); ++r) {
      for (int64_t k = 0; k < layout.words[r]; ++k) words[word_begin[r] + k] = static_cast<Word>(*keys++);
    }
  }
};
SOK_GPU_KERNEL(Name("Sok>ExchangeRouteRows")
                   .HostMemory("handles")
                   .HostMemory("call")
                   .HostMemory("insert")
                   .HostMemory("row_splits")
                   .HostMemory("words")
                   .HostMemory("splits")
                   .HostMemory("asked"),
               GpuExchangeRouteRowsOp);

}  // namespace
}  // namespace sok
