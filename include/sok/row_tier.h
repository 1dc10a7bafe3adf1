// Rows of which only some are in memory: the others lie in a RowLog. Whoever needs rows brings them in; they then lie in frames,
// and where a row's record is said by its place, as if it were a slab of one row (RowStore).
//
// Which row makes room for another depends on what was brought in, in which order, and on nothing else: a hand goes around the frames,
// takes one degree of heat from each row, and the frame of a row that has none. A row comes in with none, and gains kHeatOfUse (up to
// kMaxHeat) whenever it is read and already there; that a step also writes to it is no second use.
//
// Thread safety: Peek and PeekAll may be called from many threads at the same time; anything else needs the tier to itself.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sok/device.h"
#include "sok/row_log.h"
#include "sok/storage_config.h"
#include "sok/version_order.h"

namespace sok {

// What a table knows of its rows beside the records. A tier that can ask has versions.
struct RowFacts {
  std::function<uint64_t(uint32_t row)> key;
  int64_t num_words = 0;
  std::function<void(uint32_t row, uint32_t* words)> words;
};

// What rows are brought into memory for.
enum class RowUse { kRead, kWrite, kReadAndWrite };

class RowTier final : private RowLog::Owner {
 public:
  static constexpr int kSlabShift = 12;           // Touch makes 4,096 rows at a time
  static constexpr uint16_t kRoundsOfABatch = 4;  // of the hand, that rows read ahead stay for each batch in flight
  static constexpr int64_t kMaxRows = int64_t{1} << 31;  // the file has two slots for each, and 2^32 at most

  using Facts = RowFacts;

  // label: of the table, for messages. Throws InvalidArgument for a budget that is too small, FileError, OutOfMemory.
  RowTier(const StorageConfig& config, std::string label, const std::string& file_name, int64_t floats,
          int64_t max_rows, Facts facts = {});
  ~RowTier() override;
  RowTier(const RowTier&) = delete;
  RowTier& operator=(const RowTier&) = delete;

  // What keys, and other things of the table, take of the budget.
  void SetBeside(int64_t bytes) { beside_ = bytes; }

  // Places of rows: null: Touch has not been there. Only that of a row that was brought in is one of a record.
  float** places() const { return places_; }

  // Throws OutOfMemory if the budget has no room for what there is.
  void CheckRoom() const;

  // Makes the row and its neighbours, as rows that have never been written. Throws FileError if the file has no room for them,
  // OutOfMemory if the budget has none; then nothing changed.
  void Touch(int64_t row);

  // Brings the first rows of `rows` into memory, as many as there is room for; gives how many that is: all, or most_rows_here()
  // distinct ones. They stay until the next call. Rows that have never been written read as zeros. kNoRow is passed over.
  // Throws Unreadable or FileError, then no row has changed.
  int64_t Bring(const Cpu& cpu, const uint32_t* rows, int64_t n, RowUse use);

  // A row that cannot be had: `error` of the system, or 0 for one that is not what was written.
  struct Unreadable : std::runtime_error {
    Unreadable(int64_t of, int system_error, const std::string& path)
        : std::runtime_error(path + ": a row cannot be read"), row(of), error(system_error), file(path) {}
    int64_t row;
    int error;
    std::string file;
  };
  // What went wrong first where rows were peeked at, perhaps on several threads.
  class Failure {
   public:
    void Note(int64_t row, int error) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (row_ < 0) row_ = row, error_ = error;
    }
    bool is_noted() const { return row_ >= 0; }
    bool is_damage() const { return row_ >= 0 && error_ == 0; }  // of a row that was read: it is not what was written
    int error() const { return error_; }                         // of the system, or 0
    void Throw(const RowTier& tier) {                            // Unreadable, once
      const std::lock_guard<std::mutex> lock(mutex_);
      if (row_ < 0) return;
      const int64_t row = row_;
      row_ = -1;
      throw Unreadable(row, error_, tier.log_->file());
    }

   private:
    std::mutex mutex_;
    int64_t row_ = -1;
    int error_ = 0;
  };

