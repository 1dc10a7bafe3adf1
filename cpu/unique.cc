#include "sok/unique.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "numbering.h"
#include "sok/error.h"
#include "tasks.h"

namespace sok {
namespace {

// Keys are dealt to parts by hash, one part per thread, and each part tells its own apart in one pass over all keys: no
// key is moved. Its table misses the cache, which asking for places ahead hides.
constexpr int64_t kKeysPerUniqueChunk = 4096;
constexpr int64_t kMinKeysPerPart = 8192;
constexpr int kMaxKeyPartBits = 4;

}  // namespace

int64_t Unique(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, uint64_t* unique_keys,
               uint32_t* inverse, uint32_t* counts) {
  if (n >= INT64_C(0x80000000)) {
    throw InvalidArgument("at most 2^31 - 1 keys in one call. Received: " + std::to_string(n) + ".");
  }
  int bits = 0;
  while (bits < kMaxKeyPartBits && (1 << bits) < cpu.executor.num_threads() && (kMinKeysPerPart << bits) < n) ++bits;
  if (bits == 0) {
    Numbering numbering(n, scratch->Get<uint32_t>(Numbering::SlotsFor(n)), unique_keys);
    numbering.Number(keys, n, inverse);
    if (counts != nullptr) {
      std::fill_n(counts, numbering.count(), 0u);
      for (int64_t i = 0; i < n; ++i) ++counts[inverse[i]];
    }
    return numbering.count();
  }
  const int64_t parts = int64_t{1} << bits, chunks = (n + kKeysPerUniqueChunk - 1) / kKeysPerUniqueChunk;
  auto part_of = [bits](uint64_t key) { return static_cast<int64_t>((key * 0x9E3779B97F4A7C15ull) >> (64 - bits)); };
  auto chunk_end = [&](int64_t c) { return std::min(n, (c + 1) * kKeysPerUniqueChunk); };

  // cursor[c, p]: keys of part p in earlier chunks.
  uint32_t* cursor = scratch->Get<uint32_t>((chunks + 1) * parts);
  std::memset(cursor, 0, static_cast<size_t>((chunks + 1) * parts) * sizeof(uint32_t));
  ForTasks(cpu, chunks, n * 2, [&](int64_t, int64_t c) {
    uint32_t* mine = cursor + (c + 1) * parts;
    uint32_t count[4][1 << kMaxKeyPartBits] = {};  // four, since neighbours often fall into the same part
    for (int64_t i = c * kKeysPerUniqueChunk; i < chunk_end(c); ++i) ++count[i & 3][part_of(keys[i])];
    for (int64_t p = 0; p < parts; ++p) mine[p] = count[0][p] + count[1][p] + count[2][p] + count[3][p];
  });
  for (int64_t at = parts; at < (chunks + 1) * parts; ++at) cursor[at] += cursor[at - parts];

  struct Part {
    uint32_t* numbers;   // [keys of the part], in order
    uint16_t* places;    // the same: where in its chunk
    uint64_t* distinct;  // [num_distinct]
    uint32_t* firsts;    // the same: position of the first appearance
    uint32_t* counts;    // the same, or null
    uint32_t* answers;   // the same: number among all parts' keys
    uint32_t* slots;
    uint64_t* is_first;  // a bit for each position
    uint32_t num_distinct;
  };
  const int64_t words = (n + 63) / 64;
  Part* part = scratch->Get<Part>(parts);
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t m = cursor[chunks * parts + p];
    part[p] = {scratch->Get<uint32_t>(m),
               scratch->Get<uint16_t>(m + 1),
               scratch->Get<uint64_t>(m),
               scratch->Get<uint32_t>(m),
               counts == nullptr ? nullptr : scratch->Get<uint32_t>(m),
               scratch->Get<uint32_t>(m),
               scratch->Get<uint32_t>(Numbering::SlotsFor(m)),
               scratch->Get<uint64_t>(words),
               0};
  }
  uint64_t* buffers = scratch->Get<uint64_t>(parts * (kKeysPerUniqueChunk + 1));
  ForTasks(cpu, parts, n * 20, [&](int64_t, int64_t p) {
    Part& mine = part[p];
    uint64_t* own = buffers + p * (kKeysPerUniqueChunk + 1);
    Numbering numbering(cursor[chunks * parts + p], mine.slots, mine.distinct);
    std::memset(mine.is_first, 0, static_cast<size_t>(words) * sizeof(uint64_t));
    if (counts != nullptr) std::fill_n(mine.counts, cursor[chunks * parts + p], 0u);
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t begin = c * kKeysPerUniqueChunk, at = cursor[c * parts + p];
      uint16_t* places = mine.places + at;
      int64_t m = 0;
      for (int64_t i = begin; i < chunk_end(c); ++i) {
        own[m] = keys[i];
        places[m] = static_cast<uint16_t>(i - begin);
        m += part_of(keys[i]) == p;
      }
      uint32_t next = numbering.count();
      numbering.Number(own, m, mine.numbers + at);
      // A key whose number is the next one appears first.
      for (int64_t k = 0; next < numbering.count(); ++k) {
        mine.firsts[next] = static_cast<uint32_t>(begin) + places[k];
        next += mine.numbers[at + k] == next;
      }
      for (int64_t k = 0; counts != nullptr && k < m; ++k) ++mine.counts[mine.numbers[at + k]];
    }
    mine.num_distinct = numbering.count();
    for (uint32_t k = 0; k < mine.num_distinct; ++k)
      mine.is_first[mine.firsts[k] >> 6] |= uint64_t{1} << (mine.firsts[k] & 63);
  });

  // Keys are answered in order of first appearance: a key's answer is how many first appearances there were before.
  uint64_t* is_first = part[0].is_first;
  uint32_t* rank = scratch->Get<uint32_t>(words);  // before each word
  uint32_t found = 0;
  for (int64_t w = 0; w < words; ++w) {
    for (int64_t p = 1; p < parts; ++p) is_first[w] |= part[p].is_first[w];
    rank[w] = found;
    found += static_cast<uint32_t>(__builtin_popcountll(is_first[w]));
  }
  ForTasks(cpu, parts, int64_t{found} * 4, [&](int64_t, int64_t p) {
    const Part& mine = part[p];
    for (uint32_t k = 0; k < mine.num_distinct; ++k) {
      const uint32_t at = mine.firsts[k];
      const uint64_t earlier = is_first[at >> 6] & ((uint64_t{1} << (at & 63)) - 1);
      const uint32_t answer = rank[at >> 6] + static_cast<uint32_t>(__builtin_popcountll(earlier));
      mine.answers[k] = answer;
      unique_keys[answer] = mine.distinct[k];
      if (counts != nullptr) counts[answer] = mine.counts[k];
    }
  });
  ForTasks(cpu, chunks, n * 3, [&](int64_t, int64_t c) {
    uint32_t* out = inverse + c * kKeysPerUniqueChunk;
    for (int64_t p = 0; p < parts; ++p) {
      const Part& from = part[p];
      for (uint32_t k = cursor[c * parts + p]; k < cursor[(c + 1) * parts + p]; ++k) {
        out[from.places[k]] = from.answers[from.numbers[k]];
      }
    }
  });
  return found;
}

}  // namespace sok
