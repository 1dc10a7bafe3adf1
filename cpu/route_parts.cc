#include "route_plan.h"

#include <algorithm>
#include <new>
#include <string>

#include "feature_keys.h"
#include "numbering.h"
#include "sok/error.h"

namespace sok {
namespace {

// Keys of one hash table: it and the keys in it then stay in a second-level cache (4 MB for 2 cores is a usual size).
constexpr int64_t kKeysPerPart = 128 << 10;

// Not seeded: the order of keys in a message depends on it, and so do the numbers of the rows that they get.
inline int PartOf(uint64_t key, int shift) {
  key = (key ^ (key >> 32)) * 0xD6E8FEB86659FD93ull;
  key = (key ^ (key >> 29)) * 0x9E3779B97F4A7C15ull;
  return static_cast<int>(key >> shift);
}

// How many keys of a chunk fall into each part.
void CountParts(const Plan& plan, KeyChunk* chunk) {
  const RouteFeature& feature = plan.features[chunk->feature];
  const int shift = plan.of_table[feature.table].shift;
  std::fill_n(chunk->at, kMaxParts, 0);
  if (shift == 64) {
    chunk->at[0] = chunk->end - chunk->begin;
    return;
  }
  WithKeys(feature, plan.tables[feature.table].is_unsigned, [&](auto key_at) {
    for (int64_t i = chunk->begin; i < chunk->end; ++i) ++chunk->at[PartOf(key_at(i), shift)];
  });
}

// Moves the keys of a chunk to their parts, each part in order.
void Scatter(const Plan& plan, const KeyChunk& chunk) {
  const RouteFeature& feature = plan.features[chunk.feature];
  const TableKeys& table = plan.of_table[feature.table];
  int64_t next[kMaxParts];
  std::copy_n(chunk.at, kMaxParts, next);
  WithKeys(feature, plan.tables[feature.table].is_unsigned, [&](auto key_at) {
    if (table.shift == 64) {
      for (int64_t i = chunk.begin; i < chunk.end; ++i) table.keys[next[0]++] = key_at(i);
      return;
    }
    for (int64_t i = chunk.begin; i < chunk.end; ++i) {
      const uint64_t key = key_at(i);
      table.keys[next[PartOf(key, table.shift)]++] = key;
    }
  });
}

int64_t ChunksOf(int64_t keys) { return (keys + kKeysPerChunk - 1) / kKeysPerChunk; }

}  // namespace

void SortFeatures(Scratch* scratch, Plan* plan) {
  plan->of_table = scratch->Get<TableKeys>(plan->num_tables);
  std::atomic<int64_t>* found = scratch->Get<std::atomic<int64_t>>(plan->num_tables);
  for (int t = 0; t < plan->num_tables; ++t) {
    plan->of_table[t] = TableKeys();
    plan->of_table[t].found = new (found + t) std::atomic<int64_t>(0);
  }
  plan->features_of = scratch->Get<int>(plan->num_features);
  for (int f = 0; f < plan->num_features; ++f) {
    TableKeys& table = plan->of_table[plan->features[f].table];
    table.n += plan->features[f].n;
    ++(MaySum(plan->features[f]) ? table.features_end : table.features_free);
  }
  int before = 0;
  for (int t = 0; t < plan->num_tables; ++t) {
    TableKeys& table = plan->of_table[t];
    const int fixed = table.features_free, free = table.features_end;
    table.features_begin = table.features_free = before;  // these two move on while features are put down
    table.features_end = before + fixed;
    before += fixed + free;
  }
  for (int f = 0; f < plan->num_features; ++f) {
    TableKeys& table = plan->of_table[plan->features[f].table];
    plan->features_of[MaySum(plan->features[f]) ? table.features_end++ : table.features_free++] = f;
  }
}

void MakeParts(const Cpu& cpu, Scratch* scratch, Plan* plan) {
  int64_t keys = 0, most_chunks = 0;
  for (int f = 0; f < plan->num_features; ++f) most_chunks += ChunksOf(plan->features[f].n);
  plan->chunks = scratch->Get<KeyChunk>(most_chunks);
  for (int t = 0; t < plan->num_tables; ++t) {
    TableKeys& table = plan->of_table[t];
    if (table.n > kPlaceMask) {
      throw InvalidArgument("at most 2^31 - 1 keys of one table in one call. Received: " + std::to_string(table.n) +
                            ".");
    }
    if (table.choice == Choice::kSums) table.n -= table.free_keys;
    int parts = 1;
    table.shift = 64;
    while (parts < kMaxParts && parts * kKeysPerPart < table.n) {
      parts *= 2;
      --table.shift;
    }
    table.parts_begin = plan->num_parts;
    table.parts_end = plan->num_parts += parts;
    table.keys = scratch->Get<uint64_t>(table.n);
    table.home = scratch->Get<uint32_t>(table.n);
    table.chunks_begin = plan->num_chunks;
    const int last = table.choice == Choice::kSums ? table.features_free : table.features_end;
    for (int at = table.features_begin; at < last; ++at) {
      if (at == table.features_free) table.chunks_free = plan->num_chunks;
      const int f = plan->features_of[at];
      const int64_t n = plan->features[f].n;
      for (int64_t i = 0; i < n; i += kKeysPerChunk)
        plan->chunks[plan->num_chunks++] = {f, i, std::min(i + kKeysPerChunk, n), {}};
    }
    table.chunks_end = plan->num_chunks;
    if (last == table.features_free) table.chunks_free = table.chunks_end;
    keys += table.n;
  }
  const int64_t cost = keys / std::max<int64_t>(1, plan->num_chunks) + 1;
  cpu.executor.For(plan->num_chunks, 4 * cost, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) CountParts(*plan, &plan->chunks[c]);
  });
  plan->parts = scratch->Get<Part>(plan->num_parts);
  for (int t = 0; t < plan->num_tables; ++t) {
    const TableKeys& table = plan->of_table[t];
    int64_t at = 0;
    for (int p = 0; p < table.parts_end - table.parts_begin; ++p) {
      Part& part = plan->parts[table.parts_begin + p];
      part = Part();
      part.table = t;
      part.keys = table.keys + at;
      part.home = table.home + at;
      const int64_t begin = at;
      for (int64_t c = table.chunks_begin; c < table.chunks_end; ++c) {
        if (c == table.chunks_free) part.fixed_n = at - begin;
        const int64_t count = plan->chunks[c].at[p];
        plan->chunks[c].at[p] = at;
        at += count;
      }
      part.n = at - begin;
      if (table.chunks_free == table.chunks_end) part.fixed_n = part.n;
      part.place = scratch->Get<uint32_t>(part.n);
      part.counts = scratch->Get<int64_t>(plan->world);
      part.first_word = scratch->Get<int64_t>(plan->world);
    }
  }
  cpu.executor.For(plan->num_chunks, 6 * cost, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) Scatter(*plan, plan->chunks[c]);
  });
}

