#include "sok/sum_rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "numbering.h"
#include "row_kernels.h"
#include "sok/error.h"
#include "tasks.h"

namespace sok {
namespace {

constexpr int64_t kEntriesPerPart = 32768;  // a part's hash table then has 256 KiB: it fits the L2 cache
constexpr int64_t kEntriesPerChunk = 8192;
constexpr int kMaxPartBits = 14;
constexpr int64_t kHashCycles = 20;

constexpr uint32_t kDropped = 0xFFFFFFFFu;  // no row has this number

// Whether RowKernels::sum_segments does this dim.
bool HasOwnLoop(int64_t dim) {
  uint32_t next = 0;
  return ChosenRowKernels().sum_segments(nullptr, nullptr, 0, Combiner::kSum, nullptr, dim, &next, nullptr);
}

// A stretch of addends: segments, or single addends where nothing was pooled.
struct Chunk {
  int64_t table;
  int64_t addends;  // which of the table
  int64_t begin, end;
};

// Entries of one table, part after part.
struct Work {
  int bits = 0;  // 2^bits parts
  int64_t n = 0;
  bool scaled = false;
  bool direct = false;  // one part, no weights, a dim with a loop of its own: entries are never written out
  int64_t* ids = nullptr;
  const float** source = nullptr;
  float* factor = nullptr;  // null: 1
  uint32_t* slot = nullptr;
  int64_t* distinct = nullptr;     // part p writes at part_begin[p]
  uint32_t* part_begin = nullptr;  // [parts + 1]
  uint32_t* part_rows = nullptr;   // [parts]
  uint32_t* cursor = nullptr;      // [chunks of the table, parts]; null for one part
  int64_t first_chunk = 0, num_chunks = 0;
  int64_t first_unit = 0;
  RowSumsTarget target;

  int64_t parts() const { return int64_t{1} << bits; }
  int64_t PartOf(int64_t id) const {
    return bits == 0 ? 0 : static_cast<int64_t>((static_cast<uint32_t>(id) * 0x9E3779B1u) >> (32 - bits));
  }
};

// Calls put(id, source, factor) for each kept addend of the chunk, in order.
template <class Put>
inline void ForAddends(const RowSums& table, const Chunk& chunk, const Put& put) {
  const RowAddends& a = table.addends[chunk.addends];
  if (a.row_splits == nullptr) {
    for (int64_t i = chunk.begin; i < chunk.end; ++i)
      if (a.row_ids[i] >= 0) put(a.row_ids[i], a.values + i * table.dim, 1.0f);
    return;
  }
  for (int64_t s = chunk.begin; s < chunk.end; ++s) {
    const int64_t first = a.row_splits[s], last = a.row_splits[s + 1];
    const float* source = a.values + s * table.dim;
    const float scale = SegmentScale(a.combiner, a.weights == nullptr ? nullptr : a.weights + first, last - first);
    for (int64_t i = first; i < last; ++i)
      if (a.row_ids[i] >= 0) put(a.row_ids[i], source, a.weights == nullptr ? scale : scale * a.weights[i]);
  }
}

// Cuts the addends of all tables into chunks of about equal size. Gives their number; writes them unless chunks is null.
int64_t CutChunks(const RowSums* tables, int64_t num_tables, Work* work, Chunk* chunks) {
  int64_t count = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    work[t].first_chunk = count;
    for (int64_t k = 0; k < tables[t].num_addends; ++k) {
      const RowAddends& a = tables[t].addends[k];
      const int64_t items = a.row_splits == nullptr ? a.n : a.segments;
      // One part needs no cutting: its entries are written in order, by one task.
      const int64_t pieces = work[t].bits == 0 ? 1 : std::max<int64_t>(1, std::min(items, a.n / kEntriesPerChunk));
      for (int64_t p = 0; p < pieces; ++p, ++count) {
        if (chunks != nullptr) chunks[count] = {t, k, items * p / pieces, items * (p + 1) / pieces};
      }
    }
    work[t].num_chunks = count - work[t].first_chunk;
  }
  return count;
}

void Write(const Work& w, uint32_t at, int64_t id, const float* source, float factor) {
  w.ids[at] = id;
  w.source[at] = source;
  if (w.scaled) w.factor[at] = factor;
}

// numbers[i] of ids[i]; kDropped for negative ids.
void NumberRows(const int64_t* ids, int64_t n, Numbering* numbering, uint32_t* numbers) {
  for (int64_t i = 0; i < n; ++i) {
    numbers[i] = ids[i] < 0 ? kDropped : numbering->NumberOf(static_cast<uint64_t>(ids[i]));
  }
}

}  // namespace

