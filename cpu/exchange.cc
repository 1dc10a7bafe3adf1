#include "sok/exchange.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <string>

#include "feature_keys.h"
#include "numbering.h"
#include "pieces.h"
#include "route_plan.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kCyclesPerKey = 20;

// Sums are chosen if what they move, times this, is less than what rows move. With two workers on 2 cores of one busy
// host, dim 16 and 64, hotness 1 to 50, sums were mostly faster where they move less than 0.8 of the rows and slower
// above 1.2; between the two the difference was noise (docs/design/exchange.md has the figures).
constexpr double kSumsFactor = 1.0;

// What a key and its row, or a piece and its sum, move: number or length there, the row home and as much of gradients.
// Of a copy no row travels.
int64_t RowBytes(const RouteTable& table, int word_bytes) {
  return word_bytes + (table.is_copy ? 1 : 2) * table.value_bytes * table.dim;
}

double SumsCost(const RouteTable& table, int64_t keys, int64_t pieces, int word_bytes) {
  return kSumsFactor * (static_cast<double>(keys) * word_bytes +
                        static_cast<double>(pieces) * static_cast<double>(RowBytes(table, word_bytes)));
}

double RowsCost(const RouteTable& table, int64_t distinct, int word_bytes) {
  return static_cast<double>(distinct) * static_cast<double>(RowBytes(table, word_bytes));
}

// What can be said before keys are looked at.
void ChooseEarly(const Plan& plan, const RouteTable& table, int word_bytes, TableKeys* keys) {
  keys->choice = table.way == WayHome::kSums ? Choice::kSums : Choice::kRows;
  for (int at = keys->features_free; at < keys->features_end; ++at)
    keys->free_keys += plan.features[plan.features_of[at]].n;
  if (table.way != WayHome::kAuto || keys->free_keys == 0) return;
  for (int at = keys->features_free; at < keys->features_end; ++at) {
    const RouteFeature& feature = plan.features[plan.features_of[at]];
    const int64_t* splits = feature.row_splits;
    for (int64_t s = 0; s < feature.segments; ++s) keys->pieces += splits[s + 1] > splits[s];
  }
  const int64_t owners = Partition{plan.world, table.owner, table.is_unsigned}.num_shards();
  keys->max_pieces = std::min(keys->free_keys, keys->pieces * owners);
  if (SumsCost(table, keys->free_keys, keys->pieces, word_bytes) >= RowsCost(table, keys->free_keys, word_bytes))
    return;
  keys->choice = Choice::kOpen;
  keys->limit = static_cast<int64_t>(SumsCost(table, keys->free_keys, keys->max_pieces, word_bytes) /
                                     static_cast<double>(RowBytes(table, word_bytes)));
}