void Deduplicate(const Plan& plan, Part* part, uint32_t* slots) {
  constexpr int64_t kBlock = 4096;
  const TableKeys& table = plan.of_table[part->table];
  Numbering numbering(part->n, slots, part->keys);
  for (const bool free : {false, true}) {
    if (free) part->num_fixed = numbering.count();
    const int64_t last = free ? part->n : part->fixed_n;
    for (int64_t at = free ? part->fixed_n : 0; at < last; at += kBlock) {
      const int64_t end = std::min(at + kBlock, last);
      const uint32_t before = numbering.count();
      // In place: there are never more distinct keys than those that have been read.
      numbering.Number(part->keys + at, end - at, part->home + at);
      uint32_t next = before;
      for (int64_t i = at; i < end; ++i) {
        const uint32_t first = part->home[i] == next;
        next += first;
        part->home[i] |= first << 31;
      }
      if (!free || table.choice != Choice::kOpen) continue;
      const int64_t more = next - before;
      if (table.found->fetch_add(more, std::memory_order_relaxed) + more > table.limit) return;
    }
  }
  part->num_keys = numbering.count();
}

void WriteIndex(const Plan& plan, const KeyChunk& chunk) {
  if (plan.pieces[chunk.feature] != kByRows) return;
  const RouteFeature& feature = plan.features[chunk.feature];
  const TableKeys& table = plan.of_table[feature.table];
  int64_t next[kMaxParts];  // the way on which the keys went there
  std::copy_n(chunk.at, kMaxParts, next);
  if (table.shift == 64) {
    std::copy_n(table.home + next[0], chunk.end - chunk.begin,
                reinterpret_cast<uint32_t*>(feature.index) + chunk.begin);
    return;
  }
  WithKeys(feature, plan.tables[feature.table].is_unsigned, [&](auto key_at) {
    for (int64_t i = chunk.begin; i < chunk.end; ++i)
      feature.index[i] = static_cast<int32_t>(table.home[next[PartOf(key_at(i), table.shift)]++]);
  });
}

}  // namespace sok
