#include "pieces.h"

#include <algorithm>

#include "feature_keys.h"
#include "sok/partition.h"

namespace sok {
namespace {

constexpr int64_t kKeysPerPiece = 16384;
constexpr int64_t kPieceCyclesPerKey = 6;
constexpr int32_t kFirst = INT32_MIN;

int64_t ChunksOf(const RouteFeature& f) {
  return std::max<int64_t>(1, std::min(f.segments, (f.n + f.segments / 4) / kKeysPerPiece));
}

Partition PartitionOf(const RouteTable& table, int world) { return {world, table.owner, table.is_unsigned}; }

void CountChunk(const PieceCount& count, PieceChunk* chunk) {
  const RouteFeature& f = count.features[chunk->feature];
  const RouteTable& table = count.tables[f.table];
  const Partition partition = PartitionOf(table, count.world);
  int64_t *pieces = chunk->pieces, *keys = chunk->keys, *seen = chunk->seen;
  std::fill_n(pieces, count.world, 0);
  std::fill_n(keys, count.world, 0);
  std::fill_n(seen, count.world, -1);
  bool is_legal = true;
  WithKeys(f, table.is_unsigned, [&](auto key_at) {
    for (int64_t s = chunk->begin; s < chunk->end; ++s) {
      for (int64_t i = f.row_splits[s]; i < f.row_splits[s + 1]; ++i) {
        const uint64_t key = key_at(i);
        is_legal &= table.num_legal == 0 || key < table.num_legal;
        const int owner = partition.OwnerOf(key);
        ++keys[owner];
        pieces[owner] += seen[owner] != s;
        seen[owner] = s;
      }
    }
  });
  chunk->is_legal = is_legal;
}

// cursors: [3, world], where the lengths, keys and places of this chunk begin; piece: its first one in the feature.
template <class Word>
void WriteChunk(const PieceCount& count, const PieceChunk& chunk, const PieceTarget& to, int64_t* cursors,
                int64_t piece, Word* words) {
  const RouteFeature& f = count.features[chunk.feature];
  const RouteTable& table = count.tables[f.table];
  const Partition partition = PartitionOf(table, count.world);
  int64_t *next_length = cursors, *next_key = cursors + count.world, *next_place = cursors + 2 * count.world;
  int64_t* seen = chunk.seen;
  std::fill_n(seen, count.world, -1);
  WithKeys(f, table.is_unsigned, [&](auto key_at) {
    for (int64_t s = chunk.begin; s < chunk.end; ++s) {
      const int64_t first = f.row_splits[s], last = f.row_splits[s + 1];
      const float scale = SegmentScale(f.combiner, nullptr, last - first);
      for (int64_t i = first; i < last; ++i) {
        const uint64_t key = key_at(i);
        const int owner = partition.OwnerOf(key);
        if (seen[owner] != s) {
          seen[owner] = s;
          words[next_length[owner]++] = 0;
          to.index[piece] = static_cast<int32_t>(next_place[owner]) | kFirst;
          next_place[owner] += table.dim;
          if (to.scales != nullptr) to.scales[piece] = scale;
          ++piece;
        }
        ++words[next_length[owner] - 1];
        words[next_key[owner]++] = static_cast<Word>(key);
      }
      to.row_splits[s + 1] = piece;
    }
  });
}

}  // namespace

bool PieceCount::AllLegal() const {
  return std::all_of(chunks, chunks + num_chunks, [](const PieceChunk& chunk) { return chunk.is_legal; });
}

int64_t EstimatePieces(Scratch* scratch, const RouteTable& table, const RouteFeature& f, int world) {
  constexpr int64_t kSampled = 1024;
  const Partition partition = PartitionOf(table, world);
  const int64_t sampled = std::min(f.segments, kSampled);
  int64_t* seen = scratch->Get<int64_t>(world);  // the last segment that had a key of that rank
  std::fill_n(seen, world, -1);
  int64_t pieces = 0;
  WithKeys(f, table.is_unsigned, [&](auto key_at) {
    for (int64_t k = 0; k < sampled; ++k) {
      const int64_t s = f.segments * k / sampled;
      for (int64_t i = f.row_splits[s]; i < f.row_splits[s + 1]; ++i) {
        int64_t& last = seen[partition.OwnerOf(key_at(i))];
        pieces += last != s;
        last = s;
      }
    }
  });
  return sampled == 0 ? 0 : pieces * f.segments / sampled;
}

PieceCount CountPieces(const Cpu& cpu, Scratch* scratch, const RouteTable* tables, const RouteFeature* features,
                       const int* cut, int num_cut, int world) {
  PieceCount count;
  count.world = world;
  count.tables = tables;
  count.features = features;
  for (int c = 0; c < num_cut; ++c) count.num_chunks += ChunksOf(features[cut[c]]);
  count.chunks = scratch->Get<PieceChunk>(count.num_chunks);
  const int64_t stride = (3 * int64_t{world} + 7) & ~int64_t{7};  // threads do not share cache lines
  int64_t* numbers = scratch->Get<int64_t>(count.num_chunks * stride);
  int64_t at = 0, keys = 0;
  for (int c = 0; c < num_cut; ++c) {
    const RouteFeature& f = features[cut[c]];
    const int64_t chunks = ChunksOf(f);
    keys += f.n + f.segments;
    for (int64_t k = 0; k < chunks; ++k, ++at) {
      int64_t* mine = numbers + at * stride;
      count.chunks[at] = {cut[c],       f.segments * k / chunks, f.segments * (k + 1) / chunks, mine,
                          mine + world, mine + 2 * world};
    }
  }
  if (at == 0) return count;
  cpu.executor.For(at, keys * kPieceCyclesPerKey / at + 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) CountChunk(count, &count.chunks[c]);
  });
  return count;
}

