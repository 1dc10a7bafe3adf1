#include "sok/row_tier.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "sok/error.h"
#include "sok/pages.h"

namespace sok {
namespace {

constexpr int64_t kLeastFrames = 2048;  // fewer would make calls wait for reads again and again

// Tests of small tables want few, whatever the budget; 0: no wish.
int64_t FramesWished() {
  const char* wish = std::getenv("SOK_STORAGE_FRAMES");
  return wish == nullptr ? 0 : std::max<int64_t>(1, std::atoll(wish));
}

constexpr int64_t kReadsAtOnce = 8192;
constexpr int64_t kBesideFrame = 2 * sizeof(uint32_t);  // its numbers among those that are free, or wished for

int64_t BufferBytes(int64_t floats, int64_t words) {
  return RowLog::BufferBytes(floats, words) + kReadsAtOnce * static_cast<int64_t>(sizeof(RowLog::Wanted));
}

}  // namespace

RowTier::RowTier(const StorageConfig& config, std::string label, const std::string& file_name, int64_t floats,
                 int64_t max_rows, Facts facts)
    : config_(config),
      label_(std::move(label)),
      name_(file_name),
      floats_(floats),
      max_rows_(max_rows),
      least_frames_(FramesWished() > 0 ? FramesWished() : kLeastFrames),
      facts_(std::move(facts)),
      words_(static_cast<size_t>(facts_.num_words)),
      forgotten_(facts_.key ? static_cast<size_t>(floats) : 0) {
  frame_bytes_ = FrameBytes(floats);
  static_assert(sizeof(Frame) == 16, "records begin at multiples of 16 bytes");
  if (Needs(floats) > config.memory_bytes) {
    throw InvalidArgument(label_ + ": storage needs memory_bytes of at least " + std::to_string(Needs(floats)) +
                          ". Received: " + std::to_string(config.memory_bytes) + ".");
  }
  all_frames_ =
      std::min((config.memory_bytes - BufferBytes(floats, Words())) / (frame_bytes_ + kBesideFrame), max_rows);
  if (FramesWished() > 0) all_frames_ = std::min(all_frames_, LeastFrames());
  // Nothing that brings rows takes memory: an update in its middle, or a key without its row, cannot be given up.
  free_.reserve(static_cast<size_t>(all_frames_));
  wishes_.reserve(static_cast<size_t>(all_frames_));
  reads_.reserve(static_cast<size_t>(kReadsAtOnce));
  log_.reset(
      new RowLog(config.path, file_name, floats, Words(), this));  // whose owner this is, is nobody else's business
  places_ = static_cast<float**>(AllocatePages(max_rows * static_cast<int64_t>(sizeof(float*)), /*huge=*/false,
                                               "places of embedding rows", /*lazily=*/true));
  try {
    frames_ = static_cast<char*>(
        AllocatePages(all_frames_ * frame_bytes_, /*huge=*/false, "embedding rows", /*lazily=*/true));
  } catch (...) {
    FreePages(places_, max_rows * static_cast<int64_t>(sizeof(float*)));
    throw;
  }
  first_frame_ = frames_ + (has_versions() ? kOrderBytes : 0);
}

RowTier::~RowTier() {
  if (!kept_.empty() || pending_ != 0) log_->Leave();  // a shard may name it; if none does, the next log removes it
  FreePages(frames_, all_frames_ * frame_bytes_);
  FreePages(places_, max_rows_ * static_cast<int64_t>(sizeof(float*)));
}

int64_t RowTier::Needs(int64_t floats) const {
  const int64_t of_segments = log_ == nullptr ? 0 : log_->memory_bytes() - RowLog::BufferBytes(floats_, Words());
  return beside_ + PlacesBytes() + of_segments + BufferBytes(floats, Words()) +
         LeastFrames() * (FrameBytes(floats) + kBesideFrame);
}

int64_t RowTier::OwnBytes() const {
  return log_->memory_bytes() + kReadsAtOnce * static_cast<int64_t>(sizeof(RowLog::Wanted));
}

int64_t RowTier::MostFrames() const {
  const int64_t bytes = config_.memory_bytes - beside_ - PlacesBytes() - OwnBytes();
  return std::min(all_frames_, bytes / (frame_bytes_ + kBesideFrame));  // may be negative
}

int64_t RowTier::memory_bytes() const { return PlacesBytes() + made_ * (frame_bytes_ + kBesideFrame) + OwnBytes(); }

StorageCounts RowTier::counts() const {
  StorageCounts counts;
  counts.rows_in_memory = made_ - static_cast<int64_t>(free_.size());
  counts.most_rows_in_memory = most_rows_here();
  counts.hits = hits_;
  counts.misses = __atomic_load_n(&misses_, __ATOMIC_RELAXED);
  counts.read_ahead = read_ahead_;
  counts.read_bytes = read_before_ + log_->read_bytes();
  counts.written_bytes = written_before_ + log_->written_bytes();
  counts.file_bytes = log_->file_bytes();
  return counts;
}

void RowTier::CheckRoom() const {
  if (Needs(floats_) <= config_.memory_bytes) return;
  throw OutOfMemory(label_ + ": memory_bytes=" + std::to_string(config_.memory_bytes) +
                    " of its storage has no room for more rows: keys, places and columns of " +
                    std::to_string(std::min(max_rows_, slabs_ << kSlabShift)) + " rows take " +
                    std::to_string(beside_ + PlacesBytes()) + " bytes of it. Give it at least " +
                    std::to_string(Needs(floats_)) + ", or spread the table over more workers.");
}

void RowTier::Touch(int64_t row) {
  if (Word(row) != 0) return;
  ++slabs_;
  try {
    log_->Reserve(std::min(max_rows_, slabs_ << kSlabShift) + log_->retained());  // first, as it takes memory, too
    CheckRoom();
  } catch (...) {
    --slabs_;
    throw;
  }
  const int64_t first = row >> kSlabShift << kSlabShift;
  for (int64_t r = first; r < std::min(max_rows_, first + (int64_t{1} << kSlabShift)); ++r) SetWord(r, kUnwritten);
}

RowLog::Fate RowTier::FateOf(uint32_t row, uint32_t slot) {
  if (row >= max_rows_) return RowLog::Fate::kDead;
  const uintptr_t word = Word(row);
  if (word == 0 || (word & kUnwritten) != 0) return RowLog::Fate::kDead;
  if ((word & kInFile) != 0) return word >> kSlotShift == slot ? RowLog::Fate::kMoves : RowLog::Fate::kDead;
  Frame* frame = FrameOf(places_[row]);
  if (frame->slot != slot) return RowLog::Fate::kDead;
  if (has_versions()) return RowLog::Fate::kMoves;  // a version may need it
  frame->slot = RowLog::kNoSlot;
  return RowLog::Fate::kForgotten;
}

void RowTier::Moved(uint32_t row, uint32_t to) {
  if (IsHere(row)) {
    FrameOf(places_[row])->slot = to;
    return;
  }
  SetWord(row, uintptr_t{to} << kSlotShift | (Word(row) & kWanted) | kInFile);
}

void RowTier::BecomesDirty(Frame* frame) {
  if (has_versions()) return Supersede(frame);
  if (frame->slot == RowLog::kNoSlot) return;
  log_->Drop(frame->slot);
  frame->slot = RowLog::kNoSlot;
}

void RowTier::Write(Frame* frame) {
  if (!has_versions()) {
    frame->slot = log_->Append(frame->row, RecordOf(frame));
    return;
  }
  const uint32_t version = VersionOfOrder(Order(frame));
  const uint64_t order = OrderOf(version, ++appends_);
  if (facts_.num_words > 0) facts_.words(frame->row, words_.data());
  frame->slot = log_->Append(frame->row, RecordOf(frame), facts_.key(frame->row), order, words_.data());
  Order(frame) = order;
  current_digest_ += DigestOf(frame->row, order);
  if (version <= pending_) digest_ += DigestOf(frame->row, order);
}

void RowTier::Leave(Frame* frame) {
  if (frame->slot == RowLog::kNoSlot) Write(frame);
  SetWord(frame->row, uintptr_t{frame->slot} << kSlotShift | kInFile);
  FreeFrame(frame);
}

void RowTier::FreeFrame(Frame* frame) {
  frame->row = kNoRow;
  frame->heat = frame->soon = 0;
  free_.push_back(static_cast<uint32_t>(NumberOf(frame)));
}

RowTier::Frame* RowTier::TakeFrame(uint32_t row, uint32_t slot) {
  Frame* frame;
  if (free_.empty()) {
    frame = FrameAt(made_++);
  } else {
    frame = FrameAt(free_.back());
    free_.pop_back();
  }
  *frame = {row, slot, wave_, 0, 0};
  if (has_versions()) Order(frame) = OrderOf(now_, 0);
  return frame;
}

void RowTier::Fit() {
  const int64_t most = most_rows_here();
  if (most >= made_) return;
  for (int64_t number = most; number < made_; ++number)
    if (Frame* frame = FrameAt(number); frame->row != kNoRow) Leave(frame);
  free_.erase(std::remove_if(free_.begin(), free_.end(), [&](uint32_t number) { return number >= most; }), free_.end());
  DropPages(frames_ + most * frame_bytes_, (made_ - most) * frame_bytes_);
  made_ = most;
  if (hand_ >= made_) hand_ = 0;
}

void RowTier::ExpectLeave() const {
  constexpr int64_t kFramesAhead = 24, kRecordsAhead = 12, kMostAhead = 512;  // bytes of a record
  __builtin_prefetch(FrameAt(std::min(hand_ + kFramesAhead, made_ - 1)), 1);
  const Frame* frame = FrameAt(std::min(hand_ + kRecordsAhead, made_ - 1));
  if (frame->row == kNoRow || frame->wave == wave_ || frame->soon > 0 || frame->heat > 0) return;
  __builtin_prefetch(places_ + frame->row, 1);
  if (frame->slot != RowLog::kNoSlot) return;
  for (int64_t at = 64; at < std::min(frame_bytes_, kMostAhead); at += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(frame) + at);
}

void RowTier::MakeRoom(int64_t n) {
  const int64_t most = most_rows_here();
  while (static_cast<int64_t>(free_.size()) + most - made_ < n) {
    ExpectLeave();
    Frame* frame = FrameAt(hand_);
    hand_ = hand_ + 1 == made_ ? 0 : hand_ + 1;
    if (frame->row == kNoRow || frame->wave == wave_) continue;
    if (frame->soon > 0) {
      --frame->soon;
    } else if (frame->heat > 0) {
      --frame->heat;
    } else {
      Leave(frame);
    }
  }
}

void RowTier::BeginWave() {
  if (++wave_ == 0) {  // after four thousand million calls
    for (int64_t number = 0; number < made_; ++number) FrameAt(number)->wave = 0;
    wave_ = 1;
  }
  Fit();
}

int64_t RowTier::Bring(const Cpu& cpu, const uint32_t* rows, int64_t n, RowUse use) {
  const bool writes = use != RowUse::kRead, reads = use != RowUse::kWrite;
  if (!log_->IsMine()) {
    throw FailedPrecondition(label_ +
                             ": its rows lie in a file of the process that made it, and this one was forked from it. "
                             "Make the table after the fork.");
  }
  constexpr int64_t kPlacesAhead = 32, kFramesAhead = 12;
  BeginWave();
  const int64_t most = most_rows_here();
  wishes_.clear();
  if (writes && has_versions()) ReserveVersions(std::min(n, most));
  int64_t distinct = 0;
  size_t done = 0;
  auto forget_wishes = [&] {
    for (; done < wishes_.size(); ++done) SetWord(wishes_[done], Word(wishes_[done]) & ~kWanted);
  };
  for (int64_t i = 0; i < n; ++i) {
    if (i + kPlacesAhead < n && rows[i + kPlacesAhead] != kNoRow) __builtin_prefetch(places_ + rows[i + kPlacesAhead]);
    if (i + kFramesAhead < n && rows[i + kFramesAhead] != kNoRow)
      __builtin_prefetch(reinterpret_cast<const void*>(Word(rows[i + kFramesAhead]) - sizeof(Frame)), 1);
    const uint32_t row = rows[i];
    if (row == kNoRow) continue;
    const uintptr_t word = Word(row);
    if ((word & kTags) != 0) {
      if ((word & kWanted) != 0) continue;
      if (distinct == most) {
        n = i;
        break;
      }
      ++distinct;
      SetWord(row, word | kWanted);
      wishes_.push_back(row);
      continue;
    }
    Frame* frame = FrameOf(places_[row]);
    if (frame->wave == wave_) continue;
    if (distinct == most) {
      n = i;
      break;
    }
    ++distinct;
    frame->wave = wave_;
    if (writes) {
      try {
        BecomesDirty(frame);
      } catch (...) {
        forget_wishes();
        throw;
      }
    }
    // One of the batches in flight has it now: those that wait for theirs stay longer.
    frame->soon = static_cast<uint16_t>(writes ? 0 : std::max(0, frame->soon - kRoundsOfABatch));
    if (reads) frame->heat = std::min<int16_t>(kMaxHeat, frame->heat + kHeatOfUse);
    ++hits_;
  }
  try {
    MakeRoom(static_cast<int64_t>(wishes_.size()));
    while (done < wishes_.size()) {
      const size_t first = done;
      done = std::min(wishes_.size(), first + static_cast<size_t>(kReadsAtOnce));
      BringWishes(cpu, first, done, writes);
    }
  } catch (...) {
    forget_wishes();
    throw;
  }
  return n;
}

void RowTier::BringWishes(const Cpu& cpu, size_t begin, size_t end, bool writes) {
  reads_.clear();
  for (size_t i = begin; i < end; ++i) {
    const uint32_t row = wishes_[i];
    const uintptr_t word = Word(row);
    const bool in_file = (word & kInFile) != 0;
    const uint32_t slot = in_file ? static_cast<uint32_t>(word >> kSlotShift) : RowLog::kNoSlot;
    Frame* frame = TakeFrame(row, slot);
    places_[row] = RecordOf(frame);
    if (in_file) {
      reads_.push_back({row, slot, RecordOf(frame), false, 0});
    } else {
      std::memset(RecordOf(frame), 0, static_cast<size_t>(floats_) * sizeof(float));
    }
  }
  if (reads_.empty()) return;
  CountMisses(static_cast<int64_t>(reads_.size()));
  auto undo = [&](const RowLog::Wanted& read) {
    SetWord(read.row, uintptr_t{read.slot} << kSlotShift | kInFile);
    FreeFrame(FrameOf(read.to));
  };
  try {
    log_->Read(cpu, &reads_);
  } catch (...) {
    for (const RowLog::Wanted& read : reads_) undo(read);
    throw;
  }
  const RowLog::Wanted* failed = nullptr;
  for (const RowLog::Wanted& read : reads_) {
    if (read.error == 0 && !read.is_damaged) {
      if (has_versions()) Order(FrameOf(read.to)) = read.order;
      if (writes) BecomesDirty(FrameOf(read.to));
      continue;
    }
    if (failed == nullptr) failed = &read;
    undo(read);
  }
  if (failed != nullptr) throw Unreadable(failed->row, failed->error, log_->file());
}

const float* RowTier::Peek(int64_t row, Failure* failure) const {
  const uintptr_t word = Word(row);
  if ((word & kTags) == 0) return places_[row];
  static thread_local std::vector<float> record;
  record.assign(static_cast<size_t>(floats_), 0.0f);
  if ((word & kInFile) == 0) return record.data();
  RowLog::Wanted wanted = {static_cast<uint32_t>(row), static_cast<uint32_t>(word >> kSlotShift), record.data(), false,
                           0};
  log_->ReadOne(&wanted);
  CountMisses(1);
  if (wanted.error != 0 || wanted.is_damaged) failure->Note(wanted.row, wanted.error);
  return record.data();
}

void RowTier::PeekAll(const Cpu& cpu, const uint32_t* rows, int64_t n, std::vector<float>* aside,
                      const float** records) const {
  std::vector<RowLog::Wanted> wanted;
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += (Word(rows[i]) & kTags) != 0;
  aside->assign(static_cast<size_t>(count * floats_), 0.0f);
  wanted.reserve(static_cast<size_t>(count));
  float* to = aside->data();
  for (int64_t i = 0; i < n; ++i) {
    const uintptr_t word = Word(rows[i]);
    records[i] = (word & kTags) == 0 ? places_[rows[i]] : to;
    if ((word & kTags) == 0) continue;
    if ((word & kInFile) != 0) wanted.push_back({rows[i], static_cast<uint32_t>(word >> kSlotShift), to, false, 0});
    to += floats_;
  }
  log_->Read(cpu, &wanted);
  CountMisses(static_cast<int64_t>(wanted.size()));
  for (const RowLog::Wanted& read : wanted)
    if (read.error != 0 || read.is_damaged) throw Unreadable(read.row, read.error, log_->file());
}

std::unique_ptr<RowTier> RowTier::Widened(const std::vector<float>& fresh, Facts facts) {
  const int64_t floats = floats_ + static_cast<int64_t>(fresh.size());
  if (Needs(floats) > config_.memory_bytes) {
    throw OutOfMemory(label_ + ": memory_bytes=" + std::to_string(config_.memory_bytes) +
                      " of its storage has no room for rows with " +
                      (fresh.empty() ? "versions" : "the slots of another optimizer") + ". Give it at least " +
                      std::to_string(Needs(floats)) + ".");
  }
  // All rows go to the file, so that the budget has room for both.
  for (int64_t number = 0; number < made_; ++number)
    if (Frame* frame = FrameAt(number); frame->row != kNoRow) Leave(frame);
  free_.clear();
  DropPages(frames_, made_ * frame_bytes_);
  made_ = hand_ = 0;
  auto wider = std::make_unique<RowTier>(config_, label_, name_, floats, max_rows_, std::move(facts));
  wider->SetBeside(beside_);
  const SerialExecutor executor;
  std::vector<uint32_t> rows;
  for (int64_t first = 0; first < max_rows_; first += int64_t{1} << kSlabShift) {
    if (Word(first) == 0) continue;
    wider->Touch(first);
    rows.clear();
    for (int64_t row = first; row < std::min(max_rows_, first + (int64_t{1} << kSlabShift)); ++row)
      if ((Word(row) & kUnwritten) == 0) rows.push_back(static_cast<uint32_t>(row));
    for (auto row = rows.begin(); row != rows.end();) {
      const auto end = row + wider->Bring(Cpu{executor}, &*row, rows.end() - row, RowUse::kWrite);
      for (; row != end; ++row) {
        Failure failure;
        const float* record = Peek(*row, &failure);
        failure.Throw(*this);
        std::copy_n(record, floats_, wider->places_[*row]);
        std::copy(fresh.begin(), fresh.end(), wider->places_[*row] + floats_);
      }
    }
  }
  wider->hits_ = hits_;
  wider->misses_ = misses_;
  wider->read_ahead_ = read_ahead_;
  wider->read_before_ = read_before_ + log_->read_bytes();
  wider->written_before_ = written_before_ + log_->written_bytes();
  return wider;
}

void RowTier::Forget(int64_t row) {
  const uintptr_t word = Word(row);
  if ((word & kTags) == 0) {
    Frame* frame = FrameOf(places_[row]);
    BecomesDirty(frame);  // secured: nothing is written
    FreeFrame(frame);
  } else if ((word & kInFile) != 0) {
    ForgetInFile(static_cast<uint32_t>(row), static_cast<uint32_t>(word >> kSlotShift));
  }
  SetWord(row, kUnwritten);
}

}  // namespace sok
