// Saving a table by what has changed since it was saved before.
#include <mutex>
#include <utility>

#include "slot_set.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "table_snapshot.h"

namespace sok {

void EmbeddingTable::MarkChanged(const uint32_t* rows, int64_t n) {
  if (!saved_.is_on()) return;
  for (int64_t i = 0; i < n; ++i) saved_.Mark(rows[i]);
}

void EmbeddingTable::BeginSave(SnapshotOf snapshot) {
  const SerialExecutor executor;
  FinishLate({executor});
  Lock lock(mutex_);
  CheckWhole();
  if (snapshot_ || version_) {
    throw FailedPrecondition(Label() + ": an asynchronous save is under way. Wait for its result first.");
  }
  if (snapshot == SnapshotOf::kVersion) CheckVersions();
  if (snapshot == SnapshotOf::kChanges && saved_.base().empty()) {
    throw FailedPrecondition(Label() + ": there is no save that its changes could be counted from.");
  }
  saved_.Begin(config_.hashed ? next_row_ : config_.capacity,
               [&](uint64_t key) { return FindRow(key) != HashTable::kNoRow; });
  for (const auto& set : sets_) set->calls_read.store(set->history.calls());
  if (snapshot == SnapshotOf::kNothing) return;
  try {
    if (snapshot == SnapshotOf::kVersion) {
      BeginVersion();
    } else {
      snapshot_ = MakeSnapshot(snapshot);
    }
  } catch (...) {
    saved_.End("");
    throw;
  }
}

void EmbeddingTable::EndSave(const std::string& base) {
  Lock lock(mutex_);
  const bool is_complete = saved_.is_saving() && !base.empty();
  saved_.End(base);
  for (const auto& set : sets_)
    if (is_complete) set->calls_at_base = set->calls_read.load();
  snapshot_.reset();
  if (version_ && rows_.tier() != nullptr)
    rows_.tier()->EndVersion(version_->number, is_complete ? version_->shard : "");
  version_.reset();
}

void EmbeddingTable::ReadChanges(const Cpu& cpu, RowSink* sink) const {
  SharedLock lock(mutex_);
  if (!saved_.is_saving() || saved_.base().empty()) {
    throw FailedPrecondition(Label() + ": there is no save that its changes could be counted from.");
  }
  ReadRows(cpu, sink, /*changes=*/true);
}

EmbeddingTable::ChangeInfo EmbeddingTable::Changes() const {
  SharedLock lock(mutex_);
  ChangeInfo info;
  info.is_on = saved_.is_on();
  info.base = saved_.base();
  info.rows = saved_.num_rows();
  info.erased = saved_.num_erased();
  info.copied_bytes = snapshot_ ? snapshot_->copies.bytes() : 0;
  for (const auto& set : sets_) {
    info.sets.push_back({set->name, set->rule, set->history.calls(), set->history.RunsAfter(set->calls_at_base)});
  }
  return info;
}

void EmbeddingTable::SkipCalls(const std::string& save, const std::vector<SlotSetInfo>& infos) {
  constexpr int64_t kMaxCalls = UINT32_MAX - 2;  // what a stamp can hold
  const SerialExecutor executor;
  const Cpu serial{executor};
  Lock lock(mutex_);
  for (const SlotSetInfo& info : infos) {
    const SlotSet* known = FindSet(info.name);
    if (known != nullptr && known->rule.rule != info.rule.rule) {
      throw InvalidArgument(Label() + ": slot set '" + info.name + "' belongs to rule '" + RuleName(known->rule.rule) +
                            "' here, and to '" + RuleName(info.rule.rule) + "' in what is restored.");
    }
    SlotSet* set = known == nullptr ? FindOrAttach(info.rule, info.name) : const_cast<SlotSet*>(known);
    if (!info.rule.decays()) continue;
    // Ranks may number their calls from different beginnings: what counts is how many there were, and their alphas.
    std::vector<AlphaRun> runs{{info.num_missed(), 0.0f}};
    for (const AlphaRun& run : info.missed)
      runs.push_back({run.first_call - info.missed[0].first_call, run.alpha, run.extra});
    if (set->skipped_save == save && !save.empty()) {
      if (set->skipped == runs) continue;
      throw InvalidArgument(Label() + ": two files of the save " + save + " disagree about the steps of '" + info.name +
                            "'.");
    }
    if (info.num_missed() > kMaxCalls - set->history.calls()) {
      throw InvalidArgument(Label() + ": " + std::to_string(info.num_missed()) + " more calls of '" + info.name +
                            "' are more than can be counted.");
    }
    SettleBefore(serial, *set, info.rule);
    set->SetRule(info.rule);
    set->Append(info.missed, info.calls);
    set->skipped_save = save;
    set->skipped = std::move(runs);
  }
}

}  // namespace sok
