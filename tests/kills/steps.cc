// Preloaded into a process that saves: counts what it does to the files of one folder, and kills it at the step that was chosen.
//
// A step is a call that makes, writes, syncs, renames or removes a file or folder in there. The process dies before the step is
// taken or, of a write, with half of it done.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace {

char folder[4096];
std::atomic<long> steps{0}, chosen{0};
std::atomic<bool> half{false};
std::atomic<bool> is_write_at[1024];  // by the step's number

bool IsOurs(const char* path) {
  // Hearts beat in time, not at a step.
  const char* alive = ".alive";
  const size_t n = std::strlen(path), end = std::strlen(alive);
  if (n >= end && std::strcmp(path + n - end, alive) == 0) return false;
  return folder[0] != 0 && std::strncmp(path, folder, std::strlen(folder)) == 0;
}

bool IsOurs(int file) {
  if (folder[0] == 0) return false;
  char link[64], path[4096];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  const ssize_t n = readlink(link, path, sizeof(path) - 1);
  if (n < 0) return false;
  path[n] = 0;
  return IsOurs(path);
}

[[noreturn]] void Die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// Counts a step, and does not come back from the chosen one; true: it is, and half of this write is to be done first.
bool Step(bool is_write = false) {
  const long number = ++steps;
  if (number < 1024) is_write_at[number] = is_write;
  if (number != chosen) return false;
  if (is_write && half) return true;
  Die();
}

template <class Call>
Call* Real(const char* name) {
  return reinterpret_cast<Call*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// From now on steps in `path` are counted from 1. at: the one to die at, 0: none. torn: whether half of a write is done.
void sok_kill_at(const char* path, long at, int torn) {
  std::snprintf(folder, sizeof(folder), "%s", path);
  steps = 0;
  half = torn != 0;
  chosen = at;
}

long sok_steps() { return steps; }
int sok_is_write(long step) { return step < 1024 && is_write_at[step]; }

#define SOK_OPEN(name)                                                     \
  int name(const char* path, int flags, ...) {                             \
    va_list list;                                                          \
    va_start(list, flags);                                                 \
    const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0; \
    va_end(list);                                                          \
    if ((flags & O_CREAT) != 0 && IsOurs(path)) Step();                    \
    return Real<int(const char*, int, ...)>(#name)(path, flags, mode);     \
  }
SOK_OPEN(open)
SOK_OPEN(open64)

ssize_t write(int file, const void* data, size_t n) {
  const auto real = Real<ssize_t(int, const void*, size_t)>("write");
  if (IsOurs(file) && Step(true)) {
    const size_t done = n >= 8192 ? n / 2 / 4096 * 4096 : n / 2;  // direct access writes whole pages
    if (real(file, data, done) < 0) std::perror("half of a write");
    Die();
  }
  return real(file, data, n);
}

ssize_t pwrite(int file, const void* data, size_t n, off_t at) {
  const auto real = Real<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  if (IsOurs(file) && Step(true)) {
    if (real(file, data, n / 2 / 4096 * 4096, at) < 0) std::perror("half of a write");
    Die();
  }
  return real(file, data, n, at);
}

int fdatasync(int file) {
  if (IsOurs(file)) Step();
  return Real<int(int)>("fdatasync")(file);
}

int fsync(int file) {
  if (IsOurs(file)) Step();
  return Real<int(int)>("fsync")(file);
}

int rename(const char* from, const char* to) noexcept {
  if (IsOurs(from)) Step();
  return Real<int(const char*, const char*)>("rename")(from, to);
}

int unlink(const char* path) noexcept {
  if (IsOurs(path)) Step();
  return Real<int(const char*)>("unlink")(path);
}

int mkdir(const char* path, mode_t mode) noexcept {
  if (IsOurs(path)) Step();
  return Real<int(const char*, mode_t)>("mkdir")(path, mode);
}
}
