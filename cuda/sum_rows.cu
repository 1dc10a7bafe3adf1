// Row ids are small integers, so sorting them costs fewer bytes than hashing and gives what a repeatable sum needs anyway:
// addends of a row side by side, in order of position. Tables of a group share one sort, for launches are what a group of
// many small tables would pay for.
//
// Each table has a stretch of the positions, of whole pieces of 32, and as many numbers to sort by as it has rows, and
// more for what is dropped. So its stretch is the same after the sort as before, and the host knows where it is.
#include "sok/sum_rows.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "detail/launch.h"
#include "detail/primitives.h"
#include "detail/segments.h"
#include "detail/sum_sorted.h"
#include "detail/upload.h"
#include "detail/vector4.h"
#include "detail/work_of_block.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kAddendsPerBlock = 4 * kThreads;
constexpr int64_t kTailRows = 128;                  // to a block
constexpr int64_t kMostNumbers = INT64_C(1) << 32;  // to sort by

// One lookup's addends.
struct SumWork {
  DeviceAddends addends;
  float* scales;  // [segments], where there are weights
  uint64_t* first_bad;
  int64_t first, room;  // its positions; from addends.segments.n on they are dropped
  int64_t base;         // the number of its table's first row
  int64_t num_rows;     // of its table
  bool keeps_unknown;   // rows that its table does not have are summed as one more
  int64_t first_block;
};

// One table's stretch.
struct Stretch {
  int64_t first, room;
  uint32_t dropped;               // the number of what adds to no row
  int64_t first_work, last_work;  // the lookups whose addends they are
  int64_t first_sum;              // where its first sum goes, in rows
  bool goes_on;                   // its sums lie behind those of the stretches before
  int64_t* row_ids;
  int32_t* tables;    // or null
  int64_t* num_sums;  // or null
  int64_t first_block;
};

// What one table has room for beyond its sums, which it has none of.
struct Tail {
  int64_t* row_ids;
  float* sums;
  const int64_t* num_sums;
  int64_t size, dim, first_block;
};

// Segments that have scales, or are checked.
struct SegmentWork {
  DeviceSegments segments;
  const float* weights;
  Combiner combiner;
  float* scales;        // or null
  uint64_t* first_bad;  // or null
  int64_t first_block;
};

__device__ __forceinline__ int64_t RowNumber(int64_t row_id) { return row_id < 0 ? -1 : row_id & 0xFFFFFFFFll; }

// f(work, i) for the items of this block, of `size(work)` each.
template <class Of, class Size, class F>
__device__ __forceinline__ void ForItems(const Of* all, int64_t count, int64_t num_blocks, const Size& size,
                                         const F& f) {
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const Of& work = WorkOfBlock(all, count, block);
    const int64_t begin = (block - work.first_block) * kAddendsPerBlock, n = size(work);
    const int64_t end = begin + kAddendsPerBlock < n ? begin + kAddendsPerBlock : n;
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) f(work, i);
  }
}

__global__ void SegmentsKernel(const SegmentWork* all, int64_t count, int64_t num_blocks) {
  auto size = [](const SegmentWork& work) { return work.segments.segments; };
  ForItems(all, count, num_blocks, size, [](const SegmentWork& work, int64_t s) {
    int64_t first, last;
    work.segments.Bounds(s, &first, &last);
    if (first < 0) ReportBad(work.first_bad, work.segments.n + s);
    if (work.scales == nullptr) return;
    work.scales[s] = first < 0 ? 0.0f : SegmentScale(work.combiner, work.weights + first, last - first);
  });
}

