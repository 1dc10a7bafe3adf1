#include "c_api.h"

#include <vector>

#include "c_api_guard.h"
#include "sok/combine.h"
#include "sok/combine_grad.h"
#include "sok/device_update.h"
#include "sok/float_type.h"
#include "sok/partition.h"
#include "sok/segment_sum.h"
#include "sok/sum_rows.h"
#include "sok/unique.h"

struct SokCudaDecay {
  sok::DeviceDecay decay;
};

namespace sok {

std::string* LastError() {
  thread_local std::string text;
  return &text;
}

namespace {

UniqueOrder OrderOf(int in_order) { return in_order != 0 ? UniqueOrder::kFirstAppearance : UniqueOrder::kAny; }

// Structures of the interface have the fields of ours, in their order.

DeviceRows RowsOf(const SokCudaRows& c) {
  return {static_cast<float* const*>(c.slabs), c.matrix, static_cast<int>(c.shift), c.mask, c.stride};
}

DeviceSegments SegmentsOf(const SokCudaSegments& c) { return {c.row_splits, c.hotness, c.segments, c.n}; }

DeviceFeature FeatureOf(const SokCudaFeature& c) {
  const DeviceSegments segments = SegmentsOf(c.segments);
  const Combiner combiner = ParseCombiner(c.combiner);
  return {RowsOf(c.rows), c.num_rows, c.dim, c.index, segments, c.weights, combiner, c.output, c.output_stride, {}};
}

std::vector<DeviceAddends> AddendsOf(const SokCudaAddends* addends, int64_t num_addends) {
  std::vector<DeviceAddends> all;
  for (int64_t k = 0; k < num_addends; ++k) {
    const SokCudaAddends& c = addends[k];
    all.push_back(
        {c.table, c.row_ids, c.values, c.values_stride, SegmentsOf(c.segments), c.weights, ParseCombiner(c.combiner)});
  }
  return all;
}

DeviceUpdate UpdateOf(const SokCudaUpdate& c) {
  DeviceUpdate update;
  update.rows = RowsOf(c.rows);
  update.num_rows = c.num_rows;
  update.slot_offset = c.slot_offset;
  return update;
}

SokCudaDecay* DecayOf(const SokCudaUpdate& c) {
  if (c.decay == nullptr || c.stamps == nullptr) {
    throw InvalidArgument("a rule that decays needs `decay` and `stamps` for every table.");
  }
  return c.decay;
}

}  // namespace
}  // namespace sok

const char* sok_cuda_last_error(void) { return sok::LastError()->c_str(); }

int sok_cuda_is_emulated(void) {
#if defined(SOK_CUDA_EMULATED)
  return 1;
#else
  return 0;
#endif
}

int sok_cuda_context_create(void* stream, SokCudaContext** context) {
#if defined(SOK_CUDA_EMULATED)
  sok_emulator::HostMemoryIsDevice();  // callers bring NumPy's arrays for the device's
#endif
  return sok::Guard([&] { *context = new SokCudaContext(stream); });
}

void sok_cuda_context_destroy(SokCudaContext* context) {
  if (context == nullptr) return;
  const sok::HomeDevice::Visit visit(context->home);
  delete context;
}

int sok_cuda_synchronize(SokCudaContext* context) {
  return sok::GuardWith(
      context, [](const sok::Cuda& cuda, sok::StreamScratch*) { SOK_CUDA(cudaStreamSynchronize(cuda.stream)); });
}

int sok_cuda_unique(SokCudaContext* context, const uint64_t* keys, int64_t n, int in_order, uint64_t* unique_keys,
                    uint32_t* inverse, uint32_t* counts, int64_t* num_unique) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    sok::Unique(cuda, scratch, keys, n, sok::OrderOf(in_order), unique_keys, inverse, counts, num_unique);
  });
}

int sok_cuda_unique_to_host(SokCudaContext* context, const uint64_t* keys, int64_t n, int in_order,
                            uint64_t* unique_keys, uint32_t* inverse, uint32_t* counts, int64_t* num_unique) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    *num_unique = sok::UniqueToHost(cuda, scratch, keys, n, sok::OrderOf(in_order), unique_keys, inverse, counts);
  });
}

int sok_cuda_unsorted_segment_sum(SokCudaContext* context, const void* data, const char* type, const int64_t* ids,
                                  int64_t n, int64_t dim, int64_t num_segments, int fixed, float* sums,
                                  uint64_t* first_bad) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    sok::UnsortedSegmentSum(cuda, scratch, data, sok::ParseFloatType(type), ids, n, dim, num_segments,
                            fixed != 0 ? sok::SumOrder::kFixed : sok::SumOrder::kAny, sums, first_bad);
  });
}

int sok_cuda_partition_keys(SokCudaContext* context, const uint64_t* keys, int64_t n, int world_size, int owner,
                            int is_unsigned, uint64_t* sorted_keys, uint32_t* positions, uint32_t* places,
                            int64_t* counts) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    sok::Partition partition;
    partition.world_size = world_size;
    partition.owner = owner;
    partition.is_unsigned = is_unsigned != 0;
    sok::PartitionKeys(cuda, scratch, partition, keys, n, sorted_keys, positions, places, counts);
  });
}

int sok_cuda_combine_group(SokCudaContext* context, const SokCudaFeature* features, int64_t num_features,
                           const char* output_type, uint64_t* first_bad) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    std::vector<sok::DeviceFeature> all;
    for (int64_t k = 0; k < num_features; ++k) all.push_back(sok::FeatureOf(features[k]));
    sok::CombineGroup(cuda, scratch, all.data(), num_features, sok::ParseFloatType(output_type), first_bad);
  });
}