  // Reading ahead of a call, in three steps, so that nobody waits for the disk with the tier locked. The first one may be beside Peek
  // and Read, the second beside anything, and the third needs the tier to itself.
  struct Ahead {
    std::shared_ptr<const RowLog> log;  // lives on where the tier goes meanwhile
    std::vector<RowLog::Wanted> wanted, copied;
    std::vector<float> records;
  };
  // Which of these distinct rows lie in the file alone, and where.
  void WhatToRead(const uint32_t* rows, int64_t n, Ahead* ahead) const;
  static void ReadAside(const Cpu& cpu, Ahead* ahead);
  // Brings those in whose place is what it was; gives how many. What could not be read is left to whoever needs it. They stay until they
  // are written to, or `rounds` of the hand. Throws FileError, then no row has changed.
  int64_t TakeIn(Ahead* ahead, int rounds);
  // Has a row that is in memory stay like them.
  void Keep(int64_t row, int rounds);
  bool IsInFile(int64_t row) const { return (Word(row) & kInFile) != 0; }
  uint32_t SlotOf(int64_t row) const { return static_cast<uint32_t>(Word(row) >> kSlotShift); }  // of one that is

  // How many distinct rows Bring has room for.
  int64_t most_rows_here() const { return MostFrames() < LeastFrames() ? LeastFrames() : MostFrames(); }

  bool IsHere(int64_t row) const { return (Word(row) & kTags) == 0; }
  // A record, from wherever it is; not to be written to. Valid until this thread's next call for a row that is not here. Of a row
  // that cannot be had zeros, and a note in `failure`.
  const float* Peek(int64_t row, Failure* failure) const;
  // Peek for many rows at once, whose reads are under way together: records [n], those that are not in memory in `aside`. Throws
  // Unreadable.
  void PeekAll(const Cpu& cpu, const uint32_t* rows, int64_t n, std::vector<float>* aside, const float** records) const;

  // The row has no record any more. With versions it has been secured.
  void Forget(int64_t row);

  // The same rows with wider records, and with versions if there are `facts`. Throws Unreadable, FileError or OutOfMemory, then no
  // row has changed.
  std::unique_ptr<RowTier> Widened(const std::vector<float>& fresh, Facts facts);

  // Versions: docs/design/versions.md. One at a time is being written.
  bool has_versions() const { return static_cast<bool>(facts_.key); }
  const Facts& facts() const { return facts_; }
  void SetFacts(Facts facts) { facts_ = std::move(facts); }  // with as many words
  // What all rows hold at this moment is a version; gives its number. Throws FailedPrecondition.
  uint32_t BeginVersion();
  // Writes what it needs of the next frames; false: nothing is left. Throws FileError, also if the version has been given up since.
  bool WriteSome(uint32_t version, int64_t frames);
  // All of it has been written: a descriptor of the file, for the caller to sync and to close. Throws FileError.
  int Flush() { return log_->Flush(); }
  // The shard that names it is in place; empty: there will be none. As long as the shard exists, so does the version.
  void EndVersion(uint32_t version, const std::string& shard);
  uint64_t version_digest() const { return digest_; }  // of the one that is written
  // Before rows are forgotten. Throws FileError, then nothing changed.
  void Secure(const uint32_t* rows, int64_t n);
  const RowLog& log() const { return *log_; }

  int64_t floats() const { return floats_; }
  int64_t memory_bytes() const;
  StorageCounts counts() const;

 private:
  struct Frame {  // in front of each record
    uint32_t row;
    uint32_t slot;  // in the file, with the same contents; or kNoSlot
    uint32_t wave;  // the last call of Bring that wanted it
    int16_t heat;
    uint16_t soon;  // rounds of the hand that it stays for, as a step is about to need it
  };
  // With versions there is in front of it when its contents were written (OrderOf); if they have not been, their version alone.
  static constexpr int64_t kOrderBytes = 16;  // so that records begin at multiples of 16
  static constexpr uintptr_t kInFile = 1, kUnwritten = 2, kWanted = 4, kTags = 7;
  static constexpr int kSlotShift = 3;
  static constexpr int16_t kHeatOfUse = 2, kMaxHeat = 15;
  static constexpr uint32_t kNoRow = 0xFFFFFFFFu;

