// Records of rows in a file, as a log: segments that are filled one after the other. A record that has changed is appended again,
// and its old slot is dead; a segment with few live slots is emptied when another one is needed. Nothing is ever written in place,
// so small records cost no more writing than large ones.
//
// A slot has the record's CRC32C, its row number and its floats. Slots do not cross blocks of 4 KiB, unless they are larger. The
// file goes past the system's page cache where its file system can do that. It is scratch: it has no meaning for another process,
// its name goes with the log, and those of processes that are gone are removed by the next log in their folder.
//
// With versions it is more than that (docs/design/versions.md): a slot also has the record's key and its order, so that whoever knows
// which rows there were at a mark can find them again (VersionScan). A slot that a version needs is not overwritten before its
// record is on the disk elsewhere.
//
// Thread safety: Read may be called from many threads as long as nobody appends, drops or reserves; ReadAside whatever others do.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sok/device.h"

namespace sok {

class ReadRing;

// How records lie in a log's file.
struct RowLogShape {
  int64_t floats = 0, block_bytes = 0, segment_bytes = 0;
};

class RowLog {
 public:
  static constexpr uint32_t kNoSlot = 0xFFFFFFFFu;  // slots are below

  // What has become of a record that has to leave its segment, and of one that has moved.
  enum class Fate { kDead, kForgotten, kMoves };
  struct Owner {
    virtual ~Owner() = default;
    // kForgotten: whoever has the row elsewhere gives the slot up.
    virtual Fate FateOf(uint32_t row, uint32_t slot) = 0;
    virtual void Moved(uint32_t row, uint32_t to) = 0;
    // FateOf is about to be asked: a hint, so that memory is waited for once for many rows. Of a damaged slot it is any number.
    virtual void Expect(uint32_t row) const = 0;
  };

  // A file in the folder `path`, made if it is missing. name: of the file, with what makes it unique behind it. Throws FileError.
  // words: beside each record, of the table that has versions; negative: it has none.
  RowLog(const std::string& path, const std::string& name, int64_t floats, int64_t words, Owner* owner);
  ~RowLog();
  RowLog(const RowLog&) = delete;
  RowLog& operator=(const RowLog&) = delete;

  // Room in the file for so many rows, however often they change. Throws FileError, then nothing changed.
  void Reserve(int64_t rows);

  // Appends a record [floats]; gives its slot. key, order, words: with versions. Throws FileError, then it was not appended.
  uint32_t Append(uint32_t row, const float* record, uint64_t key = 0, uint64_t order = 0,
                  const uint32_t* words = nullptr);
  void Drop(uint32_t slot) {
    --live_[slot / slots_];
    BitsOf(slot) &= ~BitOf(slot);
  }

  // With versions. The slot's row has it no more, but the versions up to `version` may need it: it stays until Release(version + 1)
  // or later. Reserve has to have made room for it.
  void Retain(uint32_t slot, uint32_t version) {
    tags_[slot] = version;
    ++retained_;
  }
  int64_t retained() const { return retained_; }
  // Versions below `oldest` need nothing any more.
  void Release(uint32_t oldest) {
    oldest_ = oldest;
    released_to_ = 0;  // segment by segment, as others are written
  }
  void ReleaseNow() { ReleaseSome(static_cast<int64_t>(live_.size())); }
  // Writes what has been appended so far. A descriptor of the file, for the caller to sync and to close; or throws FileError.
  int Flush();
  // Removes logs of processes that are gone, but for those that a shard still names.
  static void RemoveLeftOver(const std::string& path);
  // Whether a shard that names a log has been removed: not if its storage may be away for a while.
  static bool IsShardGone(const std::string& shard);
  // The file stays when the log goes.
  void Leave() { stays_ = true; }
  // Where its records are, for VersionScan.
  RowLogShape shape() const;

  struct Wanted {
    uint32_t row, slot;
    float* to;           // [floats]
    bool is_damaged;     // what was read is not what was written
    int error;           // of the system, or 0
    uint64_t order = 0;  // with versions
    uint32_t begun = 0;  // for ReadAside: TimesBegun, when the slot was looked for
  };
  // Reads records, many at a time; what went wrong is said with each. Of several threads one has its reads in flight.
  void Read(const Cpu& cpu, std::vector<Wanted>* wanted) const;
  void ReadOne(Wanted* wanted) const;

  // Reads while others use the log. The slots are in the file, which IsInFile tells as long as nobody appends. What was read is what a
  // slot holds if its segment has not begun anew since: if then, with nobody appending, TimesBegun is what it was.
  void ReadAside(const Cpu& cpu, std::vector<Wanted>* wanted) const;
  bool IsInFile(uint32_t slot) const { return !IsOpen(slot); }
  uint32_t TimesBegun(uint32_t slot) const { return begun_[slot / slots_]; }

