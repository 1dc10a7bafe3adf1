// The kernels whose instructions benchmarks/guard counts: find, insert and erase keys, pool and update rows, route keys to
// their ranks and pool what comes home. One thread.
//
//   kernels find|insert|erase|pool|update|route|combine
//
// The inputs are fixed, so that a count depends on the code, the compiler and SOK_ISA alone. What is counted is what runs
// inside Counted, which the counting tool finds by its name.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "sok/embedding_table.h"
#include "sok/exchange.h"

namespace {

constexpr int64_t kRows = 1 << 16, kDim = 16, kKeys = 1 << 15, kSegments = 1 << 13;

uint64_t Scattered(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ull;
  i = (i ^ (i >> 30)) * 0xBF58476D1CE4E5B9ull;
  i = (i ^ (i >> 27)) * 0x94D049BB133111EBull;
  return i ^ (i >> 31);
}

sok::TableConfig Config(bool hashed) {
  sok::TableConfig config;
  config.name = "guard";
  config.dim = kDim;
  config.capacity = kRows;
  config.hashed = hashed;
  return config;
}

}  // namespace

// The kernel has run once before, where it can: what only a first call does is not in the count.
extern "C" __attribute__((noinline)) void Counted(const std::function<void()>& kernel) {
  kernel();
  asm volatile("" ::: "memory");
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const char* name = argv[1];
  auto is = [&](const char* kernel) { return std::strcmp(name, kernel) == 0; };
  const bool hashed = is("find") || is("insert") || is("erase");

  const sok::SerialExecutor executor;
  const sok::Cpu cpu{executor};
  sok::Scratch scratch;
  sok::EmbeddingTable table(Config(hashed));

  std::vector<uint64_t> all(kRows), keys(kKeys);
  for (int64_t i = 0; i < kRows; ++i) all[i] = hashed ? Scattered(i) : static_cast<uint64_t>(i);
  // Squares of even draws: some rows come more often than others.
  for (int64_t i = 0; i < kKeys; ++i) {
    const uint64_t draw = Scattered(1000000 + i) >> 48;
    keys[i] = all[draw * draw >> 16];
  }
  std::vector<int64_t> splits(kSegments + 1), row_ids(kRows);
  for (int64_t s = 0; s <= kSegments; ++s) splits[s] = s * (kKeys / kSegments);
  std::vector<float> rows(kRows * kDim), pooled(kSegments * kDim);
  table.Lookup(cpu, &scratch, all.data(), kRows, true, nullptr, rows.data(), row_ids.data());
  scratch.Reset();
  // The rows of `keys`, for the update.
  table.Lookup(cpu, &scratch, keys.data(), kKeys, false, nullptr, rows.data(), row_ids.data());
  scratch.Reset();
  const double hyper[] = {0.01, 0.1, 1e-7};
  const sok::UpdateRule rule = sok::MakeUpdateRule("adagrad", hyper, 3, 1);

  // One feature of 300,000 keys: more than one part of a table, with repetitions, for four ranks.
  constexpr int64_t kRouted = 300000;
  std::vector<uint64_t> routed;
  std::vector<int32_t> index;
  if (is("route") || is("combine")) {
    routed.resize(kRouted);
    index.resize(kRouted);
    for (int64_t i = 0; i < kRouted; ++i) routed[i] = Scattered(Scattered(i) % 200000);
  }
  const sok::RouteTable route_table{kDim, false, 0};
  const sok::RouteFeature feature{0, routed.data(), true, kRouted, index.data()};
  sok::Route route;
  std::vector<int64_t> words, word_begin(4);
  auto find_route = [&] {
    route = sok::RouteKeys(cpu, &scratch, &route_table, 1, &feature, 1, 4, 8);
    if (words.empty()) {
      for (int r = 0; r < 4; ++r) {
        word_begin[r] = static_cast<int64_t>(words.size());
        words.resize(words.size() + static_cast<size_t>(route.words[r]));
      }
    }
    sok::WriteRoute(cpu, &scratch, route, word_begin.data(), words.data(), nullptr);
  };
  std::vector<float> answers, combined;
  std::vector<int64_t> home_splits;
  sok::PooledFeature home;
  if (is("combine")) {
    find_route();
    int64_t floats = 0;
    for (int r = 0; r < 4; ++r) floats += route.floats[r];
    answers.assign(static_cast<size_t>(floats), 0.5f);
    for (int64_t i = 0; i <= kRouted / 4; ++i) home_splits.push_back(4 * i);
    combined.resize(kRouted / 4 * kDim);
    home = {index.data(), home_splits.data(), nullptr, kRouted, kRouted / 4, kDim, sok::Combiner::kMean};
    scratch.Reset();
  }

  std::function<void()> kernel;
  bool once = false;   // what a second run would do otherwise
  if (is("insert")) {  // half of the keys are there
    once = true;
    table.Erase(all.data(), kRows / 2);
    kernel = [&] { table.Lookup(cpu, &scratch, all.data(), kRows, true, nullptr, rows.data(), row_ids.data()); };
  } else if (is("erase")) {
    once = true;
    kernel = [&] { table.Erase(all.data(), kRows / 2); };
  } else if (is("route")) {
    kernel = find_route;
  } else if (is("combine")) {
    float* const output = combined.data();
    kernel = [&, output] { sok::CombineAnswers(cpu, answers.data(), &home, 1, &output); };
  } else if (is("find")) {
    kernel = [&] { table.Lookup(cpu, &scratch, keys.data(), kKeys, false, nullptr, rows.data(), row_ids.data()); };
  } else if (is("pool")) {
    sok::EmbeddingTable::Feature feature;
    feature.table = &table;
    feature.keys = keys.data();
    feature.n = kKeys;
    feature.row_splits = splits.data();
    feature.segments = kSegments;
    feature.combiner = sok::Combiner::kSum;
    feature.output = pooled.data();
    feature.row_ids = row_ids.data();
    kernel = [&cpu, &scratch, feature] { sok::EmbeddingTable::LookupGroup(cpu, &scratch, &feature, 1, false); };
  } else if (is("update")) {
    const sok::EmbeddingTable::Gradients gradients{&table, row_ids.data(), rows.data(), kKeys};
    kernel = [&, gradients] {
      sok::EmbeddingTable::ApplyGroup(cpu, &scratch, rule, "guard", sok::Nonfinite::kAllow, &gradients, 1);
    };
  } else {
    return 2;
  }
  if (!once) kernel();
  scratch.Reset();
  Counted(kernel);
  std::printf("%s: %lld keys\n", name, static_cast<long long>(kKeys));
  return 0;
}
