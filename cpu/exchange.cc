#include "sok/exchange.h"

#include <algorithm>
#include <string>

#include "numbering.h"
#include "sok/error.h"

namespace sok {
namespace {

// Keys of one hash table: it and the keys in it then stay in a second-level cache (4 MB for 2 cores is a usual size).
constexpr int64_t kKeysPerPart = 128 << 10;
constexpr int kMaxParts = 16;
constexpr int64_t kCyclesPerKey = 20;
constexpr uint32_t kFirst = 0x80000000u;

// A table's keys are one part, or several by hash if they are many. Each part is deduplicated by itself.
struct Part {
  int table;
  int number;
  int64_t n;            // keys that fall into it
  int64_t num_keys;     // distinct ones
  uint32_t base;        // its first distinct key is number `base` of the table
  uint64_t* keys;       // [n], the distinct ones first
  uint32_t* place;      // [n]: owner, then place in the answers
  int64_t* counts;      // [world]
  int64_t* first_word;  // [world], in the message of that rank's keys of this table
};

struct TableKeys {
  int64_t n;
  int parts_begin, parts_end;
  int shift;  // a hash's part is hash >> shift; 64: there is one part
  uint64_t* keys;
  uint32_t* place;
};

struct Plan {
  int world, num_tables, num_features, num_parts;
  const RouteTable* tables;
  const RouteFeature* features;
  TableKeys* of_table;
  Part* parts;
  const int64_t* counts;
};

inline int PartOf(uint64_t hash, int shift) { return shift == 64 ? 0 : static_cast<int>(hash >> shift); }

// Calls use(i, word) for each key.
template <class Use>
void ForEachKey(const RouteFeature& f, bool is_unsigned, const Use& use) {
  if (f.is_wide) {
    const uint64_t* keys = static_cast<const uint64_t*>(f.keys);
    for (int64_t i = 0; i < f.n; ++i) use(i, keys[i]);
  } else if (is_unsigned) {
    const uint32_t* keys = static_cast<const uint32_t*>(f.keys);
    for (int64_t i = 0; i < f.n; ++i) use(i, uint64_t{keys[i]});
  } else {
    const int32_t* keys = static_cast<const int32_t*>(f.keys);
    for (int64_t i = 0; i < f.n; ++i) use(i, static_cast<uint64_t>(int64_t{keys[i]}));
  }
}

void Deduplicate(const Plan& plan, Part* part, uint32_t* slots) {
  const TableKeys& table = plan.of_table[part->table];
  const bool is_unsigned = plan.tables[part->table].is_unsigned;
  uint64_t* keys = part->keys;
  const uint32_t base = part->base;
  Numbering numbering(part->n, slots, keys);
  for (int f = 0; f < plan.num_features; ++f) {
    const RouteFeature& feature = plan.features[f];
    if (feature.table != part->table) continue;
    int32_t* index = feature.index;
    ForEachKey(feature, is_unsigned, [&](int64_t i, uint64_t key) {
      if (PartOf(Numbering::Hash(key), table.shift) != part->number) return;
      const uint32_t next = numbering.count(), number = numbering.NumberOf(key);
      index[i] = static_cast<int32_t>((base + number) | (number == next ? kFirst : 0));
    });
  }
  const uint32_t num_keys = numbering.count();
  part->num_keys = num_keys;
  const Partition partition = {plan.world, plan.tables[part->table].owner, is_unsigned};
  std::fill(part->counts, part->counts + plan.world, 0);
  for (uint32_t u = 0; u < num_keys; ++u) {
    const int owner = partition.OwnerOf(keys[u]);
    part->place[u] = static_cast<uint32_t>(owner);
    ++part->counts[owner];
  }
}

// Cuts parts into as many runs of about equal work as there are workers.
struct Runs {
  Runs(const Cpu& cpu, const Plan& plan) : plan(plan) {
    for (int p = 0; p < plan.num_parts; ++p) total += plan.parts[p].n + kPerPart;
    count = std::max<int64_t>(1, std::min<int64_t>(plan.num_parts, cpu.executor.num_threads() * 2));
  }
  int64_t Cost() const { return total / count * kCyclesPerKey; }
  // body(part) for the parts of run `run`.
  template <class Body>
  void ForParts(int64_t run, const Body& body) const {
    int64_t before = 0;
    for (int p = 0; p < plan.num_parts; ++p) {
      const int64_t middle = before + (plan.parts[p].n + kPerPart) / 2;
      if (middle * count / total == run) body(&plan.parts[p]);
      before += plan.parts[p].n + kPerPart;
    }
  }
  static constexpr int64_t kPerPart = 64;
  const Plan& plan;
  int64_t total = 0;
  int64_t count;
};

void FindIllegal(const Plan& plan, Route* route) {
  for (int f = 0; f < plan.num_features; ++f) {
    const uint64_t num_legal = plan.tables[plan.features[f].table].num_legal;
    if (num_legal == 0) continue;
    ForEachKey(plan.features[f], plan.tables[plan.features[f].table].is_unsigned, [&](int64_t, uint64_t key) {
      if (key < num_legal || !route->is_legal) return;
      route->is_legal = false;
      route->bad_feature = f;
      route->bad_key = key;
    });
    if (!route->is_legal) return;
  }
}

}  // namespace

Route RouteKeys(const Cpu& cpu, Scratch* scratch, const RouteTable* tables, int num_tables,
                const RouteFeature* features, int num_features, int world) {
  Plan* plan = scratch->Get<Plan>(1);
  plan->world = world;
  plan->num_tables = num_tables;
  plan->num_features = num_features;
  plan->tables = tables;
  plan->features = features;
  plan->of_table = scratch->Get<TableKeys>(num_tables);
  for (int t = 0; t < num_tables; ++t) plan->of_table[t] = {0, 0, 0, 64, nullptr, nullptr};
  for (int f = 0; f < num_features; ++f) plan->of_table[features[f].table].n += features[f].n;
  plan->num_parts = 0;
  for (int t = 0; t < num_tables; ++t) {
    TableKeys& table = plan->of_table[t];
    if (table.n > kPlaceMask) {
      throw InvalidArgument("at most 2^31 - 1 keys of one table in one call. Received: " + std::to_string(table.n) +
                            ".");
    }
    int parts = 1;
    while (parts < kMaxParts && parts * kKeysPerPart < table.n) {
      parts *= 2;
      --table.shift;
    }
    table.parts_begin = plan->num_parts;
    plan->num_parts += parts;
    table.parts_end = plan->num_parts;
    table.keys = scratch->Get<uint64_t>(table.n);
    table.place = scratch->Get<uint32_t>(table.n);
  }
  plan->parts = scratch->Get<Part>(plan->num_parts);
  for (int t = 0; t < num_tables; ++t) {
    const TableKeys& table = plan->of_table[t];
    int64_t in_part[kMaxParts] = {};
    const int parts = table.parts_end - table.parts_begin;
    if (parts == 1) {
      in_part[0] = table.n;
    } else {
      for (int f = 0; f < num_features; ++f) {
        if (features[f].table != t) continue;
        ForEachKey(features[f], tables[t].is_unsigned,
                   [&](int64_t, uint64_t key) { ++in_part[PartOf(Numbering::Hash(key), table.shift)]; });
      }
    }
    int64_t base = 0;
    for (int p = 0; p < parts; ++p) {
      plan->parts[table.parts_begin + p] = {t,
                                            p,
                                            in_part[p],
                                            0,
                                            static_cast<uint32_t>(base),
                                            table.keys + base,
                                            table.place + base,
                                            scratch->Get<int64_t>(world),
                                            scratch->Get<int64_t>(world)};
      base += in_part[p];
    }
  }

  const Runs runs(cpu, *plan);
  int64_t largest = 0;
  for (int p = 0; p < plan->num_parts; ++p) largest = std::max(largest, plan->parts[p].n);
  const int64_t num_slots = Numbering::SlotsFor(largest);
  uint32_t* slots = scratch->Get<uint32_t>(runs.count * num_slots);  // one per run: scratch serves one thread
  cpu.executor.For(runs.count, runs.Cost(), [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run)
      runs.ForParts(run, [&](Part* part) { Deduplicate(*plan, part, slots + run * num_slots); });
  });

