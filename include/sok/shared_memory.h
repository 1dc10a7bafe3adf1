// Bytes for other processes of this host, without a socket in between.
//
// A sender takes a region, writes into it, and tells its readers by other means where it lies. Each of them copies what
// is for it and says so in the region; when all have, the sender may use it again. Regions have no names and need no
// file system: readers open them through /proc, and the kernel takes them back when the last process that has them ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sok {

// Where a region lies: what travels to the readers.
struct SharedRegion {
  int64_t pid = 0;
  int64_t fd = 0;
  int64_t id = 0;  // never used twice by a process; not 0
};

// The sender's side. Safe from several threads.
class SharedPool {
 public:
  SharedPool();
  ~SharedPool();
  SharedPool(const SharedPool&) = delete;
  SharedPool& operator=(const SharedPool&) = delete;

  struct Lease {
    SharedRegion region;
    char* data = nullptr;  // [bytes], 64-byte aligned; write it before the readers are told
  };

  // Memory that `readers` processes will read, each once, for the next collective of this name. Throws OutOfMemory.
  //
  // A reader whose step failed never reads. So what is still unread of the collective of this name before the last is
  // given up: readers took part in the last one, and for that were done with the one before it.
  Lease Take(const std::string& collective, int64_t bytes, int readers);

  // Memory to be written and then sent as it is, 64-byte aligned: its region is not used again before the last owner has let
  // it go and all readers have read. Throws OutOfMemory.
  std::shared_ptr<char> Allocate(int64_t bytes);

  // Lends `readers` processes what begins at `data`, each to read once, in the next collective of this name; false if
  // no memory of Allocate begins there. It has been written, and has an owner at least until the collective has ended.
  bool Lend(const std::string& collective, const char* data, int readers, Lease* lease);

  // Regions that exist, and their bytes.
  int64_t num_regions() const;
  int64_t bytes() const;

 private:
  struct Region;

  std::shared_ptr<Region> Find(int64_t bytes);
  void GiveUp(const std::string& collective);

  mutable std::mutex mutex_;
  std::list<std::shared_ptr<Region>> regions_;  // oldest use first
  int64_t most_in_use_ = 0;                     // bytes
};

// The readers' side. Safe from several threads.
class SharedReader {
 public:
  // Copies `bytes` bytes from `offset` on, and counts as this reader's reading of the region.
  // Throws FailedPrecondition if the region cannot be opened, or does not hold that.
  void Read(const SharedRegion& region, int64_t offset, int64_t bytes, char* to);

 private:
  struct Mapping;
  std::shared_ptr<Mapping> Open(const SharedRegion& region);

  std::mutex mutex_;
  std::vector<std::shared_ptr<Mapping>> mappings_;
};

}  // namespace sok
