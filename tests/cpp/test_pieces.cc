// Pieces alone, against a slow statement: chunks, owners of negative keys, offsets of several features in one message.
#include "../../cpu/pieces.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "sok/partition.h"
#include "threads.h"

namespace {

struct Cut {
  std::vector<uint64_t> keys;
  std::vector<int64_t> splits{0};
  sok::Combiner combiner;
};

void CheckPieces(int world, bool is_unsigned, int threads, int64_t segments) {
  std::mt19937_64 random(static_cast<uint64_t>(world + segments));
  const ThreadExecutor executor(threads);
  sok::Scratch scratch;
  const sok::RouteTable tables[] = {{3, is_unsigned, 0}, {5, is_unsigned, 0, world - 1}};
  std::vector<Cut> cuts(3);
  std::vector<sok::RouteFeature> features(3);
  for (size_t f = 0; f < 3; ++f) {
    cuts[f].combiner = f == 0 ? sok::Combiner::kSum : f == 1 ? sok::Combiner::kMean : sok::Combiner::kSqrtn;
    for (int64_t s = 0; s < segments; ++s) {
      for (uint64_t n = random() % 6; n > 0; --n) cuts[f].keys.push_back(random() - random() % 3);
      cuts[f].splits.push_back(static_cast<int64_t>(cuts[f].keys.size()));
    }
    features[f].table = f == 2 ? 1 : 0;
    features[f].keys = cuts[f].keys.data();
    features[f].n = cuts[f].splits.back();
    features[f].row_splits = cuts[f].splits.data();
    features[f].segments = segments;
    features[f].combiner = cuts[f].combiner;
  }
  const int cut[] = {0, 1, 2};
  const sok::PieceCount count = sok::CountPieces({executor}, &scratch, tables, features.data(), cut, 3, world);
  CHECK(count.AllLegal());

  // A message for each rank: of each feature the lengths, then the keys.
  const size_t ranks = static_cast<size_t>(world);
  std::vector<std::vector<int64_t>> pieces(3, std::vector<int64_t>(ranks)), keys(pieces), length(pieces), key(pieces),
      place(pieces);
  int64_t words = 0, floats = 0;
  for (int64_t c = 0; c < count.num_chunks; ++c) {
    const sok::PieceChunk& chunk = count.chunks[c];
    const size_t f = static_cast<size_t>(chunk.feature);
    for (size_t r = 0; r < ranks; ++r) {
      pieces[f][r] += chunk.pieces[r];
      keys[f][r] += chunk.keys[r];
    }
  }
  for (size_t f = 0; f < 3; ++f) {
    int64_t all = 0;
    for (const int64_t n : pieces[f]) all += n;
    const int64_t estimate = sok::EstimatePieces(&scratch, tables[features[f].table], features[f], world);
    CHECK(segments > 1024 ? std::abs(estimate - all) * 20 <= all : estimate == all);
  }
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t f = 0; f < 3; ++f) {
      length[f][r] = words;
      key[f][r] = words + pieces[f][r];
      place[f][r] = floats;
      words += pieces[f][r] + keys[f][r];
      floats += pieces[f][r] * tables[features[f].table].dim;
    }
  }
  std::vector<int64_t> message(static_cast<size_t>(words), -7);
  std::vector<sok::PieceTarget> targets(3);
  std::vector<std::vector<int32_t>> index(3);
  std::vector<std::vector<float>> scales(3);
  std::vector<std::vector<int64_t>> splits(3, std::vector<int64_t>(static_cast<size_t>(segments) + 1));
  for (size_t f = 0; f < 3; ++f) {
    int64_t all = 0;
    for (const int64_t n : pieces[f]) all += n;
    index[f].resize(static_cast<size_t>(all));
    scales[f].resize(static_cast<size_t>(all));
    targets[f] = {index[f].data(),  splits[f].data(), scales[f].data(),
                  length[f].data(), key[f].data(),    place[f].data()};
  }
  sok::WritePieces({executor}, &scratch, count, targets.data(), message.data());

  for (size_t f = 0; f < 3; ++f) {
    const sok::RouteTable& table = tables[features[f].table];
    size_t piece = 0;
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t first = cuts[f].splits[static_cast<size_t>(s)], last = cuts[f].splits[static_cast<size_t>(s) + 1];
      std::map<int, std::vector<uint64_t>> of_rank;
      std::vector<int> order;
      for (int64_t i = first; i < last; ++i) {
        const uint64_t k = cuts[f].keys[static_cast<size_t>(i)];
        const int owner = table.owner == sok::kByKey ? sok::Owner(k, world, is_unsigned) : table.owner;
        if (of_rank[owner].empty()) order.push_back(owner);
        of_rank[owner].push_back(k);
      }
      const float n = static_cast<float>(last - first);
      const float scale = f == 0 ? 1.0f : f == 1 ? 1.0f / n : 1.0f / std::sqrt(n);
      for (const int owner : order) {
        const size_t r = static_cast<size_t>(owner);
        CHECK_EQ(index[f][piece], static_cast<int32_t>(place[f][r]) | INT32_MIN);
        CHECK(std::fabs(scales[f][piece] - scale) < 1e-6f);
        CHECK_EQ(message[static_cast<size_t>(length[f][r])], static_cast<int64_t>(of_rank[owner].size()));
        for (const uint64_t k : of_rank[owner])
          CHECK_EQ(message[static_cast<size_t>(key[f][r]++)], static_cast<int64_t>(k));
        ++length[f][r];
        place[f][r] += table.dim;
        ++piece;
      }
      CHECK_EQ(splits[f][static_cast<size_t>(s) + 1], static_cast<int64_t>(piece));
    }
    CHECK_EQ(piece, index[f].size());
  }
}

}  // namespace

TEST(PiecesAreWhatRanksOwnOfSegments) {
  for (const int world : {1, 2, 3, 5, 7})
    for (const bool is_unsigned : {false, true})
      for (const int64_t segments : {0, 1, 50, 3000}) CheckPieces(world, is_unsigned, world, segments);
}
