// Sums of rows that are sorted by the segment they belong to, so that results repeat bit for bit however long the segments
// are.
//
// The sorted rows are cut into pieces of 32. A tile of lanes goes through a piece in order and writes every segment that
// lies wholly inside; of segments that reach over an edge it leaves a partial sum, at most one at either end. These are
// sorted by segment again, and 16 times fewer: they are summed in the same way, until one piece holds all. How rows are
// grouped depends on their number and the lengths of the segments alone, and the number of launches on the first only.
#pragma once

#include <cstdint>

#include "launch.h"
#include "sok/scratch.h"
#include "vector4.h"

namespace sok {

constexpr int64_t kRowsPerPiece = 32;
constexpr uint32_t kNoSegment = 0x7FFFFFFFu;    // no segment has this number
constexpr uint32_t kAddsNothing = 0x80000000u;  // a row of the segment in the other bits that has no value

// Rows of a matrix, by position.
template <class T>
struct MatrixAddends {
  const T* data;
  int64_t stride;  // elements from row to row

  __device__ __forceinline__ const T* At(uint32_t position) const { return data + int64_t{position} * stride; }
  __device__ __forceinline__ float FactorOf(uint32_t) const { return 1.0f; }
};

// Rows anywhere, by position, each with a factor unless `factor` is null.
template <class T>
struct ScatteredAddends {
  const T* const* source;  // [n]
  const float* factor;     // [n] or null

  __device__ __forceinline__ const T* At(uint32_t position) const { return source[position]; }
  __device__ __forceinline__ float FactorOf(uint32_t position) const {
    return factor == nullptr ? 1.0f : factor[position];
  }
};

// What one level reads and writes. Partial 2 p is what piece p adds to a segment that began before it, 2 p + 1 to one that
// begins in it and goes on; where there is no such segment the number says so.
struct PieceSums {
  const uint32_t* segments;   // [n], equal ones side by side; those >= limit are left out
  uint32_t limit;             // at most kNoSegment
  const uint32_t* positions;  // [n] or null: k
  int64_t n, dim;
  int lane_bits;
  float* sums;  // segment s at sums + s * stride
  int64_t stride;
  uint32_t* partial_segments;  // [2 * pieces]
  float* partials;             // [2 * pieces, partial_stride]
  int64_t partial_stride;      // dim, so much more that rows are aligned
};

template <class Addends>
__global__ void SumPiecesKernel(PieceSums work, Addends addends) {
  constexpr int64_t kAhead = 4;  // rows that are asked for before the first is added
  const int64_t lanes = int64_t{1} << work.lane_bits, pieces = (work.n + kRowsPerPiece - 1) / kRowsPerPiece;
  const int64_t lane = GlobalThread() & (lanes - 1);
  for (int64_t piece = GlobalThread() >> work.lane_bits; piece < pieces; piece += GlobalThreads() >> work.lane_bits) {
    const int64_t begin = piece * kRowsPerPiece;
    const int64_t end = begin + kRowsPerPiece < work.n ? begin + kRowsPerPiece : work.n;
    const uint32_t first = work.segments[begin] & ~kAddsNothing;
    const uint32_t last = work.segments[end - 1] & ~kAddsNothing;
    const bool from_left = begin > 0 && (work.segments[begin - 1] & ~kAddsNothing) == first;
    const bool to_right = end < work.n && (work.segments[end] & ~kAddsNothing) == last;
    if (lane == 0 && work.partial_segments != nullptr) {
      // A piece inside one segment has one partial; the second place must not part its neighbours.
      const bool inside = from_left && to_right && first == last;
      work.partial_segments[2 * piece] = from_left ? first : kNoSegment;
      work.partial_segments[2 * piece + 1] = inside ? last | kAddsNothing : to_right ? last : kNoSegment;
    }
    for (int64_t column = 4 * lane; column < work.dim; column += 4 * lanes) {
      const int count = ColumnsLeft(work.dim, column);
      auto put = [&](uint32_t segment, bool is_first_run, const Vector4& sum) {
        if (segment >= work.limit) return;
        float* to = work.sums + int64_t{segment} * work.stride;
        if (is_first_run && from_left) {
          to = work.partials + 2 * piece * work.partial_stride;
        } else if (segment == last && to_right) {
          to = work.partials + (2 * piece + 1) * work.partial_stride;
        }
        Store4(to + column, sum, count);
      };
      Vector4 sum = {};
      uint32_t current = first;
      bool is_first_run = true;
      for (int64_t k = begin; k < end; k += kAhead) {
        uint32_t segment[kAhead];
        Vector4 row[kAhead] = {};
        SOK_UNROLL
        for (int64_t a = 0; a < kAhead; ++a) {
          if (k + a >= end) break;
          segment[a] = work.segments[k + a];
          if (segment[a] >= work.limit) continue;
          const uint32_t position = work.positions == nullptr ? static_cast<uint32_t>(k + a) : work.positions[k + a];
          row[a] = Load4(addends.At(position) + column, count);
          const float factor = addends.FactorOf(position);
          if (factor != 1.0f)
            for (int j = 0; j < 4; ++j) row[a].x[j] *= factor;
        }
        SOK_UNROLL
        for (int64_t a = 0; a < kAhead; ++a) {
          if (k + a >= end) break;
          const uint32_t mine = segment[a] & ~kAddsNothing;
          if (mine != current) {
            put(current, is_first_run, sum);
            sum = Vector4{};
            current = mine;
            is_first_run = false;
          }
          if (segment[a] < work.limit)
            for (int j = 0; j < 4; ++j) sum.x[j] += row[a].x[j];
        }
      }
      put(current, is_first_run, sum);
    }
  }
}

// sums[s] = sum of the addends k with segments[k] == s, for every s that comes up; rows of others stay as they are.
template <class Addends>
void SumSorted(const Cuda& cuda, DeviceScratch* scratch, const Addends& addends,
               const uint32_t* segments,  // [n], ascending; those >= limit are left out
               uint32_t limit,
               const uint32_t* positions,  // [n]
               int64_t n, int64_t dim, float* sums, int64_t stride) {
  constexpr int kThreads = 256;
  if (n == 0 || dim == 0) return;
  PieceSums work = {
      segments, limit, positions, n, dim, LaneBits(dim), sums, stride, nullptr, nullptr, (dim + 3) & ~int64_t{3}};
  const float* level = nullptr;  // what the level before left; null: the addends themselves are summed
  while (true) {
    const int64_t pieces = (work.n + kRowsPerPiece - 1) / kRowsPerPiece;
    if (pieces > 1) {
      work.partial_segments = scratch->Get<uint32_t>(2 * pieces);
      work.partials = scratch->Get<float>(2 * pieces * work.partial_stride);
    } else {
      work.partial_segments = nullptr;
    }
    const int64_t grid = GridFor(pieces << work.lane_bits, kThreads);
    if (level == nullptr) {
      Launch(SumPiecesKernel<Addends>, grid, kThreads, 0, cuda, work, addends);
    } else {
      Launch(SumPiecesKernel<MatrixAddends<float>>, grid, kThreads, 0, cuda, work,
             MatrixAddends<float>{level, work.partial_stride});
    }
    if (pieces == 1) return;
    level = work.partials;
    work.segments = work.partial_segments;
    work.positions = nullptr;
    work.n = 2 * pieces;
  }
}

}  // namespace sok
