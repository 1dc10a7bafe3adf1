#include "sok/exchange.h"

#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
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

TEST(KeysAreBucketedByOwnerInOrderOfFirstAppearance) {
  const int64_t wide[] = {5, 2, 5, 3, 4, -1};
  const uint32_t narrow[] = {7, 7, 0xffffffffu};
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  int32_t index[6], other[3];
  const sok::RouteTable tables[] = {{2, false, 0}, {3, true, 0}};
  const sok::RouteFeature features[] = {{0, wide, true, 6, index}, {1, narrow, false, 3, other}};
  const sok::Route route = sok::RouteKeys({executor}, &scratch, tables, 2, features, 2, 2);
  CHECK(route.is_legal);
  CHECK_EQ(route.num_keys, 7);
  const int64_t counts[] = {2, 0, 3, 2};
  for (int i = 0; i < 4; ++i) CHECK_EQ(route.counts[i], counts[i]);
  const int64_t key_begin[] = {1, 4};
  int64_t words[9] = {};
  sok::WriteRoute({executor}, &scratch, route, key_begin, words);
  const int64_t expected[] = {0, 2, 4, 0, 5, 3, -1, 7, 0xffffffff};
  for (int i = 0; i < 9; ++i) CHECK_EQ(words[i], expected[i]);
  // Answers: 16, rows 2 and 4 of dim 2, 16, rows 5, 3, -1 of dim 2, rows 7, 2^32 - 1 of dim 3.
  const int32_t places[] = {36 | kFirst, 16 | kFirst, 36, 38 | kFirst, 18 | kFirst, 40 | kFirst};
  for (int i = 0; i < 6; ++i) CHECK_EQ(index[i], places[i]);
  CHECK_EQ(other[0], 42 | kFirst);
  CHECK_EQ(other[1], 42);
  CHECK_EQ(other[2], 45 | kFirst);
}

TEST(TheFirstIllegalKeyIsNamed) {
  const int64_t good[] = {1, 2}, bad[] = {3, -7, 12};
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  int32_t index[3];
  const sok::RouteTable tables[] = {{1, false, 0}, {1, false, 10}};
  const sok::RouteFeature features[] = {{0, bad, true, 3, index}, {1, good, true, 2, index}, {1, bad, true, 3, index}};
  const sok::Route route = sok::RouteKeys({executor}, &scratch, tables, 2, features, 3, 2);
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
  CHECK_THROWS(sok::RouteKeys({executor}, &scratch, &table, 1, &feature, 1, 2), sok::InvalidArgument, "2^31 floats");
}

