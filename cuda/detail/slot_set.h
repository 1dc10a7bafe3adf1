// One optimizer's share of every record of a device table, and what it remembers beside the records.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sok/device_update.h"
#include "table_state.h"

namespace sok {

struct DeviceTable::State::SlotSet {
  explicit SlotSet(DeviceMemory* memory) : stamps(memory) {}

  // The set has come from another table, whose memory was swapped with this one's.
  void MoveTo(DeviceMemory* memory) {
    stamps.MoveTo(memory);
    if (decay != nullptr) decay->MoveTo(memory);
  }

  std::string name;
  UpdateRule rule;  // of the last call
  int64_t offset = 0;
  std::unique_ptr<DeviceDecay> decay;  // null: the rule does not decay
  GrowingWords stamps;                 // of each row, the call up to which it is current
  int64_t calls_at_base = 0;           // of the save that changes are counted from
  int64_t calls_read = 0;              // of the save under way: as of when its rows were read
  std::string skipped_save;            // the save whose calls SkipCalls has added last
  std::vector<AlphaRun> skipped;       // those
};

}  // namespace sok
