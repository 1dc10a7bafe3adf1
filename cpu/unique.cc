#include "sok/unique.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kEntriesPerPartition = 8192;  // a partition's hash table then fits the L2 cache
constexpr int kMaxPartitionBits = 10;
constexpr int64_t kCyclesPerEntry = 30;

inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
  x = (x ^ (x >> 29)) * 0x9E3779B97F4A7C15ull;
  return x;
}

struct Entry {
  uint64_t key;
  uint32_t position;
  uint32_t group;  // within its partition
};

// Cuts [0, n) into equal chunks; the number depends on the threads, results must not.
struct Chunks {
  Chunks(const Cpu& cpu, int64_t n)
      : n(n), count(std::max<int64_t>(1, std::min<int64_t>(cpu.executor.num_threads() * 2, n / 4096))) {}
  int64_t Begin(int64_t chunk) const { return n * chunk / count; }
  const int64_t n;
  const int64_t count;
};

}  // namespace

Groups GroupKeys(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n) {
  if (n >= INT64_C(0xFFFFFFFF)) {
    throw InvalidArgument("at most 2^32 - 2 keys in one call. Received: " + std::to_string(n) + ".");
  }
  int bits = 0;
  while (bits < kMaxPartitionBits && (kEntriesPerPartition << bits) < n) ++bits;
  const int64_t num_parts = int64_t{1} << bits;
  const Chunks chunks(cpu, n);
  auto partition_of = [bits](uint64_t hash) { return bits == 0 ? 0 : static_cast<int64_t>(hash >> (64 - bits)); };

  // Stable scatter into partitions: count per chunk, prefix sum over (partition, chunk), move.
  uint32_t* cursor = scratch->Get<uint32_t>(chunks.count * num_parts);
  std::memset(cursor, 0, static_cast<size_t>(chunks.count * num_parts) * sizeof(uint32_t));
  Entry* entries = scratch->Get<Entry>(n);
  const int64_t chunk_cost = (n / chunks.count + 1) * kCyclesPerEntry;
  cpu.executor.For(chunks.count, chunk_cost, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      uint32_t* mine = cursor + c * num_parts;
      for (int64_t i = chunks.Begin(c); i < chunks.Begin(c + 1); ++i) ++mine[partition_of(Mix(keys[i]))];
    }
  });
  uint32_t* part_begin = scratch->Get<uint32_t>(num_parts + 1);
  uint32_t total = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    part_begin[p] = total;
    for (int64_t c = 0; c < chunks.count; ++c) {
      const uint32_t count = cursor[c * num_parts + p];
      cursor[c * num_parts + p] = total;
      total += count;
    }
  }
  part_begin[num_parts] = total;
  cpu.executor.For(chunks.count, chunk_cost, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      uint32_t* mine = cursor + c * num_parts;
      for (int64_t i = chunks.Begin(c); i < chunks.Begin(c + 1); ++i) {
        entries[mine[partition_of(Mix(keys[i]))]++] = {keys[i], static_cast<uint32_t>(i), 0};
      }
    }
  });

  // Each partition: number its distinct keys in order of appearance, then lay their positions side by side.
  uint32_t* positions = scratch->Get<uint32_t>(n);
  uint32_t* local_offsets = scratch->Get<uint32_t>(n + num_parts);
  uint32_t* part_groups = scratch->Get<uint32_t>(num_parts);
  int64_t largest = 0;
  for (int64_t p = 0; p < num_parts; ++p) largest = std::max<int64_t>(largest, part_begin[p + 1] - part_begin[p]);
  int64_t slots = 16;
  while (slots < 2 * largest) slots *= 2;
  const int64_t part_cost = (n / num_parts + 1) * kCyclesPerEntry;
  // Tables: one per chunk of partitions, taken before the loop because scratch serves one thread.
  const int64_t workers = std::min<int64_t>(num_parts, cpu.executor.num_threads() * 2);
  uint32_t* tables = scratch->Get<uint32_t>(workers * slots);
  cpu.executor.For(workers, part_cost * (num_parts / workers), [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      uint32_t* table = tables + worker * slots;
      for (int64_t p = num_parts * worker / workers; p < num_parts * (worker + 1) / workers; ++p) {
        Entry* part = entries + part_begin[p];
        const int64_t count = part_begin[p + 1] - part_begin[p];
        uint64_t mask = 15;
        while (static_cast<int64_t>(mask + 1) < 2 * count) mask = 2 * mask + 1;
        std::memset(table, 0, (mask + 1) * sizeof(uint32_t));  // 0: free; else 1 + the group's first entry
        uint32_t* offsets = local_offsets + part_begin[p] + p;
        uint32_t groups = 0;
        for (int64_t i = 0; i < count; ++i) {
          uint64_t at = Mix(part[i].key) & mask;
          while (table[at] != 0 && part[table[at] - 1].key != part[i].key) at = (at + 1) & mask;
          if (table[at] == 0) {
            table[at] = static_cast<uint32_t>(i + 1);
            offsets[groups + 1] = 0;
            part[i].group = groups++;
          } else {
            part[i].group = part[table[at] - 1].group;
          }
          ++offsets[part[i].group + 1];
        }
        offsets[0] = part_begin[p];
        for (uint32_t g = 0; g < groups; ++g) offsets[g + 1] += offsets[g];
        for (int64_t i = 0; i < count; ++i) positions[offsets[part[i].group]++] = part[i].position;
        for (uint32_t g = groups; g > 0; --g) offsets[g] = offsets[g - 1];  // undo the advance
        offsets[0] = part_begin[p];
        part_groups[p] = groups;
      }
    }
  });

  Groups result;
  for (int64_t p = 0; p < num_parts; ++p) result.num_groups += part_groups[p];
  uint32_t* offsets = scratch->Get<uint32_t>(result.num_groups + 1);
  uint32_t* out = offsets;
  for (int64_t p = 0; p < num_parts; ++p) {
    std::memcpy(out, local_offsets + part_begin[p] + p, part_groups[p] * sizeof(uint32_t));
    out += part_groups[p];
  }
  *out = static_cast<uint32_t>(n);
  result.offsets = offsets;
  result.positions = positions;
  return result;
}

