// What a table on a device does, for tests in which calls of CUDA's fail.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "collector.h"
#include "device_stores.h"
#include "sok/combine.h"
#include "sok/error.h"
#include "sok/exchange.h"
#include "sok/sum_rows.h"

#if defined(SOK_CUDA_EMULATED)
constexpr bool kKernelsRun = true;
#else  // nvcc's objects on the emulator's runtime (tests/cuda/traced)
constexpr bool kKernelsRun = false;
namespace sok_emulator {
void FailCall(int64_t others, int error, bool for_good, bool of_allocations = false);
bool EndFaults();
}  // namespace sok_emulator
#endif

constexpr int64_t kDim = 3;
constexpr uint64_t kRows = 20;

struct Fixture {
  Fixture() : of(Config(kDim, 4000)), other(Config(kDim, 4000)) {
    Update("adagrad", Range(kRows));
    const Keys keys = Range(kRows / 2);
    for (OnDevice* each : {&of, &other}) each->Lookup(keys);
    of.store.BeginSave(TableStore::SnapshotOf::kNothing);  // so that changes are noted
    of.store.EndSave("first");
    Update("adagrad", {0, 3});
    SOK_CUDA(cudaDeviceSynchronize());
  }

  void Update(const std::string& rule, const Keys& keys) {
    const std::vector<int64_t> ids = of.Lookup(keys);
    Floats grads;
    for (const uint64_t key : keys) grads.insert(grads.end(), kDim, static_cast<float>(key % 5) - 1.5f);
    of.Apply(Rule(rule, ++step), rule, ids, grads);
  }

  // Lookup, gradients and update of both tables at once.
  void GroupStep(const Keys& keys) {
    DeviceArray<uint64_t> words(keys);
    DeviceArray<int64_t> ids(2 * Size(keys)), sum_ids(2 * Size(keys));
    DeviceArray<float> upstream(Floats(keys.size() * kDim, 0.5f)), sums(2 * Size(keys) * kDim);
    DeviceArray<int64_t> counts(2);
    of.scratch.Reset();
    std::vector<sok::DeviceTable::Asked> asked;
    std::vector<sok::DeviceAddends> addends;
    std::vector<sok::DeviceRowSums> to;
    std::vector<sok::DeviceTable::Gradients> gradients;
    int64_t t = 0;
    for (OnDevice* each : {&of, &other}) {
      int64_t* const mine = ids + t * Size(keys);
      asked.push_back({&each->store.table(), words.data(), Size(keys), nullptr, mine});
      sok::DeviceAddends a;
      a.table = t;
      a.row_ids = mine;
      a.values = upstream.data();
      a.values_stride = kDim;
      a.segments.segments = a.segments.n = Size(keys);
      addends.push_back(a);
      to.push_back({4000, kDim, sum_ids + t * Size(keys), sums + t * Size(keys) * kDim, counts + t, Size(keys)});
      gradients.push_back({&each->store.table(), to.back().row_ids, to.back().sums, Size(keys), nullptr});
      ++t;
    }
    const sok::Cuda& cuda = of.cuda;
    sok::DeviceTable::LookupGroup(cuda, &of.scratch, asked.data(), t, true);
    sok::SumRowsOfTables(cuda, &of.scratch, addends.data(), t, to.data(), t, sok::FloatType::kFloat32, nullptr);
    sok::DeviceTable::ApplyGroup(cuda, &of.scratch, Rule("adagrad", ++step), "adagrad", sok::Nonfinite::kAllow, 1.0f,
                                 gradients.data(), t);
    SOK_CUDA(cudaDeviceSynchronize());
  }

  // A lookup of both tables that makes no rows, and pools.
  void Pool(const Keys& keys) {
    DeviceArray<uint64_t> words(keys);
    DeviceArray<int64_t> ids(2 * Size(keys));
    DeviceArray<float> outputs(2 * Size(keys) * kDim);
    of.scratch.Reset();
    std::vector<sok::DeviceTable::Asked> asked;
    for (OnDevice* each : {&of, &other}) {
      const int64_t t = Size(asked);
      asked.push_back({&each->store.table(), words.data(), Size(keys), nullptr, ids + t * Size(keys)});
    }
    {
      const auto found = sok::DeviceTable::FindGroup(of.cuda, &of.scratch, asked.data(), Size(asked));
      std::vector<sok::DeviceFeature> features(asked.size());
      for (size_t t = 0; t < asked.size(); ++t) {
        features[t].rows = found[t].rows;
        features[t].num_rows = found[t].num_rows;
        features[t].fresh = found[t].fresh;
        features[t].index = asked[t].row_ids;
        features[t].dim = features[t].output_stride = kDim;
        features[t].segments.segments = features[t].segments.n = Size(keys);
        features[t].output = outputs + static_cast<int64_t>(t) * Size(keys) * kDim;
      }
      sok::CombineGroup(of.cuda, &of.scratch, features.data(), Size(features), sok::FloatType::kFloat32, nullptr);
    }
    SOK_CUDA(cudaDeviceSynchronize());
  }