template <class Word>
void WritePieces(const Cpu& cpu, Scratch* scratch, const PieceCount& count, const PieceTarget* targets, Word* words) {
  const int world = count.world;
  int64_t* cursors = scratch->Get<int64_t>(count.num_chunks * 3 * world);
  int64_t* first_piece = scratch->Get<int64_t>(count.num_chunks);
  int64_t keys = 0;
  for (int64_t c = 0; c < count.num_chunks; ++c) {
    const PieceChunk& chunk = count.chunks[c];
    const PieceTarget& to = targets[chunk.feature];
    if (to.row_splits == nullptr) continue;
    const int64_t dim = count.tables[count.features[chunk.feature].table].dim;
    const bool begins = c == 0 || count.chunks[c - 1].feature != chunk.feature;
    int64_t* mine = cursors + c * 3 * world;
    first_piece[c] = 0;
    if (begins) {
      to.row_splits[0] = 0;
      std::copy_n(to.length, world, mine);
      std::copy_n(to.key, world, mine + world);
      std::copy_n(to.place, world, mine + 2 * world);
    } else {
      const PieceChunk& before = count.chunks[c - 1];
      const int64_t* its = mine - 3 * world;
      first_piece[c] = first_piece[c - 1];
      for (int r = 0; r < world; ++r) {
        first_piece[c] += before.pieces[r];
        mine[r] = its[r] + before.pieces[r];
        mine[world + r] = its[world + r] + before.keys[r];
        mine[2 * world + r] = its[2 * world + r] + before.pieces[r] * dim;
      }
    }
    for (int r = 0; r < world; ++r) keys += chunk.keys[r];
  }
  if (count.num_chunks == 0) return;
  cpu.executor.For(count.num_chunks, keys * kPieceCyclesPerKey / count.num_chunks + 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const PieceChunk& chunk = count.chunks[c];
      if (targets[chunk.feature].row_splits == nullptr) continue;
      WriteChunk(count, chunk, targets[chunk.feature], cursors + c * 3 * world, first_piece[c], words);
    }
  });
}

template void WritePieces(const Cpu&, Scratch*, const PieceCount&, const PieceTarget*, int64_t*);
template void WritePieces(const Cpu&, Scratch*, const PieceCount&, const PieceTarget*, int32_t*);

}  // namespace sok