  Route route;
  for (int p = 0; p < plan->num_parts && route.is_legal; ++p) {
    const Part& part = plan->parts[p];
    const uint64_t num_legal = tables[part.table].num_legal;
    if (num_legal == 0) continue;
    bool legal = true;
    for (int64_t u = 0; u < part.num_keys; ++u) legal &= part.keys[u] < num_legal;
    if (!legal) FindIllegal(*plan, &route);
  }
  int64_t* counts = scratch->Get<int64_t>(int64_t{world} * num_tables);
  std::fill(counts, counts + int64_t{world} * num_tables, 0);
  for (int p = 0; p < plan->num_parts; ++p) {
    const Part& part = plan->parts[p];
    route.num_keys += part.num_keys;
    for (int r = 0; r < world; ++r) {
      int64_t& count = counts[int64_t{r} * num_tables + part.table];
      part.first_word[r] = count;
      count += part.counts[r];
    }
  }
  int64_t floats = world * kAnswerHeader;
  for (int64_t c = 0; c < int64_t{world} * num_tables; ++c) floats += counts[c] * tables[c % num_tables].dim;
  if (floats > kPlaceMask) {
    throw InvalidArgument(
        "the rows that one worker asks for in one lookup must have less than 2^31 floats. Received: " +
        std::to_string(floats) + ".");
  }
  plan->counts = counts;
  route.counts = counts;
  route.plan = plan;
  return route;
}

