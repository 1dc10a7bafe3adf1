// Records of rows on their way to the memory of the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "scratch.h"
#include "sok/device_rows.h"

namespace sok {

// How many floats of rows are on their way at a time.
constexpr int64_t kStageFloats = int64_t{8} << 20;

inline int64_t StageRows(int64_t floats) { return std::max<int64_t>(1, kStageFloats / std::max<int64_t>(1, floats)); }

// Takes the memory, pinned and on the device, by way of which n records of so many floats come from the host. Before rows are made:
// should there be none, there are no rows without their values. Throws OutOfMemory.
void TakeStage(StreamScratch* scratch, int64_t n, int64_t floats);

// to[i] = floats first .. first + floats - 1 of the record of rows[i], on the host. Two blocks of pinned memory take turns: while
// rows come into one, those of the other go to where they belong.
void RecordsToHost(const Cuda& cuda, StreamScratch* scratch, const DeviceRows& records, const uint32_t* rows, int64_t n,
                   int64_t first, int64_t floats, float* to);

}  // namespace sok
