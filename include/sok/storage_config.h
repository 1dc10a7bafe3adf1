// Where the bytes of a table's rows lie.
#pragma once

#include <cstdint>
#include <string>

namespace sok {

struct StorageConfig {
  int64_t memory_bytes = 0;  // what keys, places of rows, and rows may take of the memory; 0: all rows are in memory
  std::string path;          // the folder of the file with the other rows
  // Of a table on a device: all rows are in the memory of its host or in that file, and those in use on the device as well, in so many
  // bytes. 0: rows lie on the device alone, unless the table has policies.
  int64_t device_bytes = 0;

  bool has_file() const { return memory_bytes != 0; }
  bool operator==(const StorageConfig& other) const {
    return memory_bytes == other.memory_bytes && path == other.path && device_bytes == other.device_bytes;
  }
};

// What a table with a file has done since it was made.
struct StorageCounts {
  int64_t rows_in_memory = 0;
  int64_t most_rows_in_memory = 0;  // that there could be, with what keys and places take now
  int64_t hits = 0;                 // distinct rows of calls that were in memory
  int64_t misses = 0;               // rows that had to be read from the file, also for saves and exports
  int64_t read_ahead = 0;           // rows that were read before a call needed them
  int64_t read_bytes = 0, written_bytes = 0;
  int64_t file_bytes = 0;
  int64_t memory_bytes = 0;
  // Of one whose rows in use lie on a device: how many do, and how many can with the slots that they have; those of calls that did, and
  // those that had to be brought; bytes that the device has for them.
  int64_t rows_on_device = 0, most_rows_on_device = 0, device_hits = 0, device_misses = 0, device_bytes = 0;
};

}  // namespace sok
