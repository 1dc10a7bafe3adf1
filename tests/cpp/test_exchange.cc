#include "sok/exchange.h"

#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/partition.h"
#include "threads.h"

namespace {

constexpr int32_t kFirst = INT32_MIN;

TEST(OwnersAreNeverNegative) {
  CHECK_EQ(sok::Owner(static_cast<uint64_t>(-1), 3, false), 2);
  CHECK_EQ(sok::Owner(static_cast<uint64_t>(-3), 3, false), 0);
  CHECK_EQ(sok::Owner(static_cast<uint64_t>(INT64_MIN), 3, false), 1);  // -2^63 = -(2 mod 3)
  CHECK_EQ(sok::Owner(~uint64_t{0}, 3, true), 0);                       // 2^64 - 1 is divisible by 3
  CHECK_EQ(sok::Owner(uint64_t{1} << 63, 3, true), 2);
  CHECK_EQ(sok::Owner(static_cast<uint64_t>(-3), 4, false), 1);
  for (const int world : {1, 2, 7, 8, 1000}) {
    for (const uint64_t key : {uint64_t{0}, uint64_t{5}, ~uint64_t{0}, uint64_t{1} << 63}) {
      for (const bool is_unsigned : {false, true}) {
        const int owner = sok::Owner(key, world, is_unsigned);
        CHECK(owner >= 0 && owner < world);
      }
    }
  }
}

// As in tests/sok/test_placement.py: files rely on these numbers.
TEST(TheBucketsOfKeysNeverChange) {
  const std::vector<std::pair<int64_t, int>> known = {
      {0, 0}, {1, 2885}, {2, 939}, {-1, 1611}, {int64_t{1} << 40, 3712}, {INT64_MIN, 2295}};
  for (const auto& [key, bucket] : known) CHECK_EQ(sok::BucketOf(static_cast<uint64_t>(key)), bucket);
  for (const int world : {1, 2, 3, 7, 4096}) {
    const sok::Partition partition{world, sok::kByHash, false};
    CHECK(partition.IsValid() && partition.num_shards() == world);
    for (const auto& [key, bucket] : known) {
      CHECK_EQ(partition.OwnerOf(static_cast<uint64_t>(key)), bucket * world / 4096);
    }
  }
  CHECK(!(sok::Partition{4097, sok::kByHash, false}.IsValid()) && !(sok::Partition{2, -3, false}.IsValid()));
}

TEST(RowsCanLieOnSomeRanksThatFollowOneAnother) {
  for (const bool by_hash : {false, true}) {
    for (const auto& [first, count] : std::vector<std::pair<int, int>>{{0, 7}, {2, 3}, {6, 1}, {1, 4}}) {
      const sok::Partition some{7, sok::OwnerOfRanks(first, count, by_hash), false};
      const sok::Partition all{count, by_hash ? sok::kByHash : sok::kByKey, false};
      CHECK(some.IsValid() && some.first_rank() == first && some.num_shards() == count);
      CHECK(some.is_by_hash() == by_hash && some.Holds(first) && some.Holds(first + count - 1));
      CHECK(!some.Holds(first - 1) && !some.Holds(first + count));
      for (int64_t key = -50; key < 50; ++key) {
        CHECK_EQ(some.OwnerOf(static_cast<uint64_t>(key)), first + all.OwnerOf(static_cast<uint64_t>(key)));
      }
    }
    for (const auto& [first, count] : std::vector<std::pair<int, int>>{{0, 8}, {7, 1}, {3, 5}, {2, 0}}) {
      CHECK(!(sok::Partition{7, sok::OwnerOfRanks(first, count, by_hash), false}.IsValid()));
    }
  }
  CHECK((sok::Partition{9000, sok::OwnerOfRanks(9, 5000, false), false}.IsValid()));
  CHECK(!(sok::Partition{9000, sok::OwnerOfRanks(9, 5000, true), false}.IsValid()));
  CHECK(!(sok::Partition{INT32_MAX, INT32_MIN, false}.IsValid()));
}

TEST(KeysAreBucketedByOwnerInOrderOfFirstAppearance) {
  const int64_t wide[] = {5, 2, 5, 3, 4, -1};
  const uint32_t narrow[] = {7, 7, 0xffffffffu};
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  int32_t index[6], other[3];
  const sok::RouteTable tables[] = {{2, false, 0}, {3, true, 0}};
  const sok::RouteFeature features[] = {{0, wide, true, 6, index}, {1, narrow, false, 3, other}};
  const sok::Route route = sok::RouteKeys({executor}, &scratch, tables, 2, features, 2, 2, 8);
  CHECK(route.is_legal);
  const int64_t counts[] = {2, 0, 0, 0, 0, 0, 3, 2, 0, 0, 0, 0};
  for (int i = 0; i < 12; ++i) CHECK_EQ(route.counts[i], counts[i]);
  CHECK_EQ(route.words[0], 2);
  CHECK_EQ(route.words[1], 5);
  CHECK_EQ(route.floats[0], 16 + 4);
  CHECK_EQ(route.floats[1], 16 + 6 + 6);
  const int64_t key_begin[] = {1, 4};
  int64_t words[9] = {};
  sok::WriteRoute({executor}, &scratch, route, key_begin, words, nullptr);
  const int64_t expected[] = {0, 2, 4, 0, 5, 3, -1, 7, 0xffffffff};
  for (int i = 0; i < 9; ++i) CHECK_EQ(words[i], expected[i]);
  // Answers: 16, rows 2 and 4 of dim 2, 16, rows 5, 3, -1 of dim 2, rows 7, 2^32 - 1 of dim 3.
  const int32_t places[] = {36 | kFirst, 16 | kFirst, 36, 38 | kFirst, 18 | kFirst, 40 | kFirst};
  for (int i = 0; i < 6; ++i) CHECK_EQ(index[i], places[i]);
  CHECK_EQ(other[0], 42 | kFirst);
  CHECK_EQ(other[1], 42);
  CHECK_EQ(other[2], 45 | kFirst);
}

// Routes keys of three workers, negative ones among them, to tables of each rank, and looks them up there: hashed tables take
// any key, identity tables those that are row numbers; a negative one belongs to no worker of the latter.
TEST(EveryKeyIsHeldByTheRankItIsSentTo) {
  const sok::SerialExecutor executor;
  for (const int world : {3, 5, 6, 7}) {
    for (const bool hashed : {true, false}) {
      std::vector<int64_t> keys;
      for (int64_t key = hashed ? -100 : 0; key < 200; ++key) keys.push_back(key);
      if (hashed) keys.insert(keys.end(), {INT64_MIN, INT64_MIN + 1, INT64_MAX});
      sok::Scratch scratch;
      std::vector<int32_t> index(keys.size());
      const uint64_t legal = hashed ? 0 : 40 * static_cast<uint64_t>(world);
      const sok::RouteTable table{2, false, legal};
      sok::RouteFeature feature;  // the route refers to it
      auto route_of = [&](const std::vector<int64_t>& of) {
        feature = sok::RouteFeature{0, of.data(), true, static_cast<int64_t>(of.size()), index.data()};
        return sok::RouteKeys({executor}, &scratch, &table, 1, &feature, 1, world, 8);
      };
      if (!hashed) keys.resize(std::min<size_t>(keys.size(), legal));
      const sok::Route route = route_of(keys);
      CHECK(route.is_legal);
      std::vector<int64_t> begin, words;
      for (int r = 0; r < world; ++r) {
        begin.push_back(static_cast<int64_t>(words.size()));
        words.resize(words.size() + static_cast<size_t>(route.words[r]));
      }
      sok::WriteRoute({executor}, &scratch, route, begin.data(), words.data(), nullptr);
      std::map<int64_t, int> seen;
      for (int r = 0; r < world; ++r) {
        sok::TableConfig config;
        config.name = "item";
        config.dim = 2;
        config.capacity = hashed ? 400 : 40;
        config.hashed = hashed;
        config.world_size = world;
        config.rank = r;
        sok::EmbeddingTable shard(config);
        const int64_t n = route.words[r];
        std::vector<uint64_t> mine(words.begin() + begin[static_cast<size_t>(r)],
                                   words.begin() + begin[static_cast<size_t>(r)] + n);
        std::vector<float> rows(static_cast<size_t>(2 * n));
        std::vector<int64_t> ids(static_cast<size_t>(n));
        shard.Lookup({executor}, &scratch, mine.data(), n, true, nullptr, rows.data(), ids.data());
        CHECK_EQ(shard.size(), n);
        for (const uint64_t key : mine) ++seen[static_cast<int64_t>(key)];
      }
      CHECK_EQ(seen.size(), keys.size());
      for (const auto& [key, times] : seen) CHECK_EQ(times, 1);
      if (hashed) continue;
      const sok::Route bad = route_of({1, -3});
      CHECK(!bad.is_legal);
      CHECK_EQ(static_cast<int64_t>(bad.bad_key), -3);
    }
  }
}

TEST(TheFirstIllegalKeyIsNamed) {
  const int64_t good[] = {1, 2}, bad[] = {3, -7, 12};
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  int32_t index[3];
  const sok::RouteTable tables[] = {{1, false, 0}, {1, false, 10}};
  const sok::RouteFeature features[] = {{0, bad, true, 3, index}, {1, good, true, 2, index}, {1, bad, true, 3, index}};
  const sok::Route route = sok::RouteKeys({executor}, &scratch, tables, 2, features, 3, 2, 8);
  CHECK(!route.is_legal);
  CHECK_EQ(route.bad_feature, 2);
  CHECK_EQ(static_cast<int64_t>(route.bad_key), -7);
}

TEST(AnswersTooLargeForAPlaceAreRefused) {
  const int64_t keys[] = {1, 2};
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  int32_t index[2];
  const sok::RouteTable table{int64_t{1} << 30, false, 0};
  const sok::RouteFeature feature{0, keys, true, 2, index};
  CHECK_THROWS(sok::RouteKeys({executor}, &scratch, &table, 1, &feature, 1, 2, 8), sok::InvalidArgument, "2^31 floats");
}

// The way of each table where sums are forced, forbidden, or chosen.
const sok::WayHome kWays[] = {sok::WayHome::kRows, sok::WayHome::kSums, sok::WayHome::kAuto};

// A whole way: route, answers made of the keys, outputs and gradients against a slow statement.
void CheckWholeWay(int threads, int world, int64_t n, int first_way) {
  std::mt19937_64 random(static_cast<uint64_t>(threads * 1000 + world + n));
  const ThreadExecutor executor(threads);
  sok::Scratch scratch;
  std::vector<sok::RouteTable> tables = {{3, false, 0}, {16, true, 0}, {8, false, 0, world - 1}};
  for (int t = 0; t < 3; ++t) tables[static_cast<size_t>(t)].way = kWays[(first_way + t) % 3];
  constexpr int kFeatures = 6;
  const int table_of[] = {0, 1, 0, 2, 1, 1};
  const sok::Combiner combiners[] = {sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kSqrtn,
                                     sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kMean};
  struct Input {
    std::vector<uint64_t> keys;
    std::vector<int32_t> index;
    std::vector<int64_t> splits, splits_home;
    std::vector<float> weights, scales, output, grad;
  };
  std::vector<Input> inputs(kFeatures);
  std::vector<sok::RouteFeature> features;
  for (int f = 0; f < kFeatures; ++f) {
    Input& in = inputs[static_cast<size_t>(f)];
    const size_t size = static_cast<size_t>(f == 0 ? n : n / (f + 1));
    in.keys.resize(size);
    for (uint64_t& key : in.keys) key = random() % static_cast<uint64_t>(n / 2 + 3);
    in.index.resize(size);
    in.splits.push_back(0);
    while (in.splits.back() < static_cast<int64_t>(size)) {
      in.splits.push_back(std::min<int64_t>(static_cast<int64_t>(size), in.splits.back() + int64_t(random() % 9)));
    }
    in.splits.insert(in.splits.end(), 2, static_cast<int64_t>(size));  // empty segments at the end
    if (f == 1) {
      for (size_t i = 0; i < size; ++i) in.weights.push_back(0.5f + static_cast<float>(random() % 8) / 8);
    }
    features.push_back({table_of[f], in.keys.data(), true, static_cast<int64_t>(size), in.index.data()});
    if (f == 1 || f == 4) continue;  // weights, and rows
    features.back().row_splits = in.splits.data();
    features.back().segments = static_cast<int64_t>(in.splits.size()) - 1;
    features.back().combiner = combiners[f];
  }
  const sok::Route route = sok::RouteKeys({executor}, &scratch, tables.data(), 3, features.data(), kFeatures, world, 8);
  std::vector<int64_t> word_begin;
  int64_t num_words = 0, floats = 0;
  for (int r = 0; r < world; ++r) {
    word_begin.push_back(num_words);
    num_words += route.words[r];
    floats += route.floats[r];
  }
  std::vector<sok::RoutedPieces> pieces(kFeatures);
  for (size_t f = 0; f < kFeatures; ++f) {
    Input& in = inputs[f];
    const sok::WayHome way = tables[static_cast<size_t>(table_of[f])].way;
    const bool may_sum = features[f].row_splits != nullptr;
    if (way == sok::WayHome::kRows || !may_sum) CHECK_EQ(route.pieces[f], sok::kByRows);
    if (way == sok::WayHome::kSums && may_sum) CHECK(route.pieces[f] >= 0);
    if (route.pieces[f] == sok::kByRows) continue;
    in.splits_home.assign(in.splits.size(), -1);
    in.scales.assign(static_cast<size_t>(route.pieces[f]), NAN);
    pieces[f] = {in.splits_home.data(), in.scales.data()};
  }
  std::vector<int64_t> words(static_cast<size_t>(num_words));
  sok::WriteRoute({executor}, &scratch, route, word_begin.data(), words.data(), pieces.data());

  // Element j of the row of a key is key + j / 16 + table; whose rows are summed where:
  std::vector<float> answers(static_cast<size_t>(floats), NAN);
  std::map<int64_t, std::pair<int, std::vector<uint64_t>>> rows_at;
  std::set<std::pair<int, uint64_t>> seen;
  const int64_t* word = words.data();
  int64_t place = 0, wrong = 0;
  auto value = [](int table, uint64_t key, int64_t j) {
    return static_cast<float>(key % 1000) + static_cast<float>(j) / 16 + static_cast<float>(table);
  };
  auto answer = [&](int table, int rank, const int64_t* keys, int64_t size) {
    const sok::RouteTable& of = tables[static_cast<size_t>(table)];
    for (int64_t j = 0; j < of.dim; ++j) {
      float sum = 0.0f;
      for (int64_t k = 0; k < size; ++k) sum += value(table, static_cast<uint64_t>(keys[k]), j);
      answers[static_cast<size_t>(place + j)] = sum;
    }
    for (int64_t k = 0; k < size; ++k) {
      const sok::Partition partition{world, of.owner, of.is_unsigned};
      wrong += partition.OwnerOf(static_cast<uint64_t>(keys[k])) != rank;
    }
    rows_at[place] = {table, std::vector<uint64_t>(keys, keys + size)};
    place += of.dim;
  };
  for (int r = 0; r < world; ++r) {
    const int64_t* count = route.counts + r * sok::CountsPerRank(3, kFeatures);
    place += sok::kAnswerHeader;
    for (int t = 0; t < 3; ++t) {
      for (int64_t k = 0; k < count[t]; ++k, ++word) {
        wrong += !seen.insert({t, static_cast<uint64_t>(*word)}).second;
        answer(t, r, word, 1);
      }
    }
    for (int f = 0; f < kFeatures; ++f) {
      const int64_t num_pieces = count[3 + 2 * f], num_keys = count[4 + 2 * f];
      const int64_t *key = word + num_pieces, *end = key + num_keys;
      for (int64_t p = 0; p < num_pieces; ++p) {
        wrong += word[p] < 1;
        answer(table_of[f], r, key, word[p]);
        key += word[p];
      }
      CHECK(key == end);
      word = end;
    }
  }
  CHECK(word == words.data() + num_words);
  CHECK_EQ(place, floats);
  std::vector<sok::PooledFeature> pooled;
  std::vector<float*> outputs;
  std::vector<const float*> grads;
  std::set<int32_t> named;
  for (const bool may_sum : {false, true}) {  // the order in which places are named
    for (size_t f = 0; f < kFeatures; ++f) {
      if ((features[f].row_splits != nullptr) != may_sum) continue;
      Input& in = inputs[f];
      if (route.pieces[f] != sok::kByRows) in.index.resize(static_cast<size_t>(route.pieces[f]));
      for (size_t i = 0; i < in.index.size(); ++i) {
        const int32_t at = in.index[i] & sok::kPlaceMask;
        wrong += (in.index[i] < 0) != named.insert(at).second;
        if (route.pieces[f] != sok::kByRows) continue;
        wrong += rows_at[at] != std::make_pair(table_of[f], std::vector<uint64_t>{in.keys[i]});
      }
    }
  }
  CHECK_EQ(named.size(), rows_at.size());
  for (size_t f = 0; f < kFeatures; ++f) {
    Input& in = inputs[f];
    const bool by_sums = route.pieces[f] != sok::kByRows;
    sok::PooledFeature feature;
    feature.index = in.index.data();
    feature.n = static_cast<int64_t>(in.index.size());
    feature.dim = tables[static_cast<size_t>(table_of[f])].dim;
    feature.combiner = by_sums ? sok::Combiner::kSum : combiners[f];
    feature.weights = in.weights.empty() ? nullptr : in.weights.data();
    if (by_sums) feature.weights = in.scales.data();
    feature.row_splits = f == 4 ? nullptr : by_sums ? in.splits_home.data() : in.splits.data();
    feature.segments = f == 4 ? feature.n : static_cast<int64_t>(in.splits.size()) - 1;
    CHECK(sok::PlacesFit(feature, floats));
    CHECK(feature.n == 0 || !sok::PlacesFit(feature, 16));
    in.output.assign(static_cast<size_t>(feature.segments * feature.dim), NAN);
    in.grad.resize(in.output.size());
    for (float& g : in.grad) g = static_cast<float>(random() % 64) / 32 - 1;
    pooled.push_back(feature);
    outputs.push_back(in.output.data());
    grads.push_back(in.grad.data());
  }
  CHECK_EQ(wrong, 0);
  sok::CombineAnswers({executor}, answers.data(), pooled.data(), kFeatures, outputs.data());
  std::vector<float> packed(static_cast<size_t>(floats), 0.0f);
  for (const auto& [at, keys] : rows_at) packed[static_cast<size_t>(at)] = NAN;  // must be overwritten
  sok::CombineAnswersGrad({executor}, pooled.data(), kFeatures, grads.data(), floats, packed.data());

  // What came back for each key of each table, of which every row of a sum has the whole.
  std::map<std::pair<int, uint64_t>, std::vector<double>> found, expected;
  const auto add = [&](auto* to, int table, uint64_t key, int64_t j, double x) {
    auto& sums = (*to)[{table, key}];
    sums.resize(static_cast<size_t>(tables[static_cast<size_t>(table)].dim));
    sums[static_cast<size_t>(j)] += x;
  };
  for (const auto& [at, row] : rows_at) {
    for (const uint64_t key : row.second) {
      for (int64_t j = 0; j < tables[static_cast<size_t>(row.first)].dim; ++j) {
        add(&found, row.first, key, j, packed[static_cast<size_t>(at + j)]);
      }
    }
  }
  double worst = 0.0;
  for (size_t f = 0; f < kFeatures; ++f) {
    const Input& in = inputs[f];
    const int64_t dim = pooled[f].dim;
    for (int64_t s = 0; s < pooled[f].segments; ++s) {
      const int64_t first = f == 4 ? s : in.splits[static_cast<size_t>(s)];
      const int64_t last = f == 4 ? s + 1 : in.splits[static_cast<size_t>(s) + 1];
      const float* weights = in.weights.empty() ? nullptr : in.weights.data();
      const float scale = sok::SegmentScale(combiners[f], weights == nullptr ? nullptr : weights + first, last - first);
      for (int64_t j = 0; j < dim; ++j) {
        double sum = 0.0;
        for (int64_t i = first; i < last; ++i) {
          const double w = (weights == nullptr ? 1.0 : weights[i]) * scale;
          const uint64_t key = in.keys[static_cast<size_t>(i)];
          sum += w * value(table_of[f], key, j);
          add(&expected, table_of[f], key, j, w * grads[f][s * dim + j]);
        }
        worst = std::max(worst, std::abs(sum - outputs[f][s * dim + j]) / (1 + std::abs(sum)));
      }
    }
  }
  CHECK_EQ(found.size(), expected.size());
  for (const auto& [key, sums] : expected) {
    for (size_t j = 0; j < sums.size(); ++j) {
      const double difference = std::abs(sums[j] - found[key][j]) / (1 + std::abs(sums[j]));
      worst = std::max(worst, std::isnan(difference) ? INFINITY : difference);
    }
  }
  CHECK(worst < 1e-5);
}

TEST(OutputsAndGradientsAreThoseOfASlowStatement) {
  for (const int threads : {1, 4}) {
    for (const int world : {1, 2, 3, 8}) {
      for (const int64_t n : {0, 1, 7, 3000}) {
        for (const int way : {0, 1, 2}) CheckWholeWay(threads, world, n, way);
      }
    }
  }
}

TEST(ManyKeysOfOneTableAreCutIntoParts) {
  const int64_t n = kFewer == 1 ? 300000 : 100000;  // the first table gets a third more: four parts, or two
  for (const int way : {0, 1, 2}) CheckWholeWay(4, 2, n, way);
}

TEST(RowsOfOtherRanksCopiesDoNotComeHome) {
  // Rank 0 of two asks its own copy, that of rank 1, and a table whose rows are spread.
  const int64_t keys[] = {4, 7, 4};
  int32_t index[3][3];
  sok::RouteTable tables[] = {{2, false, 0, 0}, {2, false, 0, 1}, {3, false, 0}};
  tables[0].is_copy = tables[1].is_copy = true;
  tables[1].comes_home = false;
  std::vector<sok::RouteFeature> features;
  for (int t = 0; t < 3; ++t) features.push_back({t, keys, true, 3, index[t]});
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  const sok::Route route = sok::RouteKeys({executor}, &scratch, tables, 3, features.data(), 3, 2, 8);
  CHECK_EQ(route.floats[0], sok::kAnswerHeader + 3 + 2 * 2);
  CHECK_EQ(route.floats[1], sok::kAnswerHeader + 3);
  const int64_t word_begin[] = {0, route.words[0]};
  std::vector<int64_t> words(static_cast<size_t>(route.words[0] + route.words[1]));
  sok::WriteRoute({executor}, &scratch, route, word_begin, words.data(), nullptr);
  CHECK(words == (std::vector<int64_t>{4, 7, 4, 4, 7, 7}));
  // What is of copies is the last in a message.
  const int64_t own = sok::kAnswerHeader + 3, spread[] = {sok::kAnswerHeader, route.floats[0] + sok::kAnswerHeader};
  for (int i = 0; i < 3; ++i) {
    CHECK_EQ(index[0][i] & sok::kPlaceMask, own + 2 * (keys[i] == 7));
    CHECK_EQ(index[2][i] & sok::kPlaceMask, spread[keys[i] == 7]);
    CHECK_EQ(index[0][i] < 0, i < 2);
  }
}

TEST(RoutesDoNotDependOnThreads) {
  std::mt19937_64 random(3);
  std::vector<uint64_t> keys(400000);
  for (uint64_t& key : keys) key = random() % 150000;
  std::vector<std::vector<int64_t>> words;
  std::vector<std::vector<int32_t>> index;
  for (const int threads : {1, 3}) {
    const ThreadExecutor executor(threads);
    sok::Scratch scratch;
    index.emplace_back(keys.size());
    const sok::RouteTable table{4, false, 0};
    const sok::RouteFeature feature{0, keys.data(), true, static_cast<int64_t>(keys.size()), index.back().data()};
    const sok::Route route = sok::RouteKeys({executor}, &scratch, &table, 1, &feature, 1, 2, 8);
    words.emplace_back(static_cast<size_t>(route.words[0] + route.words[1]));
    const int64_t key_begin[] = {0, route.words[0]};
    sok::WriteRoute({executor}, &scratch, route, key_begin, words.back().data(), nullptr);
  }
  CHECK(words[0] == words[1]);
  CHECK(index[0] == index[1]);
}

}  // namespace
