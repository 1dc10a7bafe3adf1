// What has changed in a device table since it was last saved: one byte a row on the device, and, on the host, the keys that
// were erased.
//
// A byte is the number of the last save before the row was written, so that a save begins and ends, well or not, by numbers on
// the host alone: no kernel has to clear or merge anything. After 254 saves numbers begin anew.
//
// Who calls has the table for writing; of const members reading is enough. The stream is that of the calls on the table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "growing_array.h"
#include "sok/device.h"
#include "sok/device_memory.h"
#include "sok/device_rows.h"
#include "sok/row_changes.h"
#include "sok/scratch.h"

namespace sok {

class DeviceRowChanges {
 public:
  explicit DeviceRowChanges(DeviceMemory* memory) : memory_(memory), marks_(memory) {}

  // Nothing is noted, and nothing is paid for, before the first Begin.
  bool is_on() const { return keys_.is_on(); }
  int64_t capacity() const { return marks_.capacity(); }
  bool is_saving() const { return keys_.is_saving(); }
  const std::string& base() const { return keys_.base(); }

  // What kernels that are put on a stream now note with.
  RowNotes notes() const { return {marks_.data(), mark_}; }

  // Rows below num_rows can be noted. May wait for the stream. Throws OutOfMemory, then nothing changed.
  void MakeRoom(const Cuda& cuda, int64_t num_rows);

  // Keys that had a row: those with erased[i] other than kNoRow. Waits for the stream, if anything is noted at all.
  void NoteErased(const Cuda& cuda, const uint64_t* keys, const uint32_t* erased, int64_t n);

  // As those of RowChanges. Begin throws OutOfMemory, then nothing changed.
  void Begin(const Cuda& cuda, int64_t num_rows);
  void End(const Cuda& cuda, const std::string& base);
  void TurnOff();  // nothing on any stream may note rows any more

  // The rows that belong to the save under way: all that have changed since the one before. Some may have changed since
  // Begin: they belong to the next one, too.
  RowFilter saved() const { return {marks_.data(), base_mark_}; }
  // Keys that were erased since the save before; some may have a row again.
  std::vector<uint64_t> Erased() const;

  // What belongs to the next save: rows, and keys at most. The former waits for the stream.
  int64_t CountToHost(const Cuda& cuda, DeviceScratch* scratch) const;
  int64_t num_erased() const { return keys_.num_erased(); }

  // How many of the rows first .. first + count - 1 the filter has; rows without room for a mark have not changed.
  int64_t CountToHost(const Cuda& cuda, DeviceScratch* scratch, const RowFilter& filter, int64_t first,
                      int64_t count) const;

 private:
  DeviceMemory* const memory_;
  GrowingArray<uint8_t> marks_;
  uint8_t base_mark_ = 0;    // of rows that the last complete save has
  uint8_t saving_mark_ = 0;  // of rows that were last written before the save under way
  uint8_t mark_ = 1;
  RowChanges keys_;
};

}  // namespace sok