  uintptr_t Word(int64_t row) const { return reinterpret_cast<uintptr_t>(places_[row]); }
  void SetWord(int64_t row, uintptr_t word) { places_[row] = reinterpret_cast<float*>(word); }
  static Frame* FrameOf(float* record) { return reinterpret_cast<Frame*>(record) - 1; }
  static uint64_t& Order(Frame* frame) {
    return *reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(frame) - kOrderBytes);
  }
  int64_t Words() const { return has_versions() ? facts_.num_words : -1; }
  int64_t FrameBytes(int64_t floats) const {
    return (has_versions() ? kOrderBytes : 0) + static_cast<int64_t>(sizeof(Frame)) +
           (floats * static_cast<int64_t>(sizeof(float)) + 15) / 16 * 16;
  }
  Frame* FrameAt(int64_t number) const { return reinterpret_cast<Frame*>(first_frame_ + number * frame_bytes_); }
  static float* RecordOf(Frame* frame) { return reinterpret_cast<float*>(frame + 1); }
  int64_t NumberOf(const Frame* frame) const {
    return (reinterpret_cast<const char*>(frame) - first_frame_) / frame_bytes_;
  }

  int64_t PlacesBytes() const { return (slabs_ << kSlabShift) * static_cast<int64_t>(sizeof(float*)); }
  int64_t MostFrames() const;  // that the budget has room for now
  int64_t LeastFrames() const { return least_frames_ < max_rows_ ? least_frames_ : max_rows_; }
  int64_t Needs(int64_t floats) const;  // of the budget, with records of so many
  void Fit();                           // gives up frames above MostFrames
  void BeginWave();
  int64_t OwnBytes() const;  // of buffers
  void BringWishes(const Cpu& cpu, size_t begin, size_t end, bool writes);
  void CountMisses(int64_t n) const { __atomic_fetch_add(&misses_, n, __ATOMIC_RELAXED); }
  // Makes frames free until there are `n`. All rows of the present wave and these together find room.
  void MakeRoom(int64_t n);
  void ExpectLeave() const;  // has the cache get what the hand will soon be at
  void Leave(Frame* frame);  // its row goes to the file
  Frame* TakeFrame(uint32_t row, uint32_t slot);
  void FreeFrame(Frame* frame);
  void BecomesDirty(Frame* frame);
  void Write(Frame* frame);  // into the log, where it is not
  // With versions.
  void Supersede(Frame* frame);  // BecomesDirty
  void LosesSlot(uint32_t row, uint32_t slot, uint64_t order);
  void ForgetInFile(uint32_t row, uint32_t slot);
  void ReserveVersions(int64_t n);  // room for what n rows leave behind
  void GiveUp();
  void ReleaseOld();
  uint32_t NewestNeeding() const { return pending_ != 0 ? pending_ : kept_.empty() ? 0 : kept_.back().number; }

  RowLog::Fate FateOf(uint32_t row, uint32_t slot) override;
  void Moved(uint32_t row, uint32_t to) override;
  void Expect(uint32_t row) const override {
    if (row < max_rows_) __builtin_prefetch(places_ + row);
  }

  const StorageConfig config_;
  const std::string label_, name_;
  const int64_t floats_, max_rows_, least_frames_;
  int64_t frame_bytes_;
  int64_t all_frames_;  // address space
  int64_t beside_ = 0;
  float** places_ = nullptr;  // [max_rows]
  int64_t slabs_ = 0;         // that were touched
  char* frames_ = nullptr;
  char* first_frame_ = nullptr;  // behind its order
  int64_t made_ = 0, hand_ = 0;  // frames that have memory
  std::vector<uint32_t> free_;   // of these, without a row
  uint32_t wave_ = 0;
  std::shared_ptr<RowLog> log_;
  std::vector<uint32_t> wishes_;
  std::vector<RowLog::Wanted> reads_;
  int64_t hits_ = 0, read_ahead_ = 0;
  mutable int64_t misses_ = 0;
  int64_t read_before_ = 0, written_before_ = 0;  // by narrower tiers
  Facts facts_;
  std::vector<uint32_t> words_;  // of one row
  struct Kept {
    uint32_t number;
    std::string shard;
  };
  std::vector<Kept> kept_;  // versions whose shards were there when they were last looked for
  uint32_t now_ = 1;        // version of what changes
  uint32_t pending_ = 0;    // that is being written; 0: none
  int64_t written_to_ = 0;  // frames, for it
  int64_t appends_ = 0;
  std::vector<float> forgotten_;  // a record that is read for its order alone
  std::vector<std::pair<uint32_t, uint64_t>>
      secured_;  // rows in the file that are about to be forgotten, and their orders
  bool is_digest_lost_ = false;
  uint64_t current_digest_ = 0;  // of the records of rows that are in the log
  uint64_t digest_ = 0;          // of the pending version, as far as it is written
};

}  // namespace sok