void CountOwners(const Plan& plan, Part* part) {
  const RouteTable& table = plan.tables[part->table];
  const Partition partition = {plan.world, table.owner, table.is_unsigned};
  std::fill(part->counts, part->counts + plan.world, 0);
  for (int64_t u = 0; u < part->num_keys; ++u) {
    const int owner = partition.OwnerOf(part->keys[u]);
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

WayHome ParseWayHome(const std::string& name) {
  if (name == "auto") return WayHome::kAuto;
  if (name == "rows") return WayHome::kRows;
  if (name == "sums") return WayHome::kSums;
  throw InvalidArgument("the way home must be 'auto', 'rows' or 'sums'. Received: '" + name + "'.");
}

namespace {

// Settles what was open, and cuts what comes by sums.
void Choose(const Cpu& cpu, Scratch* scratch, Plan* plan, int word_bytes) {
  for (int t = 0; t < plan->num_tables; ++t) {
    TableKeys& table = plan->of_table[t];
    if (table.choice != Choice::kOpen) continue;
    const int64_t distinct = table.found->load();
    table.choice = Choice::kSums;
    if (distinct > table.limit) continue;
    const double rows = RowsCost(plan->tables[t], distinct, word_bytes);
    auto sums_with = [&](int64_t pieces) {
      return SumsCost(plan->tables[t], table.free_keys, pieces, word_bytes) < rows;
    };
    if (sums_with(table.pieces)) {
      int64_t pieces = 0;
      for (int at = table.features_free; at < table.features_end; ++at)
        pieces += EstimatePieces(scratch, plan->tables[t], plan->features[plan->features_of[at]], plan->world);
      if (sums_with(pieces)) continue;
    }
    table.choice = Choice::kRows;
  }
  int* cut = scratch->Get<int>(plan->num_features);
  int num_cut = 0;
  for (int f = 0; f < plan->num_features; ++f) {
    const RouteFeature& feature = plan->features[f];
    if (MaySum(feature) && plan->of_table[feature.table].choice == Choice::kSums) cut[num_cut++] = f;
  }
  plan->cut = CountPieces(cpu, scratch, plan->tables, plan->features, cut, num_cut, plan->world);
  for (int p = 0; p < plan->num_parts; ++p) {
    Part& part = plan->parts[p];
    if (plan->of_table[part.table].choice == Choice::kSums) part.num_keys = part.num_fixed;
  }
}

bool AllLegal(const Plan& plan) {
  for (int p = 0; p < plan.num_parts; ++p) {
    const Part& part = plan.parts[p];
    const uint64_t num_legal = plan.tables[part.table].num_legal;
    if (num_legal == 0) continue;
    bool legal = true;
    for (int64_t u = 0; u < part.num_keys; ++u) legal &= part.keys[u] < num_legal;
    if (!legal) return false;
  }
  return plan.cut.AllLegal();
}

// Counts, words and floats of each rank's message and answer.
void AddUp(Scratch* scratch, Plan* plan, Route* route) {
  const int world = plan->world, num_tables = plan->num_tables, num_features = plan->num_features;
  const int64_t width = CountsPerRank(num_tables, num_features);
  int64_t* counts = scratch->Get<int64_t>(world * width);
  int64_t* words = scratch->Get<int64_t>(world);
  int64_t* floats = scratch->Get<int64_t>(world);
  int64_t* pieces = scratch->Get<int64_t>(num_features);
  std::fill_n(counts, world * width, 0);
  for (int p = 0; p < plan->num_parts; ++p) {
    const Part& part = plan->parts[p];
    for (int r = 0; r < world; ++r) {
      int64_t& count = counts[r * width + part.table];
      part.first_word[r] = count;
      count += part.counts[r];
    }
  }
  for (int f = 0; f < num_features; ++f) {
    const RouteFeature& feature = plan->features[f];
    pieces[f] = kByRows;
    if (!MaySum(feature) || plan->of_table[feature.table].choice != Choice::kSums) continue;
    pieces[f] = 0;
  }
  for (int64_t c = 0; c < plan->cut.num_chunks; ++c) {
    const PieceChunk& chunk = plan->cut.chunks[c];
    for (int r = 0; r < world; ++r) {
      int64_t* count = counts + r * width + num_tables + 2 * chunk.feature;
      count[0] += chunk.pieces[r];
      count[1] += chunk.keys[r];
      pieces[chunk.feature] += chunk.pieces[r];
    }
  }
  int64_t all_floats = 0;  // of the gradients, which go to copies, too
  for (int r = 0; r < world; ++r) {
    words[r] = 0;
    floats[r] = kAnswerHeader;
    const int64_t* count = counts + r * width;
    const auto add = [&](const RouteTable& table, int64_t rows) {
      (table.comes_home ? floats[r] : all_floats) += rows * table.dim;
    };
    for (int t = 0; t < num_tables; ++t) {
      words[r] += count[t];
      add(plan->tables[t], count[t]);
    }
    for (int f = 0; f < num_features; ++f) {
      const int64_t* of_feature = count + num_tables + 2 * f;
      words[r] += of_feature[0] + of_feature[1];
      add(plan->tables[plan->features[f].table], of_feature[0]);
    }
    if (words[r] > kPlaceMask) {
      throw InvalidArgument("one worker may ask another for less than 2^31 keys in one lookup. Received: " +
                            std::to_string(words[r]) + ".");
    }
    all_floats += floats[r];
  }
  if (all_floats > kPlaceMask) {
    throw InvalidArgument(
        "the rows that one worker asks for in one lookup must have less than 2^31 floats. Received: " +
        std::to_string(all_floats) + ".");
  }
  route->counts = plan->counts = counts;
  route->pieces = plan->pieces = pieces;
  route->words = words;
  route->floats = floats;
}

}  // namespace

Route RouteKeys(const Cpu& cpu, Scratch* scratch, const RouteTable* tables, int num_tables,
                const RouteFeature* features, int num_features, int world, int word_bytes) {
  Plan* plan = new (scratch->Get<Plan>(1)) Plan();
  plan->world = world;
  plan->num_tables = num_tables;
  plan->num_features = num_features;
  plan->tables = tables;
  plan->features = features;
  SortFeatures(scratch, plan);
  for (int t = 0; t < num_tables; ++t) ChooseEarly(*plan, tables[t], word_bytes, &plan->of_table[t]);
  MakeParts(cpu, scratch, plan);

  const Runs runs(cpu, *plan);
  int64_t largest = 0;
  for (int p = 0; p < plan->num_parts; ++p) largest = std::max(largest, plan->parts[p].n);
  const int64_t num_slots = Numbering::SlotsFor(largest);
  uint32_t* slots = scratch->Get<uint32_t>(runs.count * num_slots);  // one per run: scratch serves one thread
  cpu.executor.For(runs.count, runs.Cost(), [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run)
      runs.ForParts(run, [&](Part* part) { Deduplicate(*plan, part, slots + run * num_slots); });
  });
  Choose(cpu, scratch, plan, word_bytes);

  Route route;
  if (!AllLegal(*plan)) {
    FindIllegal(*plan, &route);
    return route;
  }
  cpu.executor.For(runs.count, runs.Cost() / 4, [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) runs.ForParts(run, [&](Part* part) { CountOwners(*plan, part); });
  });
  AddUp(scratch, plan, &route);
  route.plan = plan;
  return route;
}