int sok_cuda_expand_segments(SokCudaContext* context, const SokCudaSegments* segments, const float* weights,
                             const char* combiner, uint32_t* segment_of, float* factor) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    sok::ExpandSegments(cuda, scratch, sok::SegmentsOf(*segments), weights, sok::ParseCombiner(combiner), segment_of,
                        factor);
  });
}

int sok_cuda_combine_grad_weights(SokCudaContext* context, const SokCudaFeature* feature, const float* grad,
                                  float* grad_weights, uint64_t* first_bad) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch*) {
    sok::CombineGradWeights(cuda, sok::FeatureOf(*feature), grad, grad_weights, first_bad);
  });
}

int sok_cuda_combine_grad_rows(SokCudaContext* context, const float* grad, const int64_t* index,
                               const SokCudaSegments* segments, const float* weights, int64_t num_rows, int64_t dim,
                               const char* combiner, float* grad_rows, uint64_t* first_bad) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    sok::CombineGradRows(cuda, scratch, grad, index, sok::SegmentsOf(*segments), weights, num_rows, dim,
                         sok::ParseCombiner(combiner), grad_rows, first_bad);
  });
}

int sok_cuda_sum_rows(SokCudaContext* context, const SokCudaAddends* addends, int64_t num_addends,
                      const int64_t* table_rows, int64_t num_tables, int64_t dim, const char* type, int64_t* row_ids,
                      int32_t* tables, float* sums, int64_t* num_sums, uint64_t* first_bad) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    const std::vector<sok::DeviceAddends> all = sok::AddendsOf(addends, num_addends);
    sok::SumRows(cuda, scratch, all.data(), num_addends, table_rows, num_tables, dim, sok::ParseFloatType(type),
                 row_ids, tables, sums, num_sums, first_bad);
  });
}

int sok_cuda_sum_rows_of_tables(SokCudaContext* context, const SokCudaAddends* addends, int64_t num_addends,
                                const SokCudaRowSums* tables, int64_t num_tables, const char* type,
                                uint64_t* first_bad) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    const std::vector<sok::DeviceAddends> all = sok::AddendsOf(addends, num_addends);
    std::vector<sok::DeviceRowSums> sums;
    for (int64_t t = 0; t < num_tables; ++t) {
      sums.push_back({tables[t].num_rows, tables[t].dim, tables[t].row_ids, tables[t].sums, tables[t].num_sums});
    }
    sok::SumRowsOfTables(cuda, scratch, all.data(), num_addends, sums.data(), num_tables, sok::ParseFloatType(type),
                         first_bad);
  });
}

int sok_cuda_decay_create(SokCudaDecay** decay) {
  return sok::Guard([&] { *decay = new SokCudaDecay(); });
}

void sok_cuda_decay_destroy(SokCudaDecay* decay) { delete decay; }

int sok_cuda_update_rows(SokCudaContext* context, const char* rule, const double* hyper, int64_t hyper_size,
                         int64_t step, const SokCudaUpdate* updates, int64_t num_tables, const int32_t* tables,
                         const int64_t* row_ids, const void* grads, const char* type, int64_t n,
                         const int64_t* num_grads, int64_t dim, float grad_scale, const char* nonfinite,
                         uint64_t* first_bad) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch* scratch) {
    const sok::UpdateRule made = sok::MakeUpdateRule(rule, hyper, hyper_size, step);
    const sok::Nonfinite mode = sok::ParseNonfinite(nonfinite);
    const sok::FloatType grad_type = sok::ParseFloatType(type);
    std::vector<sok::DeviceUpdate> all;
    for (int64_t t = 0; t < num_tables; ++t) {
      all.push_back(sok::UpdateOf(updates[t]));
      if (made.decays()) all.back().decay = sok::DecayOf(updates[t])->decay.Begin(cuda, made, updates[t].stamps);
    }
    sok::UpdateRows(cuda, scratch, made, all.data(), num_tables, tables, row_ids, grads, grad_type, n, num_grads, dim,
                    grad_scale, mode, first_bad);
    // A call that is refused must not count.
    if (made.decays() && mode == sok::Nonfinite::kRaise) sok::ThrowIfBadToHost(cuda, first_bad, row_ids, n);
    for (int64_t t = 0; made.decays() && t < num_tables; ++t) updates[t].decay->decay.Append(cuda);
  });
}

int sok_cuda_settle_rows(SokCudaContext* context, const char* rule, const double* hyper, int64_t hyper_size,
                         int64_t step, const SokCudaUpdate* update, const int64_t* row_ids, int64_t n, int64_t dim) {
  return sok::GuardWith(context, [&](const sok::Cuda& cuda, sok::StreamScratch*) {
    sok::DeviceUpdate one = sok::UpdateOf(*update);
    const sok::UpdateRule made = sok::MakeUpdateRule(rule, hyper, hyper_size, step);
    if (sok::DecayOf(*update)->decay.calls() == 0) return;
    one.decay = update->decay->decay.args(update->stamps);
    sok::SettleRows(cuda, made, one, row_ids, n, dim);
  });
}

int sok_cuda_throw_if_bad_to_host(SokCudaContext* context, const uint64_t* first_bad, const int64_t* row_ids,
                                  int64_t n) {
  return sok::GuardWith(
      context, [&](const sok::Cuda& cuda, sok::StreamScratch*) { sok::ThrowIfBadToHost(cuda, first_bad, row_ids, n); });
}