template <class T>
__global__ void ListAddendsKernel(const SumWork* all, int64_t num_work, int64_t num_blocks,
                                  uint32_t* numbers,    // [n]
                                  uint32_t* positions,  // [n]
                                  const T** source,     // [n]
                                  float* factor) {      // [n] or null
  auto size = [](const SumWork& work) { return work.room; };
  ForItems(all, num_work, num_blocks, size, [&](const SumWork& work, int64_t i) {
    const DeviceAddends& a = work.addends;
    const int64_t k = work.first + i, row = i < a.segments.n ? RowNumber(a.row_ids[i]) : -1;
    const bool is_unknown = row >= work.num_rows;
    if (is_unknown) ReportBad(work.first_bad, i);
    uint32_t number = static_cast<uint32_t>(work.base + work.num_rows + (work.keeps_unknown ? 1 : 0));
    if (row >= 0 && (!is_unknown || work.keeps_unknown)) {
      const int64_t s = SegmentOf(a.segments, i);
      if (s >= 0) {
        number = static_cast<uint32_t>(work.base + (is_unknown ? work.num_rows : row));
        source[k] = static_cast<const T*>(a.values) + s * a.values_stride;
        if (factor != nullptr) {
          int64_t first, last;
          a.segments.Bounds(s, &first, &last);
          factor[k] =
              a.weights != nullptr ? work.scales[s] * a.weights[i] : SegmentScale(a.combiner, nullptr, last - first);
        }
      }
    }
    numbers[k] = number;
    positions[k] = static_cast<uint32_t>(k);
  });
}

__global__ void HeadsKernel(const Stretch* all, int64_t num_stretches, int64_t num_blocks, const uint32_t* sorted,
                            uint32_t* is_head) {  // [n]
  auto size = [](const Stretch& stretch) { return stretch.room; };
  ForItems(all, num_stretches, num_blocks, size, [&](const Stretch& stretch, int64_t i) {
    const int64_t k = stretch.first + i;
    is_head[k] = sorted[k] != stretch.dropped && (i == 0 || sorted[k] != sorted[k - 1]) ? 1 : 0;
  });
}

__global__ void NumberRowsKernel(const Stretch* all, int64_t num_stretches, int64_t num_blocks, const SumWork* work,
                                 const uint32_t* sorted, const uint32_t* positions, const uint32_t* is_head,
                                 const uint32_t* before,
                                 uint32_t* segments) {  // [n]; kNoSegment: dropped
  auto size = [](const Stretch& stretch) { return stretch.room; };
  ForItems(all, num_stretches, num_blocks, size, [&](const Stretch& stretch, int64_t i) {
    const int64_t k = stretch.first + i;
    const uint32_t here = before[k] - (stretch.goes_on ? 0 : before[stretch.first]), number = here + is_head[k];
    segments[k] = sorted[k] != stretch.dropped ? static_cast<uint32_t>(stretch.first_sum + number - 1) : kNoSegment;
    if (is_head[k] != 0) {
      // The row's first addend has its id whole.
      const int64_t position = positions[k];
      int64_t w = stretch.first_work;
      while (w + 1 < stretch.last_work && work[w + 1].first <= position) ++w;
      stretch.row_ids[here] = work[w].addends.row_ids[position - work[w].first];
      if (stretch.tables != nullptr) stretch.tables[here] = static_cast<int32_t>(work[w].addends.table);
    }
    if (i == stretch.room - 1 && stretch.num_sums != nullptr) *stretch.num_sums = number;
  });
}

__global__ void FillTailsKernel(const Tail* all, int64_t num_tails, int64_t num_blocks) {
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const Tail& tail = WorkOfBlock(all, num_tails, block);
    int64_t begin = (block - tail.first_block) * kTailRows;
    const int64_t end = begin + kTailRows < tail.size ? begin + kTailRows : tail.size, count = *tail.num_sums;
    if (begin < count) begin = count;
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) tail.row_ids[i] = -1;
    for (int64_t i = begin * tail.dim + threadIdx.x; i < end * tail.dim; i += blockDim.x) tail.sums[i] = 0.0f;
  }
}

int64_t BlocksFor(int64_t n) { return (n + kAddendsPerBlock - 1) / kAddendsPerBlock; }

// Tables that share a sort, by dim.
class SumGroup {
 public:
  SumGroup(const DeviceAddends* addends, const std::vector<std::vector<int64_t>>& of_table, uint64_t* first_bad)
      : addends_(addends), of_table_(&of_table), first_bad_(first_bad) {}

