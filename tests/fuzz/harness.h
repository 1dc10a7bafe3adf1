// What fuzz targets share: a folder for their files, and how they say that something does not hold.
#pragma once

#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

// A folder in memory, for as long as the process lives.
inline const std::string& Folder() {
  static const struct Made {
    Made() {
      struct stat status;
      path = stat("/dev/shm", &status) == 0 ? "/dev/shm/sok_fuzz_XXXXXX" : "/tmp/sok_fuzz_XXXXXX";
      if (mkdtemp(&path[0]) == nullptr) std::abort();
    }
    ~Made() { std::filesystem::remove_all(path); }
    std::string path;
  } made;
  return made.path;
}

inline void Write(const std::string& path, const char* bytes, size_t size) {
  std::ofstream(path, std::ios::binary | std::ios::trunc).write(bytes, static_cast<std::streamsize>(size));
}

inline void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}