  // Keys of two tables to the ranks that own them.
  void Route(const Keys& keys) {
    DeviceArray<uint64_t> words(keys);
    DeviceArray<int32_t> index(2 * Size(keys));
    of.scratch.Reset();
    std::vector<sok::RouteTable> tables(2);
    std::vector<sok::RouteFeature> features(2);
    for (int t = 0; t < 2; ++t) {
      tables[static_cast<size_t>(t)].dim = kDim;
      features[static_cast<size_t>(t)] = {t, words, true, Size(keys), index + t * Size(keys)};
    }
    sok::DeviceRoute route = sok::RouteKeysToHost(of.cuda, &of.scratch, tables.data(), 2, features.data(), 2, 3);
    if (!kKernelsRun) route.begin = {0, 1, 1, 2, 3, 3, 4};
    const std::vector<int64_t> places(6, 16);
    Keys distinct(static_cast<size_t>(route.begin.back()));
    sok::WriteRouteToHost(of.cuda, &of.scratch, route, tables.data(), 2, features.data(), 2, places.data(),
                          distinct.data());
    SOK_CUDA(cudaDeviceSynchronize());
  }

  AllRows Contents() { return ReadAll(of.store).found; }

  OnDevice of, other;
  int64_t step = 0;
};

struct Operation {
  const char* name;
  std::function<void(Fixture*)> run;
  bool has_parts = false;  // of which the first may be done when a later one fails
};

inline std::vector<Operation> Operations() {
  return {
      {"a new table", [](Fixture*) { OnDevice(Config(kDim, 400, false)).Lookup({1, 2}); }},
      {"lookup", [](Fixture* f) { f->of.Lookup({0, 3, 6}); }},
      {"lookup of new keys", [](Fixture* f) { f->of.Lookup(Range(300, 7)); }},
      {"update", [](Fixture* f) { f->Update("adagrad", {0, 3, 9}); }},
      {"first update of another optimizer", [](Fixture* f) { f->Update("adam", {0, 3}); }, true},
      {"step of a group", [](Fixture* f) { f->GroupStep({0, 3, 30, 33, 36}); }, true},
      {"lookup that pools", [](Fixture* f) { f->Pool({0, 3, 30, 33, 36}); }},
      {"route", [](Fixture* f) { f->Route({0, 3, 30, 33, 36, 3}); }},
      {"assign", [](Fixture* f) { Assign(&f->of.store, Range(40, 2), 3.0f); }},
      {"erase",
       [](Fixture* f) {
         const Keys keys{0, 6, 7};
         f->of.store.Erase(keys.data(), Size(keys));
       }},
      {"reserve", [](Fixture* f) { f->of.store.Reserve(cpu, 900, true); }},
      {"size", [](Fixture* f) { f->of.store.size(); }},
      {"read all", [](Fixture* f) { f->Contents(); }},
      {"save of changes",
       [](Fixture* f) {
         f->of.store.BeginSave(TableStore::SnapshotOf::kChanges);
         Collector collector(kDim, 4);
         try {
           f->of.store.ReadSnapshot(cpu, &collector);
         } catch (const std::exception&) {
           f->of.store.EndSave("");
           throw;
         }
         f->of.store.EndSave("second");
         if (kKernelsRun) CHECK_EQ(collector.found.size(), size_t{2});
       }},
      {"restore", [](Fixture* f) { Restore(&f->of.store, ReadAll(f->other.store)); }, true},
      {"swap", [](Fixture* f) { f->of.store.Swap(&f->other.store); }},
  };
}

enum class Told { kNothing, kMemory, kOther };

// What the operation says where a call fails.
inline Told Run(const Operation& operation, Fixture* fixture) {
  try {
    operation.run(fixture);
  } catch (const sok::OutOfMemory&) {
    return Told::kMemory;
  } catch (const sok::CudaError& e) {
    CHECK(std::string(e.what()).find("cudaErrorIllegalAddress") != std::string::npos);
    return Told::kOther;
  }
  return Told::kNothing;
}

// Calls that fail after 0, 1, 2, ... others, until the operation has no more of them: fails(k) says whether it had one. Gives their
// number.
inline int64_t ForAllCalls(const std::function<bool(int64_t)>& fails) {
  int64_t k = 0;
  while (fails(k)) ++k;
  return k;
}