  int64_t num_numbers() const { return num_numbers_; }
  bool empty() const { return stretches_.empty(); }

  // How many numbers a table takes.
  static int64_t NumbersFor(int64_t num_rows, bool keeps_unknown) { return num_rows + (keeps_unknown ? 2 : 1); }

  // first_sum, goes_on and where the results go are the caller's to give.
  void Add(int64_t table, int64_t num_rows, bool keeps_unknown, int64_t dim, float* sums, Stretch stretch,
           Tail tail = {}) {
    stretch.first = n_;
    stretch.first_work = static_cast<int64_t>(work_.size());
    for (const int64_t k : (*of_table_)[static_cast<size_t>(table)]) {
      const DeviceAddends& a = addends_[k];
      is_scaled_ = is_scaled_ || a.weights != nullptr || a.combiner != Combiner::kSum;
      uint64_t* bad = first_bad_ == nullptr ? nullptr : first_bad_ + k;
      if (a.weights != nullptr || (bad != nullptr && a.segments.row_splits != nullptr)) {
        segments_.push_back({a.segments, a.weights, a.combiner, nullptr, bad, segment_blocks_});
        segment_blocks_ += BlocksFor(a.segments.segments);
        scaled_work_.push_back(a.weights == nullptr ? -1 : static_cast<int64_t>(work_.size()));
      }
      if (a.segments.n == 0) continue;
      work_.push_back({a, nullptr, bad, n_, a.segments.n, num_numbers_, num_rows, keeps_unknown, 0});
      n_ += a.segments.n;
    }
    const int64_t end = stretch.first + std::max(kRowsPerPiece, (n_ - stretch.first + kRowsPerPiece - 1) /
                                                                    kRowsPerPiece * kRowsPerPiece);
    if (n_ == stretch.first) {  // nothing but positions that are dropped
      work_.push_back({{}, nullptr, nullptr, n_, 0, num_numbers_, num_rows, keeps_unknown, 0});
    }
    work_.back().room += end - n_;
    stretch.room = end - stretch.first;
    num_numbers_ += NumbersFor(num_rows, keeps_unknown);
    stretch.dropped = static_cast<uint32_t>(num_numbers_ - 1);
    stretch.last_work = static_cast<int64_t>(work_.size());
    stretch.first_block = stretch_blocks_;
    stretch_blocks_ += BlocksFor(stretch.room);
    n_ = end;
    stretches_.push_back(stretch);
    if (tail.size > 0) {
      tail.first_block = tail_blocks_;
      tail_blocks_ += (tail.size + kTailRows - 1) / kTailRows;
      tails_.push_back(tail);
    }
    if (ranges_.empty() || ranges_.back().dim != dim) ranges_.push_back({dim, stretch.first, end, sums});
    ranges_.back().end = end;
  }

