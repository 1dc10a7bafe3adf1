// Records of rows in a file, as a log: segments that are filled one after the other. A record that has changed is appended again,
// and its old slot is dead; a segment with few live slots is emptied when another one is needed. Nothing is ever written in place,
// so small records cost no more writing than large ones.
//
// A slot has the record's CRC32C, its row number and its floats. Slots do not cross blocks of 4 KiB, unless they are larger. The
// file goes past the system's page cache where its file system can do that. It is scratch: it has no meaning for another process,
// its name goes with the log, and those of processes that are gone are removed by the next log in their folder.
//
// Thread safety: Read may be called from many threads as long as nobody appends, drops or reserves.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sok/device.h"

namespace sok {

class ReadRing;

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
  };

  // A file in the folder `path`, made if it is missing. name: of the file, with what makes it unique behind it. Throws FileError.
  RowLog(const std::string& path, const std::string& name, int64_t floats, Owner* owner);
  ~RowLog();
  RowLog(const RowLog&) = delete;
  RowLog& operator=(const RowLog&) = delete;

  // Room in the file for so many rows, however often they change. Throws FileError, then nothing changed.
  void Reserve(int64_t rows);

  // Appends a record [floats]; gives its slot. Throws FileError, then it was not appended.
  uint32_t Append(uint32_t row, const float* record);
  void Drop(uint32_t slot) { --live_[slot / slots_]; }

  struct Wanted {
    uint32_t row, slot;
    float* to;        // [floats]
    bool is_damaged;  // what was read is not what was written
    int error;        // of the system, or 0
  };
  // Reads records, many at a time; what went wrong is said with each. Of several threads one has its reads in flight.
  void Read(const Cpu& cpu, std::vector<Wanted>* wanted) const;
  void ReadOne(Wanted* wanted) const;

  // Not in a process that was forked since: both would write into one file.
  bool IsMine() const;
  const std::string& file() const { return file_name_; }
  int64_t file_bytes() const { return static_cast<int64_t>(live_.size()) * segment_bytes_; }
  int64_t memory_bytes() const;
  int64_t read_bytes() const { return __atomic_load_n(&read_bytes_, __ATOMIC_RELAXED); }
  int64_t written_bytes() const { return written_bytes_; }

  // What a log takes of the memory, whatever it holds.
  static int64_t BufferBytes(int64_t floats);

 private:
  void Open(int64_t floats);
  bool GoThroughCache();  // whether it could be done
  class Buffer;
  class BlockReader;

  int64_t OffsetInSegment(int64_t index) const {
    return index / per_block_ * block_bytes_ + index % per_block_ * bytes_;
  }
  int64_t OffsetOf(uint32_t slot) const {
    return static_cast<int64_t>(slot / slots_) * segment_bytes_ + OffsetInSegment(slot % slots_);
  }
  bool IsOpen(uint32_t slot) const { return slot / slots_ == open_; }
  // Copies a record out of what was read.
  void Take(const char* from, Wanted* wanted) const;
  void PrepareToAppend();
  void WriteOpen();
  // Empties the segment with the fewest live slots; false: there is none that is worth it.
  bool Clean();
  uint32_t AppendRaw(const char* slot);
  int Pread(char* to, int64_t bytes, int64_t offset) const;  // 0, or the error

  const pid_t process_;
  const int64_t floats_;
  const int64_t bytes_;  // of a slot
  int64_t per_block_, block_bytes_, slots_, segment_bytes_;
  Owner* const owner_;
  std::string file_name_;
  int file_ = -1;
  bool is_direct_ = false;  // past the page cache
  bool is_mapped_ = false;  // files in memory, or in persistent memory, are read where they lie
  char* map_ = nullptr;
  std::vector<uint32_t> live_;   // of each segment, how many slots
  std::vector<uint32_t> free_;   // segments; the open one is not among them
  std::vector<uint8_t> is_out_;  // which Clean does not look at
  std::vector<uint32_t> stuck_;  // segments with damage that keeps them from being emptied
  uint32_t open_ = UINT32_MAX;
  int64_t used_ = 0;  // slots of the open segment
  bool is_cleaning_ = false;
  std::unique_ptr<Buffer> open_buffer_, clean_buffer_;
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
