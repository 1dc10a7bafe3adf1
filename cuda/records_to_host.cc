#include "detail/records_to_host.h"

#include <cuda_runtime.h>

#include <optional>

#include "detail/check.h"
#include "detail/staging.h"
#include "sok/row_store.h"

namespace sok {

void TakeStage(StreamScratch* scratch, int64_t n, int64_t floats) {
  if (n == 0 || floats == 0) return;
  const int64_t staged = std::min(n * floats, StageRows(1));
  scratch->Reset();
  scratch->Get<float>(staged);
  const PinnedLease lease(std::min(staged * int64_t{sizeof(float)}, kMostUploaded));  // to be found again by the copy
}

void RecordsToHost(const Cuda& cuda, StreamScratch* scratch, const DeviceRows& records, const uint32_t* rows, int64_t n,
                   int64_t first, int64_t floats, float* to) {
  if (n == 0 || floats == 0) return;
  const int64_t at_a_time = std::min(n, std::max<int64_t>(1, StageRows(floats) / 2));
  const int64_t stage_bytes = at_a_time * floats * int64_t{sizeof(float)};
  struct Turn {
    std::optional<PinnedLease> lease;
    float* stage = nullptr;
    int64_t at = 0, count = 0;  // the rows on their way
  };
  Turn turns[2];
  auto arrive = [&](Turn* turn) {
    if (turn->count == 0) return;
    turn->lease->Wait();
    const auto* from = static_cast<const float*>(turn->lease->data());
    std::copy_n(from, turn->count * floats, to + turn->at * floats);
    turn->count = 0;
  };
  scratch->Reset();
  int which = 0;
  for (int64_t at = 0; at < n; at += at_a_time, which ^= 1) {
    Turn& turn = turns[which];
    arrive(&turn);
    if (!turn.lease) {
      turn.stage = scratch->Get<float>(at_a_time * floats);
      turn.lease.emplace(stage_bytes);
    }
    const int64_t count = std::min(at_a_time, n - at);
    GatherRecords(cuda, records, rows + at, count, first, floats, turn.stage);
    SOK_CUDA(cudaMemcpyAsync(turn.lease->data(), turn.stage, static_cast<size_t>(count * floats) * sizeof(float),
                             cudaMemcpyDeviceToHost, cuda.stream));
    turn.lease->Mark(cuda);
    turn.at = at;
    turn.count = count;
  }
  arrive(&turns[which]);
  arrive(&turns[which ^ 1]);
}

}  // namespace sok
