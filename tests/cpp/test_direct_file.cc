// Files on a system that does not do all it is asked: short reads and writes, interruptions, disks that refuse direct access
// after they opened a file for it, and errors at every place.
#include "sok/direct_file.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "files.h"
#include "sok/file_error.h"

namespace {

// What the system does wrong; calls come from the threads of a file, one at a time.
struct Faults {
  size_t most = SIZE_MAX;          // bytes of one read or write
  int interrupt_every = 0;         // calls
  bool refuses_direct = false;     // read and write say EINVAL while O_DIRECT is set
  bool opens_direct = true;        // open does not
  int64_t write_fails_after = -1;  // bytes, with `error`
  int64_t read_fails_after = -1;
  bool sync_fails = false;
  int error = EIO;
};
Faults faults;
std::atomic<int64_t> calls{0}, written{0}, was_read{0}, interrupted{0}, refused{0};

void Set(const Faults& next) {
  faults = next;
  calls = written = was_read = interrupted = refused = 0;
}

// -1 with errno, or how many bytes to ask for.
ssize_t Allowed(int file, size_t n, int64_t done, int64_t fails_after) {
  if (faults.interrupt_every > 0 && calls++ % faults.interrupt_every == 0) {
    ++interrupted;
    errno = EINTR;
    return -1;
  }
  if (faults.refuses_direct && (fcntl(file, F_GETFL) & O_DIRECT) != 0) {
    ++refused;
    errno = EINVAL;
    return -1;
  }
  if (fails_after >= 0 && done >= fails_after) {
    errno = faults.error;
    return -1;
  }
  return static_cast<ssize_t>(std::min(n, faults.most));
}

}  // namespace

extern "C" ssize_t write(int file, const void* data, size_t n) {
  if (file <= 2) return syscall(SYS_write, file, data, n);
  const ssize_t allowed = Allowed(file, n, written, faults.write_fails_after);
  const ssize_t done = allowed < 0 ? allowed : syscall(SYS_write, file, data, static_cast<size_t>(allowed));
  if (done > 0) written += done;
  return done;
}

extern "C" ssize_t read(int file, void* data, size_t n) {
  const ssize_t allowed = Allowed(file, n, was_read, faults.read_fails_after);
  const ssize_t done = allowed < 0 ? allowed : syscall(SYS_read, file, data, static_cast<size_t>(allowed));
  if (done > 0) was_read += done;
  return done;
}

extern "C" int fsync(int file) {
  if (!faults.sync_fails) return static_cast<int>(syscall(SYS_fsync, file));
  errno = faults.error;
  return -1;
}

extern "C" int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int mode = va_arg(more, int);
  va_end(more);
  if (!faults.opens_direct && (flags & O_DIRECT) != 0) {
    errno = EINVAL;
    return -1;
  }
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

namespace {

constexpr size_t kBytes = (size_t{9} << 20) + 1234;  // more than both buffers, and no whole page at the end

std::string Pattern() {
  std::string bytes(kBytes, '\0');
  uint32_t x = 1;
  for (char& c : bytes) c = static_cast<char>((x = x * 1664525u + 1013904223u) >> 24);
  return bytes;
}

void WriteAll(const std::string& path, const std::string& bytes) {
  sok::DirectFile file(path, O_WRONLY | O_CREAT | O_TRUNC, "create");
  for (size_t at = 0, n = 1; at < bytes.size(); at += n, n = n * 3 + 1)
    file.Append(bytes.data() + at, std::min(n, bytes.size() - at));
  file.Sync();
  file.Close();
}

std::string ReadAll(const std::string& path) {
  sok::DirectFile file(path, O_RDONLY, "open");
  std::string bytes(kBytes + 10, 'x');
  size_t at = 0;
  for (size_t n = 1;; n = n * 3 + 1) {
    const size_t got = file.Read(&bytes[at], std::min(n, bytes.size() - at));
    at += got;
    if (got == 0) break;
  }
  return bytes.substr(0, at);
}

int ErrorOf(void (*body)(const std::string&), const std::string& path) {
  try {
    body(path);
  } catch (const sok::FileError& e) {
    CHECK(std::string(e.what()).find(path) != std::string::npos);
    return e.error_number;
  }
  return 0;
}

void WritePattern(const std::string& path) { WriteAll(path, Pattern()); }
void ReadPattern(const std::string& path) { ReadAll(path); }

}  // namespace

TEST(WhatIsWrittenIsReadWhateverTheSystemDoes) {
  const std::string pattern = Pattern();
  Faults shorts, odd, interrupts, refuses, closed, all;
  shorts.most = 64 << 10;
  odd.most = 100001;  // no multiple of what direct access wants
  interrupts.interrupt_every = 2;
  refuses.refuses_direct = true;
  closed.opens_direct = false;
  all.most = 50001;
  all.interrupt_every = 3;
  all.refuses_direct = true;
  for (const Faults& writing : {Faults(), shorts, odd, interrupts, refuses, closed, all}) {
    const Folder folder(".");  // a disk, where direct access may work; /tmp may be memory
    Set(writing);
    WriteAll(folder / "a", pattern);
    CHECK(writing.interrupt_every == 0 || interrupted > 0);
    Set(Faults());
    CHECK(ReadFile(folder / "a") == pattern);
    for (const Faults& reading : {Faults(), shorts, odd, interrupts, refuses, closed, all}) {
      Set(reading);
      CHECK(ReadAll(folder / "a") == pattern);
      CHECK(reading.interrupt_every == 0 || interrupted > 0);
      Set(Faults());
    }
    if (writing.most != SIZE_MAX) break;  // the files are the same
  }
  for (const Faults& writing : {odd, interrupts, refuses, closed, all}) {
    const Folder folder(".");
    Set(writing);
    WriteAll(folder / "a", pattern);
    Set(Faults());
    CHECK(ReadFile(folder / "a") == pattern);
  }
}

TEST(ErrorsOfTheSystemAreTold) {
  const Folder folder(".");
  for (const int64_t after : {int64_t{0}, int64_t{1} << 20, int64_t{5} << 20, int64_t{9} << 20}) {
    Faults full;
    full.write_fails_after = after;
    full.error = ENOSPC;
    full.most = 1 << 20;
    Set(full);
    CHECK_EQ(ErrorOf(WritePattern, folder / "a"), ENOSPC);
    Set(Faults());
    WritePattern(folder / "b");
    Faults broken;
    broken.read_fails_after = after;
    broken.most = 1 << 20;
    Set(broken);
    CHECK_EQ(ErrorOf(ReadPattern, folder / "b"), EIO);
  }
  Faults unsynced;
  unsynced.sync_fails = true;
  Set(unsynced);
  CHECK_EQ(ErrorOf(WritePattern, folder / "c"), EIO);
  Set(Faults());
  CHECK_EQ(ErrorOf(ReadPattern, folder / "not there"), ENOENT);
}