void SumRows(const Cpu& cpu, Scratch* scratch, const RowSums* tables, int64_t num_tables,
             const std::function<RowSumsTarget(int64_t, int64_t)>& allocate) {
  Work* work = scratch->Get<Work>(num_tables);
  int64_t total = 0, units = 0, largest = 0, cost = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    Work& w = work[t];
    w = Work();
    bool weighted = false;
    for (int64_t k = 0; k < tables[t].num_addends; ++k) {
      const RowAddends& a = tables[t].addends[k];
      w.n += a.n;
      weighted = weighted || a.weights != nullptr;
      w.scaled = w.scaled || a.weights != nullptr || (a.row_splits != nullptr && a.combiner != Combiner::kSum);
    }
    if (w.n >= INT64_C(0x80000000)) {
      throw InvalidArgument("at most 2^31 - 1 gradient rows in one call. Received: " + std::to_string(w.n) + ".");
    }
    while (w.bits < kMaxPartBits && (kEntriesPerPart << w.bits) < w.n) ++w.bits;
    w.direct = w.bits == 0 && !weighted && HasOwnLoop(tables[t].dim);
    w.ids = w.direct ? nullptr : scratch->Get<int64_t>(w.n);
    w.source = w.direct ? nullptr : scratch->Get<const float*>(w.n);
    w.factor = w.direct || !w.scaled ? nullptr : scratch->Get<float>(w.n);
    w.slot = scratch->Get<uint32_t>(w.n);
    w.distinct = scratch->Get<int64_t>(w.n);
    w.part_begin = scratch->Get<uint32_t>(w.parts() + 1);
    w.part_rows = scratch->Get<uint32_t>(w.parts());
    w.first_unit = units;
    units += w.parts();
    total += w.n;
    cost += w.n * (kHashCycles + tables[t].dim);
  }
  const int64_t num_chunks = CutChunks(tables, num_tables, work, nullptr);
  Chunk* chunks = scratch->Get<Chunk>(num_chunks);
  CutChunks(tables, num_tables, work, chunks);

  // Tables of more than one part: a stable scatter by part. Count per chunk, prefix sums, move.
  bool scatter = false;
  for (int64_t t = 0; t < num_tables; ++t) {
    Work& w = work[t];
    if (w.bits == 0) continue;
    scatter = true;
    w.cursor = scratch->Get<uint32_t>(w.num_chunks * w.parts());
    std::memset(w.cursor, 0, static_cast<size_t>(w.num_chunks * w.parts()) * sizeof(uint32_t));
  }
  auto cursor_of = [&](const Work& w, int64_t chunk) { return w.cursor + (chunk - w.first_chunk) * w.parts(); };
  if (scatter) {
    ForTasks(cpu, num_chunks, total * 5, [&](int64_t, int64_t c) {
      const Work& w = work[chunks[c].table];
      if (w.bits == 0) return;
      uint32_t* mine = cursor_of(w, c);
      ForAddends(tables[chunks[c].table], chunks[c], [&](int64_t id, const float*, float) { ++mine[w.PartOf(id)]; });
    });
    for (int64_t t = 0; t < num_tables; ++t) {
      Work& w = work[t];
      if (w.bits == 0) continue;
      uint32_t sum = 0;
      for (int64_t p = 0; p < w.parts(); ++p) {
        w.part_begin[p] = sum;
        for (int64_t c = 0; c < w.num_chunks; ++c) {
          const uint32_t count = w.cursor[c * w.parts() + p];
          w.cursor[c * w.parts() + p] = sum;
          sum += count;
        }
      }
      w.part_begin[w.parts()] = sum;
    }
    ForTasks(cpu, num_chunks, total * 10, [&](int64_t, int64_t c) {
      const Work& w = work[chunks[c].table];
      if (w.bits == 0) return;
      uint32_t* mine = cursor_of(w, c);
      ForAddends(tables[chunks[c].table], chunks[c], [&](int64_t id, const float* source, float factor) {
        Write(w, mine[w.PartOf(id)]++, id, source, factor);
      });
    });
  }

  struct Unit {
    int64_t table, part, first_row;
  };
  Unit* unit = scratch->Get<Unit>(units);
  for (int64_t t = 0; t < num_tables; ++t)
    for (int64_t p = 0; p < work[t].parts(); ++p) unit[work[t].first_unit + p] = {t, p, 0};
  for (int64_t t = 0; t < num_tables; ++t) {
    const Work& w = work[t];
    for (int64_t p = 0; p < w.parts(); ++p)
      largest = std::max<int64_t>(largest, w.bits == 0 ? w.n : w.part_begin[p + 1] - w.part_begin[p]);
  }
  const int64_t table_size = Numbering::SlotsFor(largest);
  uint32_t* slots = scratch->Get<uint32_t>(MaxWorkers(cpu, units) * table_size);
  ForTasks(cpu, units, total * kHashCycles, [&](int64_t worker, int64_t u) {
    const Work& w = work[unit[u].table];
    uint32_t* mine = slots + worker * table_size;
    if (w.direct) {
      const RowSums& table = tables[unit[u].table];
      Numbering numbering(w.n, mine, reinterpret_cast<uint64_t*>(w.distinct));
      uint32_t* slot = w.slot;
      for (int64_t k = 0; k < table.num_addends; slot += table.addends[k++].n) {
        NumberRows(table.addends[k].row_ids, table.addends[k].n, &numbering, slot);
      }
      w.part_begin[0] = 0;
      w.part_rows[0] = numbering.count();
      return;
    }
    if (w.bits == 0) {
      uint32_t n = 0;
      for (int64_t c = w.first_chunk; c < w.first_chunk + w.num_chunks; ++c) {
        ForAddends(tables[unit[u].table], chunks[c],
                   [&](int64_t id, const float* source, float factor) { Write(w, n++, id, source, factor); });
      }
      w.part_begin[0] = 0;
      w.part_begin[1] = n;
    }
    const int64_t begin = w.part_begin[unit[u].part], n = w.part_begin[unit[u].part + 1] - begin;
    Numbering numbering(n, mine, reinterpret_cast<uint64_t*>(w.distinct + begin));
    NumberRows(w.ids + begin, n, &numbering, w.slot + begin);
    w.part_rows[unit[u].part] = numbering.count();
  });

  for (int64_t t = 0; t < num_tables; ++t) {
    Work& w = work[t];
    int64_t rows = 0;
    for (int64_t p = 0; p < w.parts(); ++p) {
      unit[w.first_unit + p].first_row = rows;
      rows += w.part_rows[p];
    }
    w.target = allocate(t, rows);
  }
  const RowKernels& kernels = ChosenRowKernels();
  ForTasks(cpu, units, cost, [&](int64_t, int64_t u) {
    const Work& w = work[unit[u].table];
    if (w.direct) {
      const RowSums& table = tables[unit[u].table];
      std::copy_n(w.distinct, w.part_rows[0], w.target.row_ids);
      uint32_t next = 0;
      const uint32_t* slot = w.slot;
      for (int64_t k = 0; k < table.num_addends; slot += table.addends[k++].n) {
        const RowAddends& a = table.addends[k];
        const bool pooled = a.row_splits != nullptr;
        kernels.sum_segments(slot, a.row_splits, pooled ? a.segments : a.n, pooled ? a.combiner : Combiner::kSum,
                             a.values, table.dim, &next, w.target.sums);
      }
      return;
    }
    const int64_t begin = w.part_begin[unit[u].part], n = w.part_begin[unit[u].part + 1] - begin;
    const int64_t dim = tables[unit[u].table].dim, first = unit[u].first_row;
    std::copy_n(w.distinct + begin, w.part_rows[unit[u].part], w.target.row_ids + first);
    kernels.sum_by_slot(w.source + begin, w.scaled ? w.factor + begin : nullptr, w.slot + begin, n, dim,
                        w.target.sums + first * dim);
  });
}

}  // namespace sok