  void Sum(const Cuda& cuda, DeviceScratch* scratch, FloatType type) {
    int64_t work_blocks = 0;
    for (SumWork& work : work_) {
      work.first_block = work_blocks;
      work_blocks += BlocksFor(work.room);
    }
    for (size_t s = 0; s < segments_.size(); ++s) {
      if (scaled_work_[s] < 0) continue;
      segments_[s].scales = scratch->Get<float>(segments_[s].segments.segments);
      // A lookup without positions has no work that could ask.
      if (segments_[s].segments.n > 0) work_[static_cast<size_t>(scaled_work_[s])].scales = segments_[s].scales;
    }
    Parcel parcel;
    const auto work_at = parcel.Add(work_.data(), static_cast<int64_t>(work_.size()));
    const auto stretches_at = parcel.Add(stretches_.data(), static_cast<int64_t>(stretches_.size()));
    const auto segments_at = parcel.Add(segments_.data(), static_cast<int64_t>(segments_.size()));
    const auto tails_at = parcel.Add(tails_.data(), static_cast<int64_t>(tails_.size()));
    parcel.Send(cuda, scratch);
    const SumWork* work = parcel.On(work_at);
    const Stretch* stretches = parcel.On(stretches_at);
    const int64_t num_work = static_cast<int64_t>(work_.size()),
                  num_stretches = static_cast<int64_t>(stretches_.size());
    Launch(SegmentsKernel, GridFor(segment_blocks_, 1), kThreads, 0, cuda, parcel.On(segments_at),
           static_cast<int64_t>(segments_.size()), segment_blocks_);
    uint32_t *numbers = scratch->Get<uint32_t>(n_), *given = scratch->Get<uint32_t>(n_);
    uint32_t *sorted = scratch->Get<uint32_t>(n_), *positions = scratch->Get<uint32_t>(n_);
    float* factor = is_scaled_ ? scratch->Get<float>(n_) : nullptr;
    int bits = 1;  // CUB sorts by one bit at least
    while (bits < 32 && ((num_numbers_ - 1) >> bits) != 0) ++bits;
    WithFloatType(type, [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      const T** source = scratch->Get<const T*>(n_);
      Launch(ListAddendsKernel<T>, GridFor(work_blocks, 1), kThreads, 0, cuda, work, num_work, work_blocks, numbers,
             given, source, factor);
      SortPairs(cuda, scratch, numbers, given, n_, bits, sorted, positions);
      uint32_t *is_head = scratch->Get<uint32_t>(n_), *before = scratch->Get<uint32_t>(n_);
      uint32_t* segments = scratch->Get<uint32_t>(n_);
      const int64_t grid = GridFor(stretch_blocks_, 1);
      Launch(HeadsKernel, grid, kThreads, 0, cuda, stretches, num_stretches, stretch_blocks_, sorted, is_head);
      ExclusiveSum(cuda, scratch, is_head, before, n_);
      Launch(NumberRowsKernel, grid, kThreads, 0, cuda, stretches, num_stretches, stretch_blocks_, work, sorted,
             positions, is_head, before, segments);
      Launch(FillTailsKernel, GridFor(tail_blocks_, 1), kThreads, 0, cuda, parcel.On(tails_at),
             static_cast<int64_t>(tails_.size()), tail_blocks_);
      for (const Range& range : ranges_) {
        SumSorted(cuda, scratch, ScatteredAddends<T>{source, factor}, segments + range.begin, kNoSegment,
                  positions + range.begin, range.end - range.begin, range.dim, range.sums, range.dim);
      }
    });
  }

 private:
  struct Range {  // of positions, whose tables have one dim
    int64_t dim, begin, end;
    float* sums;
  };

  const DeviceAddends* addends_;
  const std::vector<std::vector<int64_t>>* of_table_;
  uint64_t* first_bad_;
  std::vector<SumWork> work_;
  std::vector<Stretch> stretches_;
  std::vector<SegmentWork> segments_;
  std::vector<int64_t> scaled_work_;  // of each of them, the work that reads its scales; -1: none
  std::vector<Range> ranges_;
  std::vector<Tail> tails_;
  int64_t n_ = 0, num_numbers_ = 0, stretch_blocks_ = 0, segment_blocks_ = 0, tail_blocks_ = 0;
  bool is_scaled_ = false;
};

// The addends of each table. Throws InvalidArgument.
std::vector<std::vector<int64_t>> ByTable(const DeviceAddends* addends, int64_t num_addends, int64_t num_tables) {
  std::vector<std::vector<int64_t>> of_table(static_cast<size_t>(num_tables));
  int64_t n = num_tables * kRowsPerPiece;  // each may have some that are dropped
  for (int64_t k = 0; k < num_addends; ++k) {
    const DeviceAddends& a = addends[k];
    if (a.table < 0 || a.table >= num_tables) {
      throw InvalidArgument("addends " + std::to_string(k) + ": table " + std::to_string(a.table) +
                            " is not one of the " + std::to_string(num_tables) + " of the group.");
    }
    if (a.segments.n < 0 || a.segments.n >= kNoSegment - n) {
      throw InvalidArgument("fewer than 2^31 gradient rows in one call; addends " + std::to_string(k) + " with " +
                            std::to_string(a.segments.n) + " do not fit.");
    }
    n += a.segments.n;
    of_table[static_cast<size_t>(a.table)].push_back(k);
  }
  return of_table;
}