template <class Word>
void WriteRoute(const Cpu& cpu, Scratch* scratch, const Route& route, const int64_t* word_begin, Word* words,
                const RoutedPieces* pieces) {
  const Plan& plan = *static_cast<const Plan*>(route.plan);
  const int world = plan.world, num_tables = plan.num_tables;
  const int64_t width = CountsPerRank(num_tables, plan.num_features);
  int64_t* keys_at = scratch->Get<int64_t>(int64_t{world} * num_tables);   // where the keys of (rank, table) begin
  int64_t* place_at = scratch->Get<int64_t>(int64_t{world} * num_tables);  // where their rows will
  PieceTarget* targets = scratch->Get<PieceTarget>(plan.num_features);
  for (int f = 0; f < plan.num_features; ++f) {
    targets[f] = PieceTarget();
    if (plan.pieces[f] == kByRows) continue;
    int64_t* begins = scratch->Get<int64_t>(int64_t{3} * world);
    targets[f] = {plan.features[f].index, pieces[f].row_splits, pieces[f].scales, begins,
                  begins + world,         begins + 2 * world};
  }
  int64_t place = 0;
  for (int r = 0; r < world; ++r) {
    const int64_t* count = plan.counts + r * width;
    int64_t word = word_begin[r];
    for (int t = 0; t < num_tables; ++t) {
      keys_at[r * num_tables + t] = word;
      word += count[t];
    }
    for (int f = 0; f < plan.num_features; ++f) {
      if (plan.pieces[f] == kByRows) continue;
      const int64_t* of_feature = count + num_tables + 2 * f;
      targets[f].length[r] = word;
      targets[f].key[r] = word + of_feature[0];
      word += of_feature[0] + of_feature[1];
    }
    place += kAnswerHeader;
    for (const bool copies : {false, true}) {
      for (int t = 0; t < num_tables; ++t) {
        if (plan.tables[t].is_copy != copies) continue;
        place_at[r * num_tables + t] = place;
        if (plan.tables[t].comes_home) place += count[t] * plan.tables[t].dim;
      }
      for (int f = 0; f < plan.num_features; ++f) {
        const RouteTable& table = plan.tables[plan.features[f].table];
        if (plan.pieces[f] == kByRows || table.is_copy != copies) continue;
        targets[f].place[r] = place;
        if (table.comes_home) place += count[num_tables + 2 * f] * table.dim;
      }
    }
  }
  const Runs runs(cpu, plan);
  int64_t* cursors = scratch->Get<int64_t>(runs.count * 2 * world);
  cpu.executor.For(runs.count, runs.Cost(), [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      int64_t* next_word = cursors + run * 2 * world;
      int64_t* next_place = next_word + world;
      runs.ForParts(run, [&](Part* part) {
        const int64_t dim = plan.tables[part->table].dim;
        for (int r = 0; r < world; ++r) {
          const int64_t cell = int64_t{r} * num_tables + part->table;
          next_word[r] = keys_at[cell] + part->first_word[r];
          next_place[r] = place_at[cell] + part->first_word[r] * dim;
        }
        for (int64_t u = 0; u < part->num_keys; ++u) {
          const uint32_t owner = part->place[u];
          words[next_word[owner]++] = static_cast<Word>(part->keys[u]);
          part->place[u] = static_cast<uint32_t>(next_place[owner]);
          next_place[owner] += dim;
        }
        const bool all = plan.of_table[part->table].choice == Choice::kRows;
        for (int64_t i = 0; i < (all ? part->n : part->fixed_n); ++i)
          part->home[i] = part->place[part->home[i] & ~kFirst] | (part->home[i] & kFirst);
      });
    }
  });
  cpu.executor.For(plan.num_chunks, 4 * kKeysPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) WriteIndex(plan, plan.chunks[c]);
  });
  WritePieces(cpu, scratch, plan.cut, targets, words);
}

template void WriteRoute(const Cpu&, Scratch*, const Route&, const int64_t*, int64_t*, const RoutedPieces*);
template void WriteRoute(const Cpu&, Scratch*, const Route&, const int64_t*, int32_t*, const RoutedPieces*);

}  // namespace sok
