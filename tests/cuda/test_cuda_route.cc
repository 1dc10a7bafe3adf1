// Keys of many features to their owners on a device, beside the CPU's route by rows: the same counts, keys and places.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/device.h"
#include "sok/exchange.h"
#include "sok/scratch.h"

namespace {

using Keys = std::vector<uint64_t>;

struct FeatureOf {
  int table;
  bool is_wide, has_splits;
  Keys keys;
};

// What a route says of each (rank, table): its keys, and of each feature's positions their places.
struct Found {
  std::vector<int64_t> counts;              // [world, tables]
  std::vector<Keys> keys;                   // [world, tables]
  std::vector<std::vector<int32_t>> index;  // of each feature
  bool is_legal = true;
  int bad_feature = 0;
  uint64_t bad_key = 0;

  bool operator==(const Found& other) const {
    return is_legal == other.is_legal && bad_feature == other.bad_feature && bad_key == other.bad_key &&
           counts == other.counts && keys == other.keys && index == other.index;
  }
};

std::vector<uint32_t> Narrow(const Keys& keys) {
  std::vector<uint32_t> narrow;
  for (const uint64_t key : keys) narrow.push_back(static_cast<uint32_t>(key));
  return narrow;
}

class Case {
 public:
  Case(std::vector<sok::RouteTable> tables, std::vector<FeatureOf> features, int world)
      : tables_(std::move(tables)), given_(std::move(features)), world_(world) {}

  Found OnCpu() const {
    const sok::SerialExecutor executor;
    sok::Scratch scratch;
    Found found;
    std::vector<std::vector<uint32_t>> narrow;
    for (const FeatureOf& f : given_) narrow.push_back(Narrow(f.keys));
    std::vector<sok::RouteFeature> features = Features();
    for (size_t f = 0; f < given_.size(); ++f) {
      found.index.emplace_back(given_[f].keys.size());
      features[f].index = found.index[f].data();
      features[f].keys = given_[f].is_wide ? static_cast<const void*>(given_[f].keys.data()) : narrow[f].data();
    }
    const sok::Route route = sok::RouteKeys({executor}, &scratch, tables_.data(), NumTables(), features.data(),
                                            static_cast<int>(features.size()), world_, 8);
    if (!route.is_legal) return Illegal(route.bad_feature, route.bad_key);
    std::vector<int64_t> word_begin;
    int64_t words = 0;
    for (int r = 0; r < world_; ++r) {
      word_begin.push_back(words);
      words += route.words[r];
    }
    std::vector<int64_t> message(static_cast<size_t>(words) + 1);
    const std::vector<sok::RoutedPieces> pieces(given_.size());
    sok::WriteRoute({executor}, &scratch, route, word_begin.data(), message.data(), pieces.data());
    const int64_t width = sok::CountsPerRank(NumTables(), static_cast<int64_t>(given_.size()));
    int64_t at = 0;
    for (int r = 0; r < world_; ++r) {
      for (int t = 0; t < NumTables(); ++t) {
        found.counts.push_back(route.counts[r * width + t]);
        const auto begin = message.begin() + at;
        found.keys.emplace_back(begin, begin + found.counts.back());
        at += found.counts.back();
      }
    }
    return found;
  }

  Found OnDevice() const {
    const sok::Cuda cuda;
    sok::StreamScratch scratch(cuda);
    Found found;
    std::vector<std::unique_ptr<DeviceArray<uint64_t>>> wide;
    std::vector<std::unique_ptr<DeviceArray<uint32_t>>> narrow;
    std::vector<std::unique_ptr<DeviceArray<int32_t>>> index;
    std::vector<sok::RouteFeature> features = Features();
    for (size_t f = 0; f < given_.size(); ++f) {
      wide.push_back(std::make_unique<DeviceArray<uint64_t>>(given_[f].keys));
      narrow.push_back(std::make_unique<DeviceArray<uint32_t>>(Narrow(given_[f].keys)));
      index.push_back(std::make_unique<DeviceArray<int32_t>>(static_cast<int64_t>(given_[f].keys.size())));
      features[f].index = index[f]->data();
      features[f].keys = given_[f].is_wide ? static_cast<const void*>(wide[f]->data()) : narrow[f]->data();
    }
    const auto num_features = static_cast<int>(features.size());
    const sok::DeviceRoute route =
        sok::RouteKeysToHost(cuda, &scratch, tables_.data(), NumTables(), features.data(), num_features, world_);
    if (!route.is_legal) return Illegal(route.bad_feature, route.bad_key);
    Keys keys(static_cast<size_t>(route.begin.back()));
    const std::vector<int64_t> places = Places(route.begin);
    sok::WriteRouteToHost(cuda, &scratch, route, tables_.data(), NumTables(), features.data(), num_features,
                          places.data(), keys.data());
    for (size_t c = 0; c + 1 < route.begin.size(); ++c) {
      found.counts.push_back(route.begin[c + 1] - route.begin[c]);
      found.keys.emplace_back(keys.begin() + route.begin[c], keys.begin() + route.begin[c + 1]);
    }
    for (const auto& one : index) found.index.push_back(one->Get());
    return found;
  }

 private:
  int NumTables() const { return static_cast<int>(tables_.size()); }

  static Found Illegal(int feature, uint64_t key) {
    Found found;
    found.is_legal = false;
    found.bad_feature = feature;
    found.bad_key = key;
    return found;
  }

  std::vector<sok::RouteFeature> Features() const {
    static const int64_t kSplits[] = {0};
    std::vector<sok::RouteFeature> features;
    for (const FeatureOf& f : given_) {
      sok::RouteFeature one;
      one.table = f.table;
      one.is_wide = f.is_wide;
      one.n = static_cast<int64_t>(f.keys.size());
      if (f.has_splits) one.row_splits = kSplits;  // of no segment: nothing that could come by sums
      features.push_back(one);
    }
    return features;
  }