  // Not in a process that was forked since: both would write into one file.
  bool IsMine() const;
  const std::string& file() const { return file_name_; }
  int64_t file_bytes() const { return static_cast<int64_t>(live_.size()) * segment_bytes_; }
  int64_t memory_bytes() const;
  int64_t read_bytes() const { return __atomic_load_n(&read_bytes_, __ATOMIC_RELAXED); }
  int64_t written_bytes() const { return written_bytes_; }

  // What a log takes of the memory, whatever it holds.
  static int64_t BufferBytes(int64_t floats, int64_t words);

 private:
  void Create();
  bool IsOurs();
  void Open();
  bool GoThroughCache();  // whether it could be done
  class Buffer;
  class BlockReader;

  uint64_t& BitsOf(uint32_t slot) {
    return is_live_[static_cast<size_t>(slot / slots_ * words_of_bits_ + slot % slots_ / 64)];
  }
  uint64_t BitOf(uint32_t slot) const { return uint64_t{1} << slot % slots_ % 64; }
  int64_t OffsetInSegment(int64_t index) const {
    return index / per_block_ * block_bytes_ + index % per_block_ * bytes_;
  }
  int64_t OffsetOf(uint32_t slot) const {
    return static_cast<int64_t>(slot / slots_) * segment_bytes_ + OffsetInSegment(slot % slots_);
  }
  bool IsNeeded(uint32_t slot) const { return has_versions_ && tags_[slot] != 0 && tags_[slot] >= oldest_; }
  void ReleaseSome(int64_t segments);
  void SyncWritten();
  bool IsOpen(uint32_t slot) const { return slot / slots_ == open_; }
  void ReadByRing(std::vector<Wanted>* wanted, bool is_aside) const;
  // Where a slot of a log that is mapped can be read.
  const char* Mapped(uint32_t slot) const;
  void ReadMapped(const Cpu& cpu, Wanted* wanted, int64_t n) const;
  void ReadByThreads(const Cpu& cpu, std::vector<Wanted>* wanted, bool is_aside) const;
  void ReadFile(Wanted* wanted) const;  // by a call of the system
  void ReadAlone(Wanted* wanted, bool is_aside) const { is_aside ? ReadFile(wanted) : ReadOne(wanted); }
  // Copies a record out of what was read.
  void Take(const char* from, Wanted* wanted) const;
  void PrepareToAppend();
  void WriteOpen(int64_t end);  // of the open segment, up to there
  // Empties the segment with the fewest live slots; false: there is none that is worth it.
  bool Clean();
  void CleanSlot(uint32_t slot, const char* from);
  uint32_t AppendRaw(const char* from);
  uint32_t NewSlot();                                        // of the open segment, which has one
  int Pread(char* to, int64_t bytes, int64_t offset) const;  // 0, or the error

  const pid_t process_;
  const int64_t floats_, words_;
  const bool has_versions_;
  const int64_t head_bytes_, bytes_;  // of a slot: in front of the record, and in all
  int64_t per_block_, block_bytes_, slots_, segment_bytes_, words_of_bits_;
  Owner* const owner_;
  std::string file_name_;
  int file_ = -1;
  std::atomic<bool> is_direct_{false};  // past the page cache
  bool is_mapped_ = false;              // files in memory, or in persistent memory, are read where they lie
  char* map_ = nullptr;
  std::vector<uint32_t> live_;     // of each segment, how many slots
  std::vector<uint64_t> is_live_;  // and which: [segments, words_of_bits_]
  std::vector<uint32_t> begun_;    // and how often it was the open one
  std::vector<uint32_t> free_;     // segments; the open one is not among them
  std::vector<uint32_t> emptied_;  // with versions: free once what was moved out of them is on the disk
  std::vector<uint32_t> tags_;     // with versions, of each slot: the last one that needs it; 0: none
  int64_t retained_ = 0;           // slots with tags
  uint32_t oldest_ = 1;            // version that may need something
  int64_t released_to_ = 0;        // segments whose older tags are gone
  std::vector<uint8_t> is_out_;    // which Clean does not look at
  std::vector<uint32_t> stuck_;    // segments with damage that keeps them from being emptied
  uint32_t open_ = UINT32_MAX;
  int64_t used_ = 0;        // slots of the open segment
  int64_t written_to_ = 0;  // bytes of it
  bool stays_ = false;
  bool is_cleaning_ = false;
  std::unique_ptr<Buffer> open_buffer_;
  std::unique_ptr<Buffer> clean_buffer_;  // of a log that is not mapped
  std::unique_ptr<Buffer> ring_buffer_;
  std::unique_ptr<ReadRing> ring_;
  mutable std::mutex ring_mutex_;  // of it, its buffer, and the two below
  struct Part {
    size_t begin, end;  // of order_
  };
  mutable std::vector<uint32_t> order_;
  mutable std::vector<Part> parts_;
  mutable int64_t read_bytes_ = 0;
  int64_t written_bytes_ = 0;
};

}  // namespace sok