// A whole way: route, answers made of the keys, outputs and gradients against a slow statement.
void CheckWholeWay(int threads, int world, int64_t n) {
  std::mt19937_64 random(static_cast<uint64_t>(threads * 1000 + world + n));
  const ThreadExecutor executor(threads);
  sok::Scratch scratch;
  const std::vector<sok::RouteTable> tables = {{3, false, 0}, {16, true, 0}, {8, false, 0}};
  const int table_of[] = {0, 1, 0, 2, 1};
  const sok::Combiner combiners[] = {sok::Combiner::kSum, sok::Combiner::kMean, sok::Combiner::kSqrtn,
                                     sok::Combiner::kSum, sok::Combiner::kMean};
  struct Input {
    std::vector<uint64_t> keys;
    std::vector<int32_t> index;
    std::vector<int64_t> splits;
    std::vector<float> weights, output, grad;
  };
  std::vector<Input> inputs(5);
  std::vector<sok::RouteFeature> features;
  for (int f = 0; f < 5; ++f) {
    Input& in = inputs[static_cast<size_t>(f)];
    const size_t size = static_cast<size_t>(f == 0 ? n : n / (f + 1));
    in.keys.resize(size);
    for (uint64_t& key : in.keys) key = random() % static_cast<uint64_t>(n / 2 + 3);
    in.index.resize(size);
    in.splits.push_back(0);
    while (in.splits.back() < static_cast<int64_t>(size)) {
      in.splits.push_back(std::min<int64_t>(static_cast<int64_t>(size), in.splits.back() + int64_t(random() % 5)));
    }
    if (f == 1) {
      for (size_t i = 0; i < size; ++i) in.weights.push_back(0.5f + static_cast<float>(random() % 8) / 8);
    }
    features.push_back({table_of[f], in.keys.data(), true, static_cast<int64_t>(size), in.index.data()});
  }
  const sok::Route route = sok::RouteKeys({executor}, &scratch, tables.data(), 3, features.data(), 5, world);
  std::vector<int64_t> key_begin;
  int64_t num_words = 0, floats = 0;
  for (int r = 0; r < world; ++r) {
    key_begin.push_back(num_words);
    floats += sok::kAnswerHeader;
    for (int t = 0; t < 3; ++t) {
      num_words += route.counts[r * 3 + t];
      floats += route.counts[r * 3 + t] * tables[static_cast<size_t>(t)].dim;
    }
  }
  CHECK_EQ(num_words, route.num_keys);
  std::vector<int64_t> words(static_cast<size_t>(num_words));
  sok::WriteRoute({executor}, &scratch, route, key_begin.data(), words.data());

  // Element j of the row of a key is key + j / 16 + table; whose row begins where:
  std::vector<float> answers(static_cast<size_t>(floats), NAN);
  std::map<int64_t, std::pair<int, uint64_t>> row_at;
  std::set<std::pair<int, uint64_t>> seen;
  size_t word = 0;
  int64_t place = 0, wrong = 0;
  auto value = [](int table, uint64_t key, int64_t j) {
    return static_cast<float>(key % 1000) + static_cast<float>(j) / 16 + static_cast<float>(table);
  };
  for (int r = 0; r < world; ++r) {
    place += sok::kAnswerHeader;
    for (int t = 0; t < 3; ++t) {
      const int64_t dim = tables[static_cast<size_t>(t)].dim;
      for (int64_t k = 0; k < route.counts[r * 3 + t]; ++k) {
        const uint64_t key = static_cast<uint64_t>(words[word++]);
        wrong += sok::Owner(key, world, tables[static_cast<size_t>(t)].is_unsigned) != r;
        wrong += !seen.insert({t, key}).second;
        row_at[place] = {t, key};
        for (int64_t j = 0; j < dim; ++j) answers[static_cast<size_t>(place + j)] = value(t, key, j);
        place += dim;
      }
    }
  }
  std::vector<sok::PooledFeature> pooled;
  std::vector<float*> outputs;
  std::vector<const float*> grads;
  std::set<int32_t> named;
  for (int f = 0; f < 5; ++f) {
    Input& in = inputs[static_cast<size_t>(f)];
    for (size_t i = 0; i < in.keys.size(); ++i) {
      const int32_t at = in.index[i] & sok::kPlaceMask;
      wrong += row_at[at] != std::make_pair(table_of[f], in.keys[i]);
      wrong += (in.index[i] < 0) != named.insert(at).second;
    }
    sok::PooledFeature feature;
    feature.index = in.index.data();
    feature.n = static_cast<int64_t>(in.keys.size());
    feature.dim = tables[static_cast<size_t>(table_of[f])].dim;
    feature.combiner = combiners[f];
    feature.weights = in.weights.empty() ? nullptr : in.weights.data();
    feature.row_splits = f == 4 ? nullptr : in.splits.data();
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
  sok::CombineAnswers({executor}, answers.data(), pooled.data(), 5, outputs.data());
  std::vector<float> packed(static_cast<size_t>(floats), 0.0f);
  for (const auto& [at, key] : row_at) packed[static_cast<size_t>(at)] = NAN;  // must be overwritten
  sok::CombineAnswersGrad({executor}, pooled.data(), 5, grads.data(), floats, packed.data());

  std::vector<double> expected(static_cast<size_t>(floats), 0.0);
  double worst = 0.0;
  for (size_t f = 0; f < 5; ++f) {
    const sok::PooledFeature& feature = pooled[f];
    for (int64_t s = 0; s < feature.segments; ++s) {
      const int64_t first = feature.row_splits == nullptr ? s : feature.row_splits[s];
      const int64_t last = feature.row_splits == nullptr ? s + 1 : feature.row_splits[s + 1];
      const float scale = sok::SegmentScale(
          feature.combiner, feature.weights == nullptr ? nullptr : feature.weights + first, last - first);
      for (int64_t j = 0; j < feature.dim; ++j) {
        double sum = 0.0;
        for (int64_t i = first; i < last; ++i) {
          const double w = (feature.weights == nullptr ? 1.0 : feature.weights[i]) * scale;
          sum += w * value(table_of[f], inputs[f].keys[static_cast<size_t>(i)], j);
          expected[static_cast<size_t>((feature.index[i] & sok::kPlaceMask) + j)] += w * grads[f][s * feature.dim + j];
        }
        worst = std::max(worst, std::abs(sum - outputs[f][s * feature.dim + j]) / (1 + std::abs(sum)));
      }
    }
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    worst = std::max(worst, std::abs(expected[i] - packed[i]) / (1 + std::abs(expected[i])));
    if (std::isnan(packed[i])) worst = INFINITY;
  }
  CHECK(worst < 1e-5);
}

TEST(OutputsAndGradientsAreThoseOfASlowStatement) {
  for (const int threads : {1, 4}) {
    for (const int world : {1, 2, 3, 8}) {
      for (const int64_t n : {0, 1, 7, 3000}) CheckWholeWay(threads, world, n);
    }
  }
}

TEST(ManyKeysOfOneTableAreCutIntoParts) {
  CheckWholeWay(4, 2, 300000);  // 450,000 keys of the first table
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
    const sok::Route route = sok::RouteKeys({executor}, &scratch, &table, 1, &feature, 1, 2);
    words.emplace_back(static_cast<size_t>(route.num_keys));
    const int64_t key_begin[] = {0, route.counts[0]};
    sok::WriteRoute({executor}, &scratch, route, key_begin, words.back().data());
  }
  CHECK(words[0] == words[1]);
  CHECK(index[0] == index[1]);
}

}  // namespace