template <class Word>
void WriteRoute(const Cpu& cpu, Scratch* scratch, const Route& route, const int64_t* key_begin, Word* words) {
  const Plan& plan = *static_cast<const Plan*>(route.plan);
  const int64_t cells = int64_t{plan.world} * plan.num_tables;
  int64_t* word_begin = scratch->Get<int64_t>(cells);   // where the keys of (rank, table) begin
  int64_t* place_begin = scratch->Get<int64_t>(cells);  // where its rows will
  int64_t place = 0;
  for (int r = 0; r < plan.world; ++r) {
    int64_t word = key_begin[r];
    place += kAnswerHeader;
    for (int t = 0; t < plan.num_tables; ++t) {
      const int64_t cell = int64_t{r} * plan.num_tables + t;
      word_begin[cell] = word;
      place_begin[cell] = place;
      word += plan.counts[cell];
      place += plan.counts[cell] * plan.tables[t].dim;
    }
  }
  const Runs runs(cpu, plan);
  int64_t* cursors = scratch->Get<int64_t>(runs.count * 2 * plan.world);
  cpu.executor.For(runs.count, runs.Cost(), [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      int64_t* next_word = cursors + run * 2 * plan.world;
      int64_t* next_place = next_word + plan.world;
      runs.ForParts(run, [&](Part* part) {
        const int64_t dim = plan.tables[part->table].dim;
        for (int r = 0; r < plan.world; ++r) {
          const int64_t cell = int64_t{r} * plan.num_tables + part->table;
          next_word[r] = word_begin[cell] + part->first_word[r];
          next_place[r] = place_begin[cell] + part->first_word[r] * dim;
        }
        for (int64_t u = 0; u < part->num_keys; ++u) {
          const uint32_t owner = part->place[u];
          words[next_word[owner]++] = static_cast<Word>(part->keys[u]);
          part->place[u] = static_cast<uint32_t>(next_place[owner]);
          next_place[owner] += dim;
        }
      });
    }
  });
  for (int f = 0; f < plan.num_features; ++f) {
    const RouteFeature& feature = plan.features[f];
    const uint32_t* of_key = plan.of_table[feature.table].place;
    cpu.executor.For(feature.n, 5, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t number = static_cast<uint32_t>(feature.index[i]);
        feature.index[i] = static_cast<int32_t>(of_key[number & ~kFirst] | (number & kFirst));
      }
    });
  }
}

