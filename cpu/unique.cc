#include "sok/unique.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "sok/error.h"
#include "tasks.h"

namespace sok {
namespace {

// Keys are first scattered into parts that fit the L2 cache, and told apart there: a table for all of them would miss the
// cache at every probe.
constexpr int64_t kKeysPerPart = 16384;
constexpr int kMaxPartBits = 10;
constexpr int64_t kKeysPerChunk = 16384;
constexpr uint32_t kFree = 0xFFFFFFFFu;

inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
  x = (x ^ (x >> 29)) * 0x9E3779B97F4A7C15ull;
  return x;
}

constexpr uint32_t kFirst = 0x80000000u;  // beside a number: here the key appears first

}  // namespace

int64_t Unique(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, uint64_t* unique_keys,
               uint32_t* inverse, uint32_t* counts) {
  if (n >= INT64_C(0x80000000)) {
    throw InvalidArgument("at most 2^31 - 1 keys in one call. Received: " + std::to_string(n) + ".");
  }
  int bits = 0;
  while (bits < kMaxPartBits && (kKeysPerPart << bits) < n) ++bits;
  const int64_t parts = int64_t{1} << bits;
  const int64_t chunks = std::max<int64_t>(1, n / kKeysPerChunk);
  auto chunk_begin = [&](int64_t c) { return n * c / chunks; };
  auto part_of = [bits](uint64_t hash) { return static_cast<uint16_t>(bits == 0 ? 0 : hash >> (64 - bits)); };

  // Stable scatter: count per chunk, prefix sums over (part, chunk), move. Positions need not be moved: whoever walks
  // through a chunk again meets the keys of each part in the same order.
  uint32_t* cursor = scratch->Get<uint32_t>((chunks + 1) * parts);  // [part of a key, chunk]; the last chunk: the end
  std::memset(cursor, 0, static_cast<size_t>((chunks + 1) * parts) * sizeof(uint32_t));
  uint16_t* part = scratch->Get<uint16_t>(n);
  uint64_t* moved = scratch->Get<uint64_t>(n);
  ForTasks(cpu, chunks, n * 4, [&](int64_t, int64_t c) {
    uint32_t* mine = cursor + c * parts;
    for (int64_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i) {
      part[i] = part_of(Mix(keys[i]));
      ++mine[part[i]];
    }
  });
  uint32_t total = 0, largest = 0;
  for (int64_t p = 0; p < parts; ++p) {
    const uint32_t begin = total;
    for (int64_t c = 0; c < chunks; ++c) {
      const uint32_t count = cursor[c * parts + p];
      cursor[c * parts + p] = total;
      total += count;
    }
    cursor[chunks * parts + p] = total;
    largest = std::max(largest, total - begin);
  }
  // Calls visit(i, place) for the positions i of chunk c and the places of their keys among those moved.
  auto walk = [&](int64_t worker, int64_t c, uint32_t* places, const auto& visit) {
    uint32_t* at = places + worker * parts;
    std::memcpy(at, cursor + c * parts, static_cast<size_t>(parts) * sizeof(uint32_t));
    for (int64_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i) visit(i, at[part[i]]++);
  };
  uint32_t* places = scratch->Get<uint32_t>(MaxWorkers(cpu, chunks) * parts);
  ForTasks(cpu, chunks, n * 6, [&](int64_t worker, int64_t c) {
    walk(worker, c, places, [&](int64_t i, uint32_t place) { moved[place] = keys[i]; });
  });

  // Each part: number its keys by first appearance, and mark where each appears first.
  int64_t table_size = 16;
  while (table_size < 2 * int64_t{largest}) table_size *= 2;
  uint32_t* tables = scratch->Get<uint32_t>(MaxWorkers(cpu, parts) * table_size);  // place of the key's first, or kFree
  uint32_t* number = scratch->Get<uint32_t>(n);  // of a place: its key's number, with kFirst where it is first
  uint32_t* answer = scratch->Get<uint32_t>(n);  // part's begin + number: place in the answer
  uint32_t* often = counts == nullptr ? nullptr : scratch->Get<uint32_t>(n);
  uint32_t* firsts = scratch->Get<uint32_t>(parts * chunks);  // first appearances per part and chunk
  ForTasks(cpu, parts, n * 20, [&](int64_t worker, int64_t p) {
    uint32_t* table = tables + worker * table_size;
    const uint32_t begin = cursor[p], end = cursor[chunks * parts + p];
    uint64_t mask = 15;
    while (mask + 1 < 2 * uint64_t{end - begin}) mask = 2 * mask + 1;
    std::memset(table, 0xFF, (mask + 1) * sizeof(uint32_t));
    uint32_t numbers = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      const uint32_t before = numbers, chunk_end = cursor[(c + 1 < chunks ? c + 1 : chunks) * parts + p];
      for (uint32_t i = cursor[c * parts + p]; i < chunk_end; ++i) {
        const uint64_t key = moved[i];
        uint64_t at = Mix(key) & mask;
        while (table[at] != kFree && moved[table[at]] != key) at = (at + 1) & mask;
        if (table[at] == kFree) {
          table[at] = i;
          if (often != nullptr) often[begin + numbers] = 0;
          number[i] = numbers++ | kFirst;
        } else {
          number[i] = number[table[at]] & ~kFirst;
        }
        if (often != nullptr) ++often[begin + (number[i] & ~kFirst)];
      }
      firsts[p * chunks + c] = numbers - before;
    }
  });

  // Keys are answered in order of first appearance: chunk after chunk, and inside a chunk as they come.
  int64_t* rank = scratch->Get<int64_t>(chunks + 1);
  rank[0] = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    rank[c + 1] = rank[c];
    for (int64_t p = 0; p < parts; ++p) rank[c + 1] += firsts[p * chunks + c];
  }
  ForTasks(cpu, chunks, n * 4, [&](int64_t worker, int64_t c) {
    uint32_t next = static_cast<uint32_t>(rank[c]);
    uint64_t no_key;  // where what is not a first appearance is written: a branch would be guessed wrong too often
    uint32_t no_answer, no_count;
    walk(worker, c, places, [&](int64_t i, uint32_t place) {
      const bool is_first = (number[place] & kFirst) != 0;
      const uint32_t at = cursor[part[i]] + (number[place] & ~kFirst);
      *(is_first ? answer + at : &no_answer) = next;
      *(is_first ? unique_keys + next : &no_key) = keys[i];
      if (counts != nullptr) *(is_first ? counts + next : &no_count) = often[at];
      next += is_first;
    });
  });
  ForTasks(cpu, chunks, n * 5, [&](int64_t worker, int64_t c) {
    walk(worker, c, places,
         [&](int64_t i, uint32_t place) { inverse[i] = answer[cursor[part[i]] + (number[place] & ~kFirst)]; });
  });
  return rank[chunks];
}

}  // namespace sok
