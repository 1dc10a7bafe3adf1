#include "sok/direct_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "sok/file_error.h"

namespace sok {
namespace {

constexpr size_t kAlignment = 4096;  // of memory, offsets and lengths: enough for every disk

#if defined(O_DIRECT)
constexpr int kDirect = O_DIRECT;
#else
constexpr int kDirect = 0;
#endif

}  // namespace

DirectFile::DirectFile(const std::string& path, int flags, const char* doing) : path_(path) {
  is_direct_ = kDirect != 0;
  file_ = open(path.c_str(), flags | O_CLOEXEC | kDirect, 0666);
  if (file_ < 0 && errno == EINVAL && is_direct_) {  // a file system in memory, for one
    is_direct_ = false;
    file_ = open(path.c_str(), flags | O_CLOEXEC, 0666);
  }
  if (file_ < 0) throw FileError(errno, doing, path);
  struct stat status;
  if ((flags & O_ACCMODE) == O_RDONLY && fstat(file_, &status) == 0) {
    // A thousand small tables are a thousand small files: no more memory than the file has bytes.
    const size_t pages = static_cast<size_t>(std::max<off_t>(status.st_size, 1) - 1) / kAlignment + 1;
    buffer_bytes_ = std::min(kBufferBytes, pages * kAlignment);
  }
}

void DirectFile::Allocate(Buffer* buffer) {
  if (*buffer) return;
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, buffer_bytes_) != 0) throw std::bad_alloc();
  buffer->reset(static_cast<char*>(memory));
}

DirectFile::~DirectFile() {
  if (pending_.valid()) pending_.wait();
  if (file_ >= 0) close(file_);
}

size_t DirectFile::Finished() { return pending_.valid() ? pending_.get() : 0; }

void DirectFile::GoThroughCache() {
  if (!is_direct_) return;
  is_direct_ = false;
  if (fcntl(file_, F_SETFL, fcntl(file_, F_GETFL) & ~kDirect) < 0) throw FileError(errno, "set flags", path_);
}

size_t DirectFile::WriteOut(const char* data, size_t n) {
  for (size_t at = 0; at < n;) {
    if ((n - at) % kAlignment != 0) GoThroughCache();  // the end of the file, or a write that was cut short
    const ssize_t written = write(file_, data + at, n - at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EINVAL && is_direct_) {  // said so at open, and cannot after all
      GoThroughCache();
      continue;
    }
    if (written < 0) throw FileError(errno, "write at offset " + std::to_string(offset_), path_);
    at += static_cast<size_t>(written);
    offset_ += written;
  }
  return n;
}

void DirectFile::StartWriting() {
  Finished();
  std::swap(mine_, disks_);  // the first time to a buffer that Append will make
  pending_ = std::async(std::launch::async, [this, n = end_] { return WriteOut(disks_.get(), n); });
  end_ = 0;
}

void DirectFile::Append(const char* data, size_t n) {
  while (n > 0) {
    Allocate(&mine_);
    const size_t count = std::min(n, buffer_bytes_ - end_);
    std::memcpy(mine_.get() + end_, data, count);
    end_ += count;
    data += count;
    n -= count;
    if (end_ == buffer_bytes_) StartWriting();
  }
}

void DirectFile::Sync() {
  Finished();
  WriteOut(mine_.get(), end_);
  end_ = 0;
  if (fsync(file_) != 0) throw FileError(errno, "write to the disk", path_);
}

void DirectFile::Close() {
  const int closed = close(file_);
  file_ = -1;
  if (closed != 0) throw FileError(errno, "close", path_);
}

size_t DirectFile::ReadIn(char* data) {
  for (;;) {
    const ssize_t got = read(file_, data, buffer_bytes_);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && is_direct_) {
      GoThroughCache();
      continue;
    }
    if (got < 0) throw FileError(errno, "read at offset " + std::to_string(offset_), path_);
    offset_ += got;
    if (static_cast<size_t>(got) % kAlignment != 0) GoThroughCache();  // the end, or a file that is being changed
    return static_cast<size_t>(got);
  }
}

size_t DirectFile::Read(char* data, size_t n) {
  size_t done = 0;
  while (done < n) {
    if (begin_ == end_) {
      begin_ = 0;
      Allocate(&disks_);
      end_ = pending_.valid() ? Finished() : ReadIn(disks_.get());
      if (end_ == 0) break;
      std::swap(mine_, disks_);
      // A short read is the end of the file, as a rule: no thread is made to find nothing.
      if (end_ == kBufferBytes) {
        Allocate(&disks_);
        pending_ = std::async(std::launch::async, [this] { return ReadIn(disks_.get()); });
      }
    }
    const size_t count = std::min(n - done, end_ - begin_);
    std::memcpy(data + done, mine_.get() + begin_, count);
    begin_ += count;
    done += count;
  }
  return done;
}

}  // namespace sok