const uint32_t* FirstAppearance(const Cpu& cpu, Scratch* scratch, const Groups& groups, int64_t n) {
  uint32_t* rank_at = scratch->Get<uint32_t>(n);
  std::memset(rank_at, 0, static_cast<size_t>(n) * sizeof(uint32_t));
  for (int64_t g = 0; g < groups.num_groups; ++g) rank_at[groups.positions[groups.offsets[g]]] = 1;
  uint32_t rank = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t is_first = rank_at[i];
    rank_at[i] = rank;
    rank += is_first;
  }
  uint32_t* order = scratch->Get<uint32_t>(groups.num_groups);
  cpu.executor.For(groups.num_groups, 10, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) order[g] = rank_at[groups.positions[groups.offsets[g]]];
  });
  return order;
}

int64_t Unique(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, uint64_t* unique_keys,
               uint32_t* inverse, uint32_t* counts) {
  const Groups groups = GroupKeys(cpu, scratch, keys, n);
  const uint32_t* order = FirstAppearance(cpu, scratch, groups, n);
  cpu.executor.For(groups.num_groups, 40, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const uint32_t to = order[g];
      unique_keys[to] = keys[groups.positions[groups.offsets[g]]];
      if (counts != nullptr) counts[to] = groups.offsets[g + 1] - groups.offsets[g];
      for (uint32_t i = groups.offsets[g]; i < groups.offsets[g + 1]; ++i) inverse[groups.positions[i]] = to;
    }
  });
  return groups.num_groups;
}

void SumGroups(const Cpu& cpu, const Groups& groups, const float* values, const uint32_t* source, const float* factor,
               const uint32_t* order, int64_t dim, float* sums) {
  cpu.executor.For(groups.num_groups, 20 + 2 * dim, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      float* sum = sums + (order == nullptr ? g : int64_t{order[g]}) * dim;
      std::fill(sum, sum + dim, 0.0f);
      for (uint32_t i = groups.offsets[g]; i < groups.offsets[g + 1]; ++i) {
        const uint32_t p = groups.positions[i];
        const float* value = values + int64_t{source == nullptr ? p : source[p]} * dim;
        if (factor == nullptr) {
          for (int64_t j = 0; j < dim; ++j) sum[j] += value[j];
        } else {
          const float f = factor[p];
          for (int64_t j = 0; j < dim; ++j) sum[j] += f * value[j];
        }
      }
    }
  });
}

}  // namespace sok