void CheckDim(int64_t dim) {
  if (dim < 1) throw InvalidArgument("dim must be at least 1. Received: " + std::to_string(dim) + ".");
}

}  // namespace

void SumRows(const Cuda& cuda, DeviceScratch* scratch, const DeviceAddends* addends, int64_t num_addends,
             const int64_t* table_rows, int64_t num_tables, int64_t dim, FloatType type, int64_t* row_ids,
             int32_t* tables, float* sums, int64_t* num_sums, uint64_t* first_bad) {
  CheckDim(dim);
  const auto of_table = ByTable(addends, num_addends, num_tables);
  SumGroup group(addends, of_table, first_bad);
  for (int64_t t = 0; t < num_tables; ++t) {
    if (table_rows[t] < 0 || SumGroup::NumbersFor(table_rows[t], false) >= kMostNumbers - group.num_numbers()) {
      throw InvalidArgument("the tables of one group must have fewer than 2^32 - " + std::to_string(num_tables) +
                            " rows together; table " + std::to_string(t) + " with " + std::to_string(table_rows[t]) +
                            " does not fit. Give them in two calls.");
    }
    Stretch stretch = {};
    stretch.goes_on = true;
    stretch.row_ids = row_ids;
    stretch.tables = tables;
    stretch.num_sums = t == num_tables - 1 ? num_sums : nullptr;
    group.Add(t, table_rows[t], false, dim, sums, stretch);
  }
  if (!group.empty()) return group.Sum(cuda, scratch, type);
  SOK_CUDA(cudaMemsetAsync(num_sums, 0, sizeof(int64_t), cuda.stream));
}

void SumRowsOfTables(const Cuda& cuda, DeviceScratch* scratch, const DeviceAddends* addends, int64_t num_addends,
                     const DeviceRowSums* tables, int64_t num_tables, FloatType type, uint64_t* first_bad) {
  const auto of_table = ByTable(addends, num_addends, num_tables);
  std::vector<int64_t> order(static_cast<size_t>(num_tables));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return tables[a].dim < tables[b].dim; });
  SumGroup group(addends, of_table, first_bad);
  for (size_t i = 0; i < order.size(); ++i) {
    const DeviceRowSums& table = tables[order[i]];
    CheckDim(table.dim);
    if (table.num_rows < 0 || SumGroup::NumbersFor(table.num_rows, true) > kMostNumbers) {
      throw InvalidArgument("a table must have fewer than 2^32 - 1 rows. Received: " + std::to_string(table.num_rows) +
                            ".");
    }
    if (SumGroup::NumbersFor(table.num_rows, true) > kMostNumbers - group.num_numbers()) {
      group.Sum(cuda, scratch, type);
      group = SumGroup(addends, of_table, first_bad);
    }
    // Counted from where the first sums of this dim lie.
    float* base = table.sums;
    for (const int64_t other : order)
      if (tables[other].dim == table.dim) base = std::min(base, tables[other].sums);
    Stretch stretch = {};
    stretch.first_sum = (table.sums - base) / table.dim;
    if ((table.sums - base) % table.dim != 0 || stretch.first_sum >= kNoSegment) {
      throw InvalidArgument("the sums of tables of dim " + std::to_string(table.dim) +
                            " must lie whole rows apart, fewer than 2^31 - 1 of them.");
    }
    stretch.row_ids = table.row_ids;
    stretch.num_sums = table.num_sums;
    group.Add(order[i], table.num_rows, true, table.dim, base, stretch,
              {table.row_ids, table.sums, table.num_sums, table.size, table.dim, 0});
  }
  if (!group.empty()) group.Sum(cuda, scratch, type);
}

}  // namespace sok