template void WriteRoute(const Cpu&, Scratch*, const Route&, const int64_t*, int64_t*);
template void WriteRoute(const Cpu&, Scratch*, const Route&, const int64_t*, int32_t*);

namespace {

// Calls body(feature, first segment, last segment) so that all segments of all features are covered, in parallel.
template <class Body>
void ForSegments(const Cpu& cpu, const PooledFeature* features, int num_features, const Body& body) {
  int64_t segments = 0, work = 0;
  for (int f = 0; f < num_features; ++f) {
    segments += features[f].segments;
    work += features[f].segments * 30 + features[f].n * (10 + 2 * features[f].dim);
  }
  if (segments == 0) return;
  cpu.executor.For(segments, work / segments + 1, [&](int64_t begin, int64_t end) {
    int64_t before = 0;
    for (int f = 0; f < num_features && before < end; ++f) {
      const int64_t first = std::max<int64_t>(begin - before, 0), last = std::min(end - before, features[f].segments);
      if (first < last) body(f, first, last);
      before += features[f].segments;
    }
  });
}

struct Segment {
  int64_t first, last;
};

inline Segment SegmentOf(const PooledFeature& feature, int64_t s) {
  return feature.row_splits == nullptr ? Segment{s, s + 1} : Segment{feature.row_splits[s], feature.row_splits[s + 1]};
}

inline float ScaleOf(const PooledFeature& feature, const Segment& segment) {
  return SegmentScale(feature.combiner, feature.weights == nullptr ? nullptr : feature.weights + segment.first,
                      segment.last - segment.first);
}

// kDim 0: known at run time only. Constant ones keep the sums in registers.
template <int kDim>
void CombineSegments(const float* answers, const PooledFeature& feature, int64_t begin, int64_t end, float* output) {
  const int64_t dim = kDim == 0 ? feature.dim : kDim;
  constexpr int64_t kAhead = 16;
  for (int64_t s = begin; s < end; ++s) {
    const Segment segment = SegmentOf(feature, s);
    float* out = output + s * dim;
    float sums[kDim == 0 ? 1 : kDim];
    float* sum = kDim == 0 ? out : sums;
    for (int64_t j = 0; j < dim; ++j) sum[j] = 0.0f;
    for (int64_t i = segment.first; i < segment.last; ++i) {
      if (i + kAhead < feature.n) __builtin_prefetch(answers + (feature.index[i + kAhead] & kPlaceMask));
      const float* row = answers + (feature.index[i] & kPlaceMask);
      if (feature.weights == nullptr) {
        for (int64_t j = 0; j < dim; ++j) sum[j] += row[j];
      } else {
        const float w = feature.weights[i];
        for (int64_t j = 0; j < dim; ++j) sum[j] += w * row[j];
      }
    }
    const float scale = ScaleOf(feature, segment);
    for (int64_t j = 0; j < dim; ++j) out[j] = sum[j] * scale;
  }
}

template <int kDim>
void ScatterSegments(const PooledFeature& feature, const float* grad, int64_t begin_place, int64_t end_place,
                     float* packed) {
  const int64_t dim = kDim == 0 ? feature.dim : kDim;
  constexpr int64_t kAhead = 16;
  for (int64_t s = 0; s < feature.segments; ++s) {
    const Segment segment = SegmentOf(feature, s);
    const float scale = ScaleOf(feature, segment);
    const float* g = grad + s * dim;
    for (int64_t i = segment.first; i < segment.last; ++i) {
      if (i + kAhead < feature.n) __builtin_prefetch(packed + (feature.index[i + kAhead] & kPlaceMask), 1);
      const int32_t place = feature.index[i] & kPlaceMask;
      if (place < begin_place || place >= end_place) continue;
      const float factor = feature.weights == nullptr ? scale : scale * feature.weights[i];
      float* to = packed + place;
      if (feature.index[i] < 0) {
        for (int64_t j = 0; j < dim; ++j) to[j] = factor * g[j];
      } else {
        for (int64_t j = 0; j < dim; ++j) to[j] += factor * g[j];
      }
    }
  }
}

// call(std::integral_constant<int, kDim>) with the constant for usual dims.
template <class Call>
void WithDim(int64_t dim, const Call& call) {
  switch (dim) {
    case 8:
      return call(std::integral_constant<int, 8>());
    case 16:
      return call(std::integral_constant<int, 16>());
    case 32:
      return call(std::integral_constant<int, 32>());
    default:
      return call(std::integral_constant<int, 0>());
  }
}

}  // namespace