  std::vector<int64_t> Places(const std::vector<int64_t>& begin) const {
    std::vector<int64_t> places(begin.size() - 1);
    int64_t place = 0;
    for (size_t r = 0; r < static_cast<size_t>(world_); ++r) {
      place += sok::kAnswerHeader;
      for (const bool copies : {false, true}) {
        for (size_t t = 0; t < tables_.size(); ++t) {
          if (tables_[t].is_copy != copies) continue;
          const size_t cell = r * tables_.size() + t;
          places[cell] = place;
          if (tables_[t].comes_home) place += (begin[cell + 1] - begin[cell]) * tables_[t].dim;
        }
      }
    }
    return places;
  }

  const std::vector<sok::RouteTable> tables_;
  const std::vector<FeatureOf> given_;
  const int world_;
};

sok::RouteTable Table(int64_t dim, int owner, uint64_t num_legal = 0, bool is_unsigned = false) {
  sok::RouteTable table;
  table.dim = dim;
  table.owner = owner;
  table.num_legal = num_legal;
  table.is_unsigned = is_unsigned;
  table.way = sok::WayHome::kRows;
  return table;
}

Keys Some(int64_t n, uint64_t range, uint64_t seed) {
  std::mt19937_64 random(seed);
  Keys keys;
  for (int64_t i = 0; i < n; ++i) keys.push_back(random() % range);
  return keys;
}

}  // namespace

TEST(KeysGoToTheirOwnersAsOnTheCpu) {
  for (const int world : {1, 2, 3, 8}) {
    const std::vector<sok::RouteTable> tables = {Table(4, sok::kByKey), Table(1, sok::kByHash), Table(7, 0),
                                                 Table(2, sok::kByKey, 50), Table(3, sok::kByKey, 0, true)};
    const Keys negative = {~0ull, 0, 5, ~4ull, 5, ~0ull};
    const std::vector<FeatureOf> features = {{0, true, false, Some(3000, 700, 1)},
                                             {1, true, true, Some(999, 100, 2)},
                                             {0, true, true, Some(500, 900, 3)},
                                             {2, false, false, Some(40, 10, 4)},
                                             {3, true, false, {}},
                                             {3, false, true, Some(300, 50, 5)},
                                             {4, false, false, negative},
                                             {0, false, false, negative},
                                             {0, true, false, Some(3000, 700, 6)},
                                             {1, true, false, Some(50, 100, 7)}};
    const Case one(tables, features, world);
    const Found found = one.OnDevice(), expected = one.OnCpu();
    CHECK(found.counts == expected.counts);
    CHECK(found.keys == expected.keys);
    CHECK(found.index == expected.index);
    CHECK(found.is_legal);
    // And on its own: each key once, where it belongs.
    int64_t distinct = 0;
    for (size_t c = 0; c < found.keys.size(); ++c) {
      CHECK_EQ(std::set<uint64_t>(found.keys[c].begin(), found.keys[c].end()).size(), found.keys[c].size());
      distinct += static_cast<int64_t>(found.keys[c].size());
    }
    CHECK(distinct > 900);
  }
}

TEST(CopiesAreToldOfKeysAndAnswerWithRowsAtHomeAlone) {
  // The rows of tables 1 and 2 are one's own and the other rank's.
  std::vector<sok::RouteTable> tables = {Table(4, sok::kByKey), Table(3, 0), Table(3, 1)};
  for (const size_t t : {1, 2}) {
    tables[t].is_copy = true;
    tables[t].comes_home = t == 1;
  }
  const Keys keys = Some(400, 60, 9);
  const Case one(tables, {{1, true, false, keys}, {2, true, false, keys}, {0, true, true, Some(100, 30, 8)}}, 2);
  Found found = one.OnDevice(), expected = one.OnCpu();
  CHECK(found.counts == expected.counts);
  CHECK(found.keys == expected.keys);
  found.index[1] = expected.index[1] = {};  // of rows that do not come home places say nothing
  CHECK(found == expected);
}

TEST(TheFirstIllegalKeyIsNamed) {
  const std::vector<sok::RouteTable> tables = {Table(4, sok::kByKey), Table(3, sok::kByKey, 10)};
  const Case one(tables, {{0, true, false, {99}}, {1, true, true, {3, 12, 77}}, {1, false, false, {4, 55}}}, 2);
  const Found found = one.OnDevice(), expected = one.OnCpu();
  CHECK(found == expected);
  CHECK(!found.is_legal);
  CHECK_EQ(found.bad_feature, 1);
  CHECK_EQ(found.bad_key, 12u);
  const Case negative(tables, {{1, false, false, {4, ~0ull}}}, 2);
  CHECK_EQ(negative.OnDevice().bad_key, ~0ull);
}

TEST(NoKeysAskNobody) {
  const Found found = Case({Table(4, sok::kByKey)}, {{0, true, false, {}}, {0, false, true, {}}}, 3).OnDevice();
  CHECK(found.counts == std::vector<int64_t>(3, 0));
  CHECK(found.index[0].empty());
}

TEST(AHotKeyIsAskedForOnce) {
  Keys hot(20000, 7);
  hot[12345] = 8;
  const Case one({Table(2, sok::kByKey)}, {{0, true, false, hot}}, 2);
  const Found found = one.OnDevice();
  CHECK(found.keys == (std::vector<Keys>{{8}, {7}}));
  CHECK(found.index == one.OnCpu().index);
}
