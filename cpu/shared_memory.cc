#include "sok/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "sok/error.h"
#include "sok/pages.h"

namespace sok {
namespace {

constexpr int64_t kHeaderBytes = 4096;  // one page, so that the data begin on one
constexpr int64_t kMinBytes = int64_t{1} << 20;

// What every region has, and hardly any other file that somebody names.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The first page of a region.
struct Header {
  std::atomic<int64_t> id;      // 0: the sender has given the region up
  std::atomic<int32_t> unread;  // readers that are still to come
};

std::atomic<int64_t> last_id{0};

}  // namespace

struct SharedPool::Region {
  int fd = -1;
  int64_t id = 0;
  int64_t bytes = 0;  // of data
  Header* header = nullptr;
  std::string collective;  // of the last lease
  int later_calls = 0;     // of that collective, while the lease was not read
  std::atomic<bool> has_owner{false};

  explicit Region(int64_t data_bytes) : id(++last_id), bytes(data_bytes) {
    const int64_t total = bytes + kHeaderBytes;
    fd = static_cast<int>(syscall(SYS_memfd_create, "sok", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    void* at = MAP_FAILED;
    // Sealed: a reader need not fear that the file shrinks under its mapping.
    if (fd >= 0 && ftruncate(fd, total) == 0 && fcntl(fd, F_ADD_SEALS, kSeals) == 0) {
      at = mmap(nullptr, static_cast<size_t>(total), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (at == MAP_FAILED) {
      const std::string why = std::strerror(errno);
      if (fd >= 0) close(fd);
      throw OutOfMemory("no shared memory of " + std::to_string(total) + " bytes: " + why);
    }
    header = static_cast<Header*>(at);
    header->id.store(id, std::memory_order_relaxed);
    header->unread.store(0, std::memory_order_relaxed);
  }
  ~Region() {
    header->id.store(0, std::memory_order_release);  // readers that still have it mapped may let it go
    munmap(header, static_cast<size_t>(bytes + kHeaderBytes));
    close(fd);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  char* data() const { return reinterpret_cast<char*>(header) + kHeaderBytes; }
  bool IsRead() const { return header->unread.load(std::memory_order_acquire) <= 0; }
  bool IsFree() const { return IsRead() && !has_owner.load(std::memory_order_acquire); }
  Lease Lend(const std::string& to, int readers) {
    collective = to;
    later_calls = 0;
    header->unread.store(readers, std::memory_order_relaxed);
    return {{getpid(), fd, id}, data()};
  }
};

SharedPool::SharedPool() = default;
SharedPool::~SharedPool() = default;

// With the mutex.
void SharedPool::GiveUp(const std::string& collective) {
  regions_.remove_if([&](const std::shared_ptr<Region>& region) {
    return !region->IsRead() && region->collective == collective && ++region->later_calls > 1;
  });
}

// With the mutex: a region that is free. All of them are at most twice what was in use at once: a step takes several sizes in
// turn, and memory that is fresh from the system costs more than a copy.
std::shared_ptr<SharedPool::Region> SharedPool::Find(int64_t bytes) {
  auto best = regions_.end();
  int64_t in_use = 0, idle = 0;
  for (auto it = regions_.begin(); it != regions_.end(); ++it) {
    const int64_t there = (*it)->bytes;
    const bool is_free = (*it)->IsFree();
    (is_free ? idle : in_use) += there;
    if (!is_free || there < bytes || there > std::max(4 * bytes, 4 * kMinBytes)) continue;
    if (best == regions_.end() || there < (*best)->bytes) best = it;
  }
  const int64_t taken = best == regions_.end() ? SharedSize(bytes, kMinBytes) : (*best)->bytes;
  most_in_use_ = std::max(most_in_use_, in_use + taken);
  if (best != regions_.end()) {
    regions_.splice(regions_.end(), regions_, best);
    return regions_.back();
  }
  for (auto it = regions_.begin(); it != regions_.end() && in_use + taken + idle > 2 * most_in_use_;) {
    const bool is_free = (*it)->IsFree();
    if (is_free) idle -= (*it)->bytes;
    it = is_free ? regions_.erase(it) : std::next(it);
  }
  regions_.push_back(std::make_shared<Region>(taken));
  return regions_.back();
}

SharedPool::Lease SharedPool::Take(const std::string& collective, int64_t bytes, int readers) {
  std::lock_guard<std::mutex> lock(mutex_);
  GiveUp(collective);
  return Find(bytes)->Lend(collective, readers);
}

std::shared_ptr<char> SharedPool::Allocate(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<Region> region = Find(bytes);
  region->has_owner.store(true, std::memory_order_relaxed);
  // A region that is given up stays mapped until its owner lets it go.
  return {region->data(), [region](char*) { region->has_owner.store(false, std::memory_order_release); }};
}

bool SharedPool::Lend(const std::string& collective, const char* data, int readers, Lease* lease) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto is_here = [&](const auto& region) { return region->data() == data && region->has_owner; };
  const auto found = std::find_if(regions_.begin(), regions_.end(), is_here);
  if (found == regions_.end() || !(*found)->IsRead()) return false;
  GiveUp(collective);
  *lease = (*found)->Lend(collective, readers);
  return true;
}

int64_t SharedPool::num_regions() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(regions_.size());
}

int64_t SharedPool::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t sum = 0;
  for (const auto& region : regions_) sum += region->bytes;
  return sum;
}

struct SharedReader::Mapping {
  SharedRegion region;
  Header* header = nullptr;
  int64_t bytes = 0;  // header included

  ~Mapping() {
    if (header != nullptr) munmap(header, static_cast<size_t>(bytes));
  }
  bool IsAlive() const { return header->id.load(std::memory_order_acquire) == region.id; }
};

std::shared_ptr<SharedReader::Mapping> SharedReader::Open(const SharedRegion& region) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& mapping : mappings_) {
    if (mapping->region.pid == region.pid && mapping->region.id == region.id) return mapping;
  }
  mappings_.erase(std::remove_if(mappings_.begin(), mappings_.end(), [](const auto& m) { return !m->IsAlive(); }),
                  mappings_.end());
  const std::string path = "/proc/" + std::to_string(region.pid) + "/fd/" + std::to_string(region.fd);
  auto mapping = std::make_shared<Mapping>();
  mapping->region = region;
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat info;
  void* at = MAP_FAILED;
  const bool is_region = fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size >= kHeaderBytes &&
                         fcntl(fd, F_GET_SEALS) == kSeals;
  if (fd >= 0 && !is_region) errno = EINVAL;
  if (is_region) {
    at = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  const std::string why = at == MAP_FAILED ? std::strerror(errno) : "";
  if (fd >= 0) close(fd);
  if (at == MAP_FAILED) throw FailedPrecondition("shared memory of process " + path + " cannot be opened: " + why);
  mapping->header = static_cast<Header*>(at);
  mapping->bytes = info.st_size;
  if (!mapping->IsAlive()) throw FailedPrecondition("shared memory of process " + path + " is no longer there.");
  mappings_.push_back(mapping);
  return mapping;
}

void SharedReader::Read(const SharedRegion& region, int64_t offset, int64_t bytes, char* to) {
  const std::shared_ptr<Mapping> mapping = Open(region);
  if (offset < 0 || bytes < 0 || bytes > mapping->bytes - kHeaderBytes ||
      offset > mapping->bytes - kHeaderBytes - bytes || !mapping->IsAlive()) {
    throw FailedPrecondition("shared memory of process " + std::to_string(region.pid) +
                             " does not hold what it should.");
  }
  std::memcpy(to, reinterpret_cast<const char*>(mapping->header) + kHeaderBytes + offset, static_cast<size_t>(bytes));
  mapping->header->unread.fetch_sub(1, std::memory_order_acq_rel);
}

}  // namespace sok
