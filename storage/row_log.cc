#include "sok/row_log.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "log_files.h"
#include "row_slots.h"
#include "sok/file_error.h"
#include "sok/pages.h"
#include "sok/read_ring.h"

namespace sok {
namespace {

constexpr int64_t kSegmentBytes = int64_t{256} << 10;
constexpr int64_t kLeastSlots = 4;  // of a segment
// A file has room for twice the rows: with half as much to spare, segments that are emptied still have many live slots, and every
// record is written nearly twice.
constexpr int64_t kRoomPerRow = 2;
constexpr int64_t kSpareSegments = 4;
constexpr int64_t kSpareOfVersions = 40;  // so that one sync serves many segments
constexpr int64_t kReleasedAtOnce = 64;
constexpr unsigned kDepth = 128;          // reads in flight
constexpr int64_t kMissCycles = 300;      // of a record that misses the cache
constexpr int64_t kLogReadCycles = 2000;  // of one that the page cache answers
constexpr int64_t kMaxRingBytes = 4 << 20;

int64_t SegmentBytes(int64_t block_bytes) {
  const char* wish = std::getenv("SOK_STORAGE_SEGMENT_BYTES");  // tests of few rows want small ones
  if (wish != nullptr) return RoundedUp(std::max(std::atoll(wish), 1LL), block_bytes);
  return std::max(kSegmentBytes, kLeastSlots * block_bytes) / block_bytes * block_bytes;
}

int64_t RingBytes(int64_t block_bytes) { return std::min<int64_t>(kDepth * block_bytes, kMaxRingBytes); }

// Files whose bytes the processor reaches by itself: in memory, or in persistent memory.
bool IsInMemory(int file) {
  struct statfs system;
  if (fstatfs(file, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)) return true;
  struct statx status;
  return statx(file, "", AT_EMPTY_PATH, 0, &status) == 0 && (status.stx_attributes & STATX_ATTR_DAX) != 0;
}

void MakeFolders(const std::string& path) {
  for (size_t at = 1; at <= path.size(); ++at) {
    if (at < path.size() && path[at] != '/') continue;
    const std::string folder = path.substr(0, at);
    if (mkdir(folder.c_str(), 0777) < 0 && errno != EEXIST && at == path.size())
      throw FileError(errno, "make the folder", folder);
  }
  struct stat status;
  if (stat(path.c_str(), &status) < 0) throw FileError(errno, "use as a folder", path);
  if (!S_ISDIR(status.st_mode)) throw FileError(ENOTDIR, "use as a folder", path);
}

}  // namespace

// Of whole pages, as direct access asks for.
class RowLog::Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : bytes_(bytes), data_(static_cast<char*>(AllocatePages(bytes, /*huge=*/false, "buffers of a file of rows"))) {}
  ~Buffer() { FreePages(data_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* get() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  const int64_t bytes_;
  char* const data_;
};

int64_t RowLog::BufferBytes(int64_t floats, int64_t words) {
  const int64_t block_bytes = BlockBytesOf(SlotBytesOf(floats + std::max<int64_t>(0, words), words >= 0));
  return 2 * SegmentBytes(block_bytes) + RingBytes(block_bytes);
}

RowLog::RowLog(const std::string& path, const std::string& name, int64_t floats, int64_t words, Owner* owner)
    : process_(getpid()),
      floats_(floats),
      words_(std::max<int64_t>(0, words)),
      has_versions_(words >= 0),
      head_bytes_(SlotHeadBytes(has_versions_)),
      bytes_(SlotBytesOf(floats_ + words_, has_versions_)),
      owner_(owner) {
  block_bytes_ = BlockBytesOf(bytes_);
  per_block_ = block_bytes_ / bytes_;
  segment_bytes_ = SegmentBytes(block_bytes_);
  slots_ = segment_bytes_ / block_bytes_ * per_block_;
  words_of_bits_ = (slots_ + 63) / 64;
  open_buffer_ = std::make_unique<Buffer>(segment_bytes_);
  MakeFolders(path);
  RemoveLogsLeftOver(path);
  do {
    file_name_ = NewLogName(path, name);
    Create();
  } while (!IsOurs());
  try {
    Open();
  } catch (...) {
    unlink(file_name_.c_str());
    close(file_);
    throw;
  }
}

void RowLog::Create() {
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  is_direct_ = true;
  file_ = open(file_name_.c_str(), flags | O_DIRECT, 0600);
  if (file_ < 0 && errno == EINVAL) {  // this file system cannot; it may have made the name
    is_direct_ = false;
    unlink(file_name_.c_str());
    file_ = open(file_name_.c_str(), flags, 0600);
  }
  if (file_ < 0) throw FileError(errno, "create", file_name_);
}

// Locks the file. False, and it is closed: somebody who removes what is left over has taken it for that just before.
bool RowLog::IsOurs() {
  const int failed = flock(file_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
  struct stat status;
  // Where there are no locks, nobody else gets one either.
  if (failed != EWOULDBLOCK && fstat(file_, &status) == 0 && status.st_nlink > 0) return true;
  close(file_);
  return false;
}

void RowLog::Open() {
  is_mapped_ = IsInMemory(file_) && (!is_direct_ || GoThroughCache());
  if (!is_mapped_) clean_buffer_ = std::make_unique<Buffer>(segment_bytes_);
  if (is_direct_) ring_ = ReadRing::Make(static_cast<unsigned>(RingBytes(block_bytes_) / block_bytes_));
  if (ring_ != nullptr) {
    ring_buffer_ = std::make_unique<Buffer>(static_cast<int64_t>(ring_->depth()) * block_bytes_);
    parts_.resize(ring_->depth());
    order_.reserve(size_t{1} << 13);
  }
}

bool RowLog::GoThroughCache() {
  if (fcntl(file_, F_SETFL, fcntl(file_, F_GETFL) & ~O_DIRECT) < 0) return false;
  is_direct_ = false;
  return true;
}

RowLog::~RowLog() {
  if (map_ != nullptr) munmap(map_, static_cast<size_t>(file_bytes()));
  if (IsMine() && !stays_) RemoveLog(file_name_);  // a child that was forked has the file, too
  close(file_);
}

bool RowLog::IsMine() const { return getpid() == process_; }

int64_t RowLog::memory_bytes() const {
  return 2 * segment_bytes_ + RingBytes(block_bytes_) +
         static_cast<int64_t>(live_.capacity() * (5 * sizeof(uint32_t) + 1) + is_live_.capacity() * sizeof(uint64_t)) +
         static_cast<int64_t>(tags_.capacity() * sizeof(uint32_t));
}

void RowLog::Reserve(int64_t rows) {
  const int64_t has = static_cast<int64_t>(live_.size());
  int64_t wants = (kRoomPerRow * rows + slots_ - 1) / slots_ + (has_versions_ ? kSpareOfVersions : kSpareSegments);
  if (wants <= has) return;
  wants = std::max(wants, has + has / 16);
  if (wants * slots_ > kNoSlot) wants = kNoSlot / slots_;
  if (wants <= has) throw FileError(EFBIG, "make room for " + std::to_string(rows) + " rows", file_name_);
  live_.reserve(static_cast<size_t>(wants));
  begun_.reserve(static_cast<size_t>(wants));
  free_.reserve(static_cast<size_t>(wants));
  emptied_.reserve(static_cast<size_t>(wants));
  stuck_.reserve(static_cast<size_t>(wants));
  is_live_.reserve(static_cast<size_t>(wants * words_of_bits_));
  if (has_versions_) tags_.reserve(static_cast<size_t>(wants * slots_));
  is_out_.reserve(static_cast<size_t>(wants));
  const off_t begin = has * segment_bytes_, bytes = (wants - has) * segment_bytes_;
  int failed;
  do {
    failed = fallocate(file_, 0, begin, bytes) < 0 ? errno : 0;
  } while (failed == EINTR);
  if (failed == EOPNOTSUPP) failed = ftruncate(file_, begin + bytes) < 0 ? errno : 0;
  if (failed != 0) {
    if (ftruncate(file_, begin) < 0) failed = errno;
    throw FileError(
        failed, "make room for " + std::to_string(rows) + " rows (" + std::to_string(begin + bytes) + " bytes in all)",
        file_name_);
  }
  if (is_mapped_) {
    void* map = map_ == nullptr
                    ? mmap(nullptr, static_cast<size_t>(begin + bytes), PROT_READ, MAP_SHARED, file_, 0)
                    : mremap(map_, static_cast<size_t>(begin), static_cast<size_t>(begin + bytes), MREMAP_MAYMOVE);
    if (map == MAP_FAILED) {
      failed = errno;
      if (ftruncate(file_, begin) < 0) failed = errno;
      throw FileError(failed, "map", file_name_);
    }
    map_ = static_cast<char*>(map);
  }
  live_.resize(static_cast<size_t>(wants), 0);
  is_live_.resize(static_cast<size_t>(wants * words_of_bits_), 0);
  begun_.resize(static_cast<size_t>(wants), 0);
  is_out_.resize(static_cast<size_t>(wants), 0);
  if (has_versions_) tags_.resize(static_cast<size_t>(wants * slots_), 0);
  for (int64_t segment = wants; segment-- > has;) free_.push_back(static_cast<uint32_t>(segment));
}

void RowLog::WriteOpen(int64_t end) {
  const int64_t begin = static_cast<int64_t>(open_) * segment_bytes_;
  for (int64_t at = written_to_; at < end;) {
    const ssize_t n = pwrite(file_, open_buffer_->get() + at, static_cast<size_t>(end - at), begin + at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && is_direct_) {  // said so at open, and cannot after all
      const std::lock_guard<std::mutex> lock(ring_mutex_);
      ring_.reset();
      if (GoThroughCache()) continue;
    }
    if (n <= 0) throw FileError(n == 0 ? ENOSPC : errno, "write", file_name_);
    at += n;
  }
  written_bytes_ += end - written_to_;
  written_to_ = end;
}

void RowLog::PrepareToAppend() {
  while (open_ == UINT32_MAX || used_ == slots_) {  // what cleaning moves may fill the next one, too
    if (open_ != UINT32_MAX) WriteOpen(segment_bytes_);
    if (has_versions_) ReleaseSome(kReleasedAtOnce);
    if (free_.empty() && !emptied_.empty()) SyncWritten();
    if (free_.empty()) throw FileError(ENOSPC, "find a free segment", file_name_);  // Reserve leaves enough
    open_ = free_.back();
    free_.pop_back();
    ++begun_[open_];
    used_ = written_to_ = 0;
    // What lay in the buffer would else lie in the file twice.
    if (has_versions_) std::memset(open_buffer_->get(), 0, static_cast<size_t>(segment_bytes_));
    if (is_cleaning_) continue;
    is_cleaning_ = true;
    try {
      while (free_.size() + emptied_.size() < (has_versions_ ? kSpareOfVersions / 2 : 2) && Clean()) {
      }
    } catch (...) {
      is_cleaning_ = false;
      throw;
    }
    is_cleaning_ = false;
  }
}

bool RowLog::Clean() {
  uint32_t best = UINT32_MAX, fewest = UINT32_MAX;
  std::fill(is_out_.begin(), is_out_.end(), uint8_t{0});
  for (const uint32_t segment : free_) is_out_[segment] = 1;
  for (const uint32_t segment : emptied_) is_out_[segment] = 1;
  for (const uint32_t segment : stuck_) is_out_[segment] = live_[segment] > 0;
  for (uint32_t segment = 0; segment < live_.size(); ++segment) {
    if (is_out_[segment] != 0 || segment == open_) continue;
    if (live_[segment] == 0) {  // nothing to move
      stuck_.erase(std::remove(stuck_.begin(), stuck_.end(), segment), stuck_.end());
      free_.push_back(segment);
      return true;
    }
    if (live_[segment] < fewest) {
      fewest = live_[segment];
      best = segment;
    }
  }
  if (best == UINT32_MAX || fewest >= slots_) return false;
  const int64_t begin = static_cast<int64_t>(best) * segment_bytes_;
  if (map_ == nullptr && Pread(clean_buffer_->get(), segment_bytes_, begin) != 0) {
    stuck_.push_back(best);  // a bad place of the disk: whoever reads its rows finds out, and others go on
    return true;
  }
  __atomic_fetch_add(&read_bytes_, segment_bytes_, __ATOMIC_RELAXED);
  const char* const segment = map_ == nullptr ? clean_buffer_->get() : map_ + begin;
  for (int64_t word = 0; word < words_of_bits_; ++word) {
    const uint64_t live = is_live_[static_cast<size_t>(best * words_of_bits_ + word)];
    const auto for_each = [&](const auto& body) {
      for (uint64_t bits = live; bits != 0; bits &= bits - 1) {
        const int64_t index = word * 64 + __builtin_ctzll(bits);
        body(static_cast<uint32_t>(best * slots_ + index), segment + OffsetInSegment(index));
      }
    };
    for_each([&](uint32_t, const char* from) { owner_->Expect(RowOfSlot(from)); });
    for_each([&](uint32_t slot, const char* from) { CleanSlot(slot, from); });
  }
  // What is left has lost its row number to damage: its row says so when it is read, and the slot stays as it is.
  (live_[best] > 0 ? stuck_ : has_versions_ ? emptied_ : free_).push_back(best);
  return true;
}

void RowLog::CleanSlot(uint32_t slot, const char* from) {
  if (has_versions_ && tags_[slot] != 0) {
    if (IsNeeded(slot)) {
      tags_[AppendRaw(from)] = tags_[slot];
    } else {
      --retained_;
    }
    tags_[slot] = 0;
    return Drop(slot);
  }
  const uint32_t row = RowOfSlot(from);
  const Fate fate = owner_->FateOf(row, slot);
  if (fate == Fate::kDead) return;
  // A damaged record moves as it is: whoever reads it finds out.
  if (fate == Fate::kMoves) owner_->Moved(row, AppendRaw(from));
  Drop(slot);
}

uint32_t RowLog::NewSlot() {
  const uint32_t slot = static_cast<uint32_t>(open_ * slots_ + used_++);
  ++live_[open_];
  BitsOf(slot) |= BitOf(slot);
  return slot;
}

uint32_t RowLog::AppendRaw(const char* from) {
  PrepareToAppend();
  std::memcpy(open_buffer_->get() + OffsetInSegment(used_), from, static_cast<size_t>(bytes_));
  return NewSlot();
}

uint32_t RowLog::Append(uint32_t row, const float* record, uint64_t key, uint64_t order, const uint32_t* words) {
  PrepareToAppend();
  WriteSlot(open_buffer_->get() + OffsetInSegment(used_), has_versions_, {row, key, order}, record, floats_, words,
            words_);
  return NewSlot();
}

int RowLog::Pread(char* to, int64_t bytes, int64_t offset) const {
  for (int64_t at = 0; at < bytes;) {
    const ssize_t n = pread(file_, to + at, static_cast<size_t>(bytes - at), offset + at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return ENODATA;  // somebody has cut the file
    at += n;
  }
  return 0;
}

void RowLog::Take(const char* from, Wanted* wanted) const {
  SlotHead head;
  wanted->is_damaged = !ReadSlotHead(from, has_versions_, floats_ + words_, &head) || head.row != wanted->row;
  wanted->order = head.order;
  if (!wanted->is_damaged) std::memcpy(wanted->to, from + head_bytes_, static_cast<size_t>(floats_) * sizeof(float));
}

void RowLog::ReadOne(Wanted* wanted) const {
  wanted->error = 0;
  if (map_ == nullptr && !IsOpen(wanted->slot)) return ReadFile(wanted);
  if (!IsOpen(wanted->slot)) __atomic_fetch_add(&read_bytes_, bytes_, __ATOMIC_RELAXED);
  Take(Mapped(wanted->slot), wanted);
}

void RowLog::ReadFile(Wanted* wanted) const {
  wanted->error = 0;
  // Buffers of threads, as large as one block; large records take memory for themselves.
  static thread_local std::unique_ptr<Buffer> own;
  try {
    if (!own || own->bytes() < block_bytes_) own = std::make_unique<Buffer>(block_bytes_);
  } catch (...) {
    wanted->error = ENOMEM;
    return;
  }
  int64_t begin = OffsetOf(wanted->slot), bytes = bytes_;
  const bool is_direct = is_direct_;
  const int64_t in_block = is_direct ? begin % kLogBlock : 0;
  if (is_direct) {
    begin -= in_block;
    bytes = block_bytes_;
  }
  wanted->error = Pread(own->get(), bytes, begin);
  __atomic_fetch_add(&read_bytes_, bytes, __ATOMIC_RELAXED);
  if (wanted->error == 0) Take(own->get() + in_block, wanted);
}

// Blocks with the records of order_, one after the other.
class RowLog::BlockReader final : public ReadRing::Reader {
 public:
  BlockReader(const RowLog& log, Wanted* wanted, bool is_aside)
      : log_(log), wanted_(wanted), is_aside_(is_aside), bytes_(log.block_bytes_) {}

  bool Next(unsigned tag, ReadRing::Request* request) override {
    if (at_ == log_.order_.size()) return false;
    const int64_t block = BlockOf(at_);
    size_t end = at_ + 1;
    while (end < log_.order_.size() && BlockOf(end) == block) ++end;
    log_.parts_[tag] = {at_, end};
    at_ = end;
    *request = {BufferOf(tag), static_cast<uint32_t>(bytes_), block * bytes_};
    return true;
  }

  void Done(unsigned tag, int result) override {
    __atomic_fetch_add(&log_.read_bytes_, bytes_, __ATOMIC_RELAXED);
    for (size_t i = log_.parts_[tag].begin; i < log_.parts_[tag].end; ++i) {
      Wanted& one = wanted_[log_.order_[i]];
      if (result != static_cast<int>(bytes_)) {  // an error, or only a part: once more, alone
        log_.ReadAlone(&one, is_aside_);
        continue;
      }
      one.error = 0;
      log_.Take(BufferOf(tag) + log_.OffsetOf(one.slot) % bytes_, &one);
    }
  }

 private:
  int64_t BlockOf(size_t i) const { return log_.OffsetOf(wanted_[log_.order_[i]].slot) / bytes_; }
  char* BufferOf(unsigned tag) const { return log_.ring_buffer_->get() + static_cast<int64_t>(tag) * bytes_; }

  const RowLog& log_;
  Wanted* const wanted_;
  const bool is_aside_;
  const int64_t bytes_;
  size_t at_ = 0;
};

void RowLog::Read(const Cpu& cpu, std::vector<Wanted>* wanted) const {
  if (ring_ == nullptr) return ReadByThreads(cpu, wanted, /*is_aside=*/false);
  const std::lock_guard<std::mutex> lock(ring_mutex_);
  ReadByRing(wanted, /*is_aside=*/false);
}

void RowLog::ReadAside(const Cpu& cpu, std::vector<Wanted>* wanted) const {
  {
    const std::lock_guard<std::mutex> lock(ring_mutex_);  // who appends may give the ring up
    if (ring_ != nullptr) return ReadByRing(wanted, /*is_aside=*/true);
  }
  ReadByThreads(cpu, wanted, /*is_aside=*/true);
}

void RowLog::ReadByThreads(const Cpu& cpu, std::vector<Wanted>* all, bool is_aside) const {
  std::vector<Wanted>& wanted = *all;
  const int64_t n = static_cast<int64_t>(wanted.size());
  if (!is_aside && map_ != nullptr) return ReadMapped(cpu, wanted.data(), n);  // aside: it moves as the file grows
  cpu.executor.For(n, kLogReadCycles, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ReadAlone(&wanted[static_cast<size_t>(i)], is_aside);
  });
}

const char* RowLog::Mapped(uint32_t slot) const {
  return IsOpen(slot) ? open_buffer_->get() + OffsetInSegment(slot % slots_) : map_ + OffsetOf(slot);
}

void RowLog::ReadMapped(const Cpu& cpu, Wanted* wanted, int64_t n) const {
  constexpr int64_t kAhead = 8, kMostAhead = 512;  // records, and bytes of each
  cpu.executor.For(n, kMissCycles + bytes_, [&](int64_t begin, int64_t end) {
    int64_t in_file = 0;  // added once: a locked operation for each record would keep its loads from overlapping
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) {
        const char* from = Mapped(wanted[i + kAhead].slot);
        const char* to = reinterpret_cast<const char*>(wanted[i + kAhead].to);
        for (int64_t at = 0; at < std::min(bytes_, kMostAhead); at += 64) {
          __builtin_prefetch(from + at);
          __builtin_prefetch(to + at, 1);
        }
      }
      in_file += IsOpen(wanted[i].slot) ? 0 : 1;
      wanted[i].error = 0;
      Take(Mapped(wanted[i].slot), &wanted[i]);
    }
    __atomic_fetch_add(&read_bytes_, in_file * bytes_, __ATOMIC_RELAXED);
  });
}

void RowLog::ReadByRing(std::vector<Wanted>* all, bool is_aside) const {
  std::vector<Wanted>& wanted = *all;
  const int64_t n = static_cast<int64_t>(wanted.size());
  // By slot, so that one read serves all records of a block.
  std::vector<uint32_t>& order = order_;
  order.clear();
  for (int64_t i = 0; i < n; ++i) {
    if (!is_aside && IsOpen(wanted[static_cast<size_t>(i)].slot)) {
      ReadOne(&wanted[static_cast<size_t>(i)]);
    } else {
      order.push_back(static_cast<uint32_t>(i));
    }
  }
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return wanted[a].slot < wanted[b].slot; });
  constexpr int kPending = -1;
  for (const uint32_t i : order) wanted[i].error = kPending;
  BlockReader reader(*this, wanted.data(), is_aside);
  if (ring_->Run(file_, &reader)) return;
  for (const uint32_t i : order)  // the system has refused: one by one
    if (wanted[i].error == kPending) ReadAlone(&wanted[i], is_aside);
}

}  // namespace sok