bool PlacesFit(const PooledFeature& feature, int64_t size) {
  int32_t largest = 0;
  for (int64_t i = 0; i < feature.n; ++i) largest = std::max(largest, feature.index[i] & kPlaceMask);
  return feature.n == 0 || largest + feature.dim <= size;
}

void CombineAnswers(const Cpu& cpu, const float* answers, const PooledFeature* features, int num_features,
                    float* const* outputs) {
  ForSegments(cpu, features, num_features, [&](int f, int64_t begin, int64_t end) {
    WithDim(features[f].dim,
            [&](auto dim) { CombineSegments<decltype(dim)::value>(answers, features[f], begin, end, outputs[f]); });
  });
}

void CombineAnswersGrad(const Cpu& cpu, const PooledFeature* features, int num_features, const float* const* grads,
                        int64_t size, float* packed) {
  // Each slice of the places is one thread's: it reads all features and sums what falls into its slice, in order.
  const int64_t slices = std::max<int64_t>(1, std::min<int64_t>(cpu.executor.num_threads(), size / 4096));
  int64_t work = 0;
  for (int f = 0; f < num_features; ++f) work += features[f].n * (10 + 2 * features[f].dim);
  cpu.executor.For(slices, work / slices + 1, [&](int64_t begin, int64_t end) {
    for (int f = 0; f < num_features; ++f) {
      WithDim(features[f].dim, [&](auto dim) {
        ScatterSegments<decltype(dim)::value>(features[f], grads[f], size * begin / slices, size * end / slices,
                                              packed);
      });
    }
  });
}

void CombineAnswersGradWeights(const Cpu& cpu, const float* answers, const PooledFeature& feature, const float* grad,
                               float* grad_weights) {
  const int64_t dim = feature.dim;
  ForSegments(cpu, &feature, 1, [&](int, int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const Segment segment = SegmentOf(feature, s);
      const float scale = ScaleOf(feature, segment);
      const float* g = grad + s * dim;
      float out_dot = 0.0f;  // output . g
      for (int64_t i = segment.first; i < segment.last; ++i) {
        const float* row = answers + (feature.index[i] & kPlaceMask);
        float dot = 0.0f;
        for (int64_t j = 0; j < dim; ++j) dot += row[j] * g[j];
        grad_weights[i] = dot * scale;
        out_dot += feature.weights[i] * dot * scale;
      }
      // d scale / d w_i: -1 / (sum w)^2 for mean, -w_i / (sum w^2)^{3/2} for sqrtn.
      if (feature.combiner == Combiner::kSum) continue;
      for (int64_t i = segment.first; i < segment.last; ++i) {
        grad_weights[i] -=
            feature.combiner == Combiner::kMean ? out_dot * scale : out_dot * feature.weights[i] * scale * scale;
      }
    }
  });
}

}  // namespace sok
