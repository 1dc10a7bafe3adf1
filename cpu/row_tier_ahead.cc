// Rows that come into memory before a call needs them. No call waits for their reads.
#include <algorithm>
#include <cstring>

#include "sok/row_tier.h"

namespace sok {

void RowTier::WhatToRead(const uint32_t* rows, int64_t n, Ahead* ahead) const {
  ahead->wanted.clear();
  ahead->copied.clear();
  ahead->log = log_->IsMine() ? log_ : nullptr;
  ahead->records.resize(static_cast<size_t>(n * floats_));
  if (ahead->log == nullptr) return;
  float* to = ahead->records.data();
  for (int64_t i = 0; i < n; ++i) {
    if (!IsInFile(rows[i])) continue;
    const uint32_t slot = SlotOf(rows[i]);
    RowLog::Wanted one = {rows[i], slot, to, false, 0};
    one.begun = log_->TimesBegun(slot);
    to += floats_;
    if (log_->IsInFile(slot)) {
      ahead->wanted.push_back(one);
    } else {  // in the log's buffer, which may be filled anew when the others are read
      log_->ReadOne(&one);
      ahead->copied.push_back(one);
    }
  }
}

void RowTier::ReadAside(const Cpu& cpu, Ahead* ahead) {
  if (!ahead->wanted.empty()) ahead->log->ReadAside(cpu, &ahead->wanted);
}

int64_t RowTier::TakeIn(Ahead* ahead, int rounds) {
  if (ahead->log != log_) return 0;  // the rows lie in another file now
  BeginWave();
  std::vector<RowLog::Wanted>& wanted = ahead->wanted;
  wanted.insert(wanted.end(), ahead->copied.begin(), ahead->copied.end());
  size_t count = 0;
  for (const RowLog::Wanted one : wanted) {
    if (one.error != 0 || one.is_damaged) continue;
    if (Word(one.row) != (uintptr_t{one.slot} << kSlotShift | kInFile))
      continue;                                             // it was brought in, erased, or moved
    if (log_->TimesBegun(one.slot) != one.begun) continue;  // and perhaps changed, and is where it was
    wanted[count++] = one;
  }
  count = std::min(count, static_cast<size_t>(most_rows_here()));
  wanted.resize(count);
  MakeRoom(static_cast<int64_t>(count));  // rows in the file may move, and hold what they held
  int64_t taken = 0;
  for (const RowLog::Wanted& one : wanted) {
    if (!IsInFile(one.row)) continue;  // the row was there twice
    Frame* frame = TakeFrame(one.row, SlotOf(one.row));
    if (has_versions()) Order(frame) = one.order;
    std::memcpy(RecordOf(frame), one.to, static_cast<size_t>(floats_) * sizeof(float));
    frame->heat =
        1 - kHeatOfUse;  // its step leaves it a degree more than a row that it has read: the next may need it, too
    frame->soon = static_cast<uint16_t>(rounds);
    places_[one.row] = RecordOf(frame);
    ++taken;
  }
  read_ahead_ += taken;
  return taken;
}

void RowTier::Keep(int64_t row, int rounds) {
  if (Word(row) != 0 && IsHere(row)) FrameOf(places_[row])->soon = static_cast<uint16_t>(rounds);
}

}  // namespace sok
