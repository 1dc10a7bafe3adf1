// Versions of a tier: what all rows held at a mark, kept in the log while rows go on changing.
//
// A record belongs to the version `now_` in which it was last changed, and is of every version from that one on until its row changes
// again. BeginVersion is no more than the next number. Records of earlier versions are written before they change, or when they
// leave memory, or by WriteSome; those that a row has no more stay in the log for as long as there is a version that needs them.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "sok/error.h"
#include "sok/file_error.h"
#include "sok/row_tier.h"

namespace sok {

uint32_t RowTier::BeginVersion() {
  if (pending_ != 0) throw FailedPrecondition(label_ + ": another version of it is being written.");
  if (is_digest_lost_) {
    throw FailedPrecondition(
        label_ + " has lost a row to damage of " + log_->file() +
        ", and its versions could not be told from damaged ones. Save it otherwise, and restore it.");
  }
  if (now_ == kMaxVersion) {
    throw FailedPrecondition(label_ + " has had " + std::to_string(now_) +
                             " versions, and can have no more. Save it, and restore it into a new table.");
  }
  ReleaseOld();
  RowLog::RemoveLeftOver(config_.path);
  pending_ = now_++;
  written_to_ = 0;
  digest_ = current_digest_;
  return pending_;
}

bool RowTier::WriteSome(uint32_t version, int64_t frames) {
  if (pending_ != version)
    throw FileError(ENOSPC,
                    "keep what a version needs, which was given up: the disk was full, or the table got other slots",
                    log_->file());
  const int64_t end = std::min(written_to_ + frames, made_);
  for (; written_to_ < end; ++written_to_) {
    Frame* frame = FrameAt(written_to_);
    if (frame->row != kNoRow && frame->slot == RowLog::kNoSlot && VersionOfOrder(Order(frame)) <= version) Write(frame);
  }
  return written_to_ < made_;
}

void RowTier::EndVersion(uint32_t version, const std::string& shard) {
  if (pending_ != version) return;
  pending_ = 0;
  if (!shard.empty()) kept_.push_back({version, shard});
  log_->Release(kept_.empty() ? now_ : kept_.front().number);
}

void RowTier::ReleaseOld() {
  const auto is_gone = [](const Kept& kept) { return RowLog::IsShardGone(kept.shard); };
  kept_.erase(std::remove_if(kept_.begin(), kept_.end(), is_gone), kept_.end());
  log_->Release(kept_.empty() ? now_ : kept_.front().number);
}

void RowTier::GiveUp() {
  pending_ = 0;
  log_->Release(kept_.empty() ? now_ : kept_.front().number);
  log_->ReleaseNow();
}

void RowTier::ReserveVersions(int64_t n) {
  if (NewestNeeding() == 0) return;
  const int64_t rows = std::min(max_rows_, slabs_ << kSlabShift);
  try {
    log_->Reserve(rows + log_->retained() + n);
    return;
  } catch (const FileError&) {
    log_->ReleaseNow();  // perhaps that is room enough
  }
  try {
    log_->Reserve(rows + log_->retained() + n);
  } catch (const FileError&) {
    if (pending_ == 0) throw;
    GiveUp();  // its save says so; what was saved before is still there
    log_->Reserve(rows + log_->retained() + (kept_.empty() ? 0 : n));
  }
}

void RowTier::LosesSlot(uint32_t row, uint32_t slot, uint64_t order) {
  current_digest_ -= DigestOf(row, order);
  const uint32_t newest = NewestNeeding();
  if (newest >= VersionOfOrder(order)) {
    log_->Retain(slot, newest);
  } else {
    log_->Drop(slot);
  }
}

void RowTier::Supersede(Frame* frame) {
  if (frame->slot == RowLog::kNoSlot && VersionOfOrder(Order(frame)) <= pending_) Write(frame);
  if (frame->slot != RowLog::kNoSlot) LosesSlot(frame->row, frame->slot, Order(frame));
  frame->slot = RowLog::kNoSlot;
  Order(frame) = OrderOf(now_, 0);
}

void RowTier::Secure(const uint32_t* rows, int64_t n) {
  ReserveVersions(n);
  for (int64_t i = 0; i < n; ++i) {
    if (!IsHere(rows[i])) continue;
    Frame* frame = FrameOf(places_[rows[i]]);
    if (frame->slot == RowLog::kNoSlot && VersionOfOrder(Order(frame)) <= pending_) Write(frame);
  }
  // What lies in the file alone is read for its order: together, as each by itself would wait for the disk.
  secured_ = {};
  for (int64_t i = 0; i < n;) {
    reads_.clear();
    for (; i < n && reads_.size() < reads_.capacity(); ++i)
      if (IsInFile(rows[i])) reads_.push_back({rows[i], SlotOf(rows[i]), forgotten_.data(), false, 0});
    const SerialExecutor executor;
    if (!reads_.empty()) log_->Read(Cpu{executor}, &reads_);
    for (const RowLog::Wanted& read : reads_)
      if (read.error == 0 && !read.is_damaged) secured_.emplace_back(read.row, read.order);
  }
  std::sort(secured_.begin(), secured_.end());
  secured_.erase(std::unique(secured_.begin(), secured_.end()), secured_.end());
}

void RowTier::ForgetInFile(uint32_t row, uint32_t slot) {
  if (!has_versions()) return log_->Drop(slot);
  const auto known = std::lower_bound(secured_.begin(), secured_.end(), std::pair{row, uint64_t{1}});
  if (known != secured_.end() && known->first == row) {
    const uint64_t order = std::exchange(known->second, 0);  // of no row that has this number later
    return LosesSlot(row, slot, order);
  }
  RowLog::Wanted wanted = {row, slot, forgotten_.data(), false, 0};
  log_->ReadOne(&wanted);
  if (wanted.error == 0 && !wanted.is_damaged) return LosesSlot(row, slot, wanted.order);
  // Of a damaged record nobody knows what it was: versions that need it are damaged, and those to come cannot be checked.
  is_digest_lost_ = true;
  if (NewestNeeding() != 0) {
    log_->Retain(slot, NewestNeeding());
  } else {
    log_->Drop(slot);
  }
}

}  // namespace sok
