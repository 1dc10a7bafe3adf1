// DeviceTiers for tests: one is asked as the ops of a GPU ask it, and beside it is an EmbeddingTable that is told the
// same.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "collector.h"
#include "device_stores.h"
#include "sok/device_tier.h"
#include "sok/error.h"

using Ids = std::vector<int64_t>;

// The smallest budget of a table.
inline int64_t LeastDeviceBytes(sok::TableConfig config) {
  config.storage = {};
  config.storage.device_bytes = 1;
  try {
    sok::DeviceTier::Make(config);
  } catch (const sok::InvalidArgument& error) {
    const std::string text = error.what(), before = "it needs at least ";
    return std::stoll(text.substr(text.find(before) + before.size()));
  }
  return -1;
}

struct OnTier {
  explicit OnTier(const sok::TableConfig& config) : tier(sok::DeviceTier::Make(config, 5)), scratch(cuda) {}
  ~OnTier() { sok::Ignore(cudaDeviceSynchronize()); }

  // Ids and, unless it is null, rows of keys. on_host: the keys lie in the memory of the process as well.
  Ids Lookup(const Keys& keys, bool trains, Floats* rows = nullptr, bool on_host = true) {
    DeviceArray<uint64_t> words(keys);
    DeviceArray<int64_t> ids(Size(keys));
    DeviceArray<float> values(rows == nullptr ? 0 : Size(keys) * tier->dim());
    scratch.Reset();
    sok::DeviceTable::Asked asked{&tier->device(), words.data(), Size(keys), rows == nullptr ? nullptr : values.data(),
                                  ids.data()};
    {
      const sok::DeviceTier::Held held(cuda, cpu, &scratch, {{tier.get(), &asked, on_host ? keys.data() : nullptr}},
                                       trains);
      if (rows == nullptr) {
        sok::DeviceTable::FindGroup(cuda, &scratch, &asked, 1);
      } else {
        sok::DeviceTable::LookupGroup(cuda, &scratch, &asked, 1, /*insert=*/false);
      }
    }
    if (rows != nullptr) *rows = values.Get();
    return ids.Get();
  }

  // A gradient for each id; those of equal ids are summed before, as the ops do.
  void Apply(const sok::UpdateRule& rule, const std::string& set, const Ids& row_ids, const Floats& grads,
             sok::Nonfinite nonfinite = sok::Nonfinite::kAllow) {
    const auto dim = static_cast<size_t>(tier->dim());
    std::map<int64_t, Floats> sums;
    for (size_t i = 0; i < row_ids.size(); ++i) {
      Floats& sum = sums[row_ids[i]];
      sum.resize(dim);
      for (size_t j = 0; j < dim; ++j) sum[j] += grads[i * dim + j];
    }
    Ids distinct;
    Floats summed;
    for (const auto& [id, sum] : sums) {
      distinct.push_back(id);
      summed.insert(summed.end(), sum.begin(), sum.end());
    }
    DeviceArray<int64_t> ids(distinct);
    DeviceArray<float> values(summed);
    scratch.Reset();
    sok::DeviceTier::Updating updating(cuda, cpu, {{tier.get(), ids.data(), ids.size()}}, rule, set);
    const sok::DeviceTable::Gradients gradients{&tier->device(), ids.data(), values.data(), ids.size(), nullptr};
    sok::DeviceTable::ApplyGroup(cuda, &scratch, rule, set, nonfinite, 1.0f, &gradients, 1);
    SOK_CUDA(cudaDeviceSynchronize());
    updating.Done();
  }

  sok::StorageCounts counts() const { return tier->storage_counts(); }

  sok::Cuda cuda;
  std::unique_ptr<sok::DeviceTier> tier;
  sok::StreamScratch scratch;
};

inline void CheckNear(const Floats& a, const Floats& b) {
  CHECK_EQ(a.size(), b.size());
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    CHECK(std::fabs(a[i] - b[i]) <= 1e-4f * (1.0f + std::fabs(b[i])));
}

