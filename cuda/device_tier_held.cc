// A device's rows of a host's table: what lookups and updates do before they look at them.
#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "sok/device_tier.h"
#include "sok/device_words.h"
#include "sok/error.h"

namespace sok {

std::vector<std::unique_lock<std::mutex>> DeviceTier::LockAll(std::vector<DeviceTier*>* tiers) {
  std::sort(tiers->begin(), tiers->end(), std::less<>());
  tiers->erase(std::unique(tiers->begin(), tiers->end()), tiers->end());
  std::vector<std::unique_lock<std::mutex>> locks;
  for (DeviceTier* tier : *tiers) locks.emplace_back(tier->mutex_);
  return locks;
}

DeviceTier::Held::Held(const Cuda& cuda, const Cpu& cpu, DeviceScratch* device_scratch, const std::vector<Asked>& asked,
                       bool insert) {
  std::vector<DeviceTier*> tiers;
  for (const Asked& one : asked) tiers.push_back(one.tier);
  locks_ = LockAll(&tiers);
  for (const DeviceTier* tier : tiers) tier->Tell();
  Scratch scratch;
  std::vector<EmbeddingTable::Feature> features;
  for (const Asked& one : asked) {
    const int64_t n = one.of->n;
    EmbeddingTable::Feature feature;
    feature.table = one.tier->host_.get();
    feature.n = n;
    feature.keys = one.keys;
    feature.row_ids = scratch.Get<int64_t>(n);
    if (one.keys == nullptr && n > 0) {
      DeviceKeys keys = one.of->keys;
      auto* words = scratch.Get<uint64_t>(n);
      auto* there = scratch.Get<char>(n * (keys.is_narrow ? 4 : 8));
      CopyToHost(cuda, there, keys.words, n * (keys.is_narrow ? 4 : 8));
      keys.words = there;
      for (int64_t i = 0; i < n; ++i) words[i] = keys.At(i);
      feature.keys = words;
    }
    features.push_back(feature);
  }
  const auto shares = [](const DeviceTier* tier) { return tier->config().policies.shared_rows > 0; };
  for (DeviceTier* tier : tiers) {
    tier->wanted_.clear();
    ++tier->call_;
    // A key that is admitted begins with the row that it has shared; a step that is ended late may look at weights.
    if (insert && (shares(tier) || tier->host_->HasStepToEnd())) tier->WriteHome(cpu);
  }
  std::exception_ptr error;
  try {
    EmbeddingTable::LookupGroup(cpu, &scratch, features.data(), static_cast<int64_t>(features.size()), insert);
  } catch (...) {
    error = std::current_exception();
  }
  for (DeviceTier* tier : tiers) tier->DropLost();  // also what others could not
  if (error) std::rethrow_exception(error);
  for (size_t f = 0; f < features.size(); ++f) {
    const EmbeddingTable::Feature& feature = features[f];
    DeviceTier* tier = asked[f].tier;
    const uint64_t* keys = feature.keys;
    if (shares(tier)) {
      const Policies& policies = tier->config().policies;
      auto *shared = scratch.Get<uint64_t>(feature.n), *found = scratch.Get<uint64_t>(feature.n);
      auto* ids = scratch.Get<int64_t>(feature.n);
      for (int64_t i = 0; i < feature.n; ++i) shared[i] = policies.SharedKey(feature.keys[i]);
      feature.table->Lookup(cpu, &scratch, shared, feature.n, /*insert=*/false, nullptr, nullptr, ids);
      for (int64_t i = 0; i < feature.n; ++i) {
        found[i] = feature.row_ids[i] >= 0 && feature.row_ids[i] == ids[i] ? shared[i] : feature.keys[i];
      }
      auto* there = device_scratch->Get<uint64_t>(feature.n);
      sok::CopyToDevice(cuda, there, found, feature.n * int64_t{sizeof(uint64_t)});
      asked[f].of->keys = there;
      keys = found;
    }
    tier->Want(keys, feature.row_ids, feature.n);
  }
  for (DeviceTier* tier : tiers) tier->Bring(cpu);
  if (!insert) return;
  // Only now: of a lookup that was refused no row has to stay, or the next one would be refused as well.
  for (size_t f = 0; f < features.size(); ++f) asked[f].tier->KeepForStep(features[f].row_ids, features[f].n);
}

void DeviceTier::CheckIds(const Cuda& cuda, const int64_t* row_ids, int64_t n) const {
  if (sent_home_.empty() || n == 0) return;
  std::vector<int64_t> ids(static_cast<size_t>(n));
  CopyToHost(cuda, ids.data(), row_ids, n * int64_t{sizeof(int64_t)});
  for (const int64_t id : ids) {
    if (id < 0) continue;
    const auto row = static_cast<size_t>(id & UINT32_MAX);
    if (row >= sent_home_.size() || id > sent_home_[row])
      continue;  // ids of one row number grow with each row that had it
    throw InvalidArgument(
        Label() +
        ": a gradient is for a row that has left the device since its lookup. Apply gradients in the step of their "
        "lookups, look up fewer ids in a step, or give the table's storage more gpu_bytes.");
  }
}

DeviceTier::Updating::Updating(const Cuda& cuda, const Cpu& cpu, const std::vector<Updated>& updated,
                               const UpdateRule& rule, const std::string& slot_set)
    : cpu_(cpu), rule_(rule), slot_set_(slot_set) {
  for (const Updated& one : updated) tiers_.push_back(one.tier);
  locks_ = LockAll(&tiers_);
  for (const Updated& one : updated) one.tier->CheckIds(cuda, one.row_ids, one.n);
  if (slot_set_.empty()) return;
  for (const DeviceTier* tier : tiers_) tier->host_->CheckRule(rule_, slot_set_);
  SlotSetInfo set;
  set.name = slot_set_;
  set.rule = rule_;
  Scratch scratch;
  for (DeviceTier* tier : tiers_) tier->host_->Restore(cpu_, &scratch, {set}, RowValues());
}

void DeviceTier::Updating::Done() {
  if (slot_set_.empty() || tiers_.empty()) return;
  std::vector<EmbeddingTable::Gradients> none(tiers_.size());
  for (size_t t = 0; t < tiers_.size(); ++t) none[t].table = tiers_[t]->host_.get();
  Scratch scratch;
  EmbeddingTable::ApplyGroup(cpu_, &scratch, rule_, slot_set_, Nonfinite::kAllow, none.data(),
                             static_cast<int64_t>(none.size()));
}

}  // namespace sok