// The same rows, with slots; of a slot set that holds counts bit for bit.
inline void CheckSameRows(const Collector& a, const Collector& b) {
  CHECK_EQ(a.sets.size(), b.sets.size());
  CHECK(a.erased == b.erased);
  CHECK_EQ(a.found.size(), b.found.size());
  for (const auto& [key, kept] : b.found) {
    const auto other = a.found.find(key);
    CHECK(other != a.found.end());
    if (other == a.found.end()) continue;
    CheckNear(other->second.row, kept.row);
    for (size_t s = 0; s < b.sets.size(); ++s) {
      const Floats &mine = other->second.slots.at(s), &theirs = kept.slots.at(s);
      if (b.sets[s].name == sok::kHistorySet) {
        CHECK_EQ(std::memcmp(mine.data(), theirs.data(), theirs.size() * sizeof(float)), 0);
      } else {
        CheckNear(mine, theirs);
      }
    }
  }
}

// A tier and its twin.
class TierPair {
 public:
  struct Found {
    Ids tier, twin;
  };

  // twin_config: of the twin, if its file lies elsewhere.
  TierPair(const sok::TableConfig& config, sok::TableConfig twin_config)
      : tier_(config), twin_([&] {
          twin_config.storage.device_bytes = 0;
          return twin_config;
        }()) {}
  explicit TierPair(const sok::TableConfig& config) : TierPair(config, config) {}

  OnTier& tier() { return tier_; }
  sok::EmbeddingTable& twin() { return twin_.store; }
  // What is done to both.
  template <class Call>
  void Both(const Call& call) {
    call(tier_.tier.get());
    call(&twin_.store);
  }

  Found Lookup(const Keys& keys, bool trains, bool reads = true, bool on_host = true) {
    Found found{Ids(), Ids(keys.size())};
    Floats mine, theirs(keys.size() * static_cast<size_t>(twin().dim()));
    const int64_t most = trains ? std::max<int64_t>(1, Size(keys)) : tier_.tier->keys_at_a_time();
    for (int64_t at = 0; at < Size(keys); at += most) {
      const Keys part(keys.begin() + at, keys.begin() + std::min(at + most, Size(keys)));
      Floats rows;
      const Ids ids = tier_.Lookup(part, trains, reads ? &rows : nullptr, on_host);
      found.tier.insert(found.tier.end(), ids.begin(), ids.end());
      mine.insert(mine.end(), rows.begin(), rows.end());
    }
    sok::Scratch scratch;
    twin().Lookup(cpu, &scratch, keys.data(), Size(keys), trains, nullptr, theirs.data(), found.twin.data());
    if (reads) CheckNear(mine, theirs);
    for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(found.tier[i] >= 0, found.twin[i] >= 0);
    return found;
  }
  void Apply(const sok::UpdateRule& rule, const std::string& set, const Found& found, const Floats& grads) {
    tier_.Apply(rule, set, found.tier, grads);
    twin_.Apply(rule, set, found.twin, grads);
  }
  void EndStep() {
    Both([](TableStore* store) { store->EndStep(cpu); });
  }

  // Contents and counts; and of tables with policies the histories of these keys.
  void Compare(const Keys& keys) {
    sok::DeviceTier& tier = *tier_.tier;
    CheckSameRows(ReadAll(tier), ReadAll(twin()));
    CHECK(tier.Keys() == twin().Keys());
    CHECK_EQ(tier.size(), twin().size());
    CHECK_EQ(tier.step.load(), twin().step.load());
    const sok::PolicyCounts mine = tier.policy_counts(), theirs = twin().policy_counts();
    CHECK_EQ(mine.candidates, theirs.candidates);
    CHECK_EQ(mine.made, theirs.made);
    CHECK_EQ(mine.refused, theirs.refused);
    CHECK_EQ(mine.evicted, theirs.evicted);
    const auto sets = tier.SlotSets(), others = twin().SlotSets();
    CHECK_EQ(sets.size(), others.size());
    for (size_t s = 0; s < sets.size(); ++s) {
      CHECK_EQ(sets[s].name, others[s].name);
      CHECK_EQ(sets[s].calls, others[s].calls);
    }
    if (!twin().config().policies.any()) return;
    std::vector<sok::RowHistory> seen(keys.size()), expected(keys.size());
    tier.OnHost()->Histories(keys.data(), Size(keys), seen.data());
    twin().Histories(keys.data(), Size(keys), expected.data());
    CHECK_EQ(std::memcmp(seen.data(), expected.data(), seen.size() * sizeof(sok::RowHistory)), 0);
  }

 private:
  OnTier tier_;
  OnCpu twin_;
};
