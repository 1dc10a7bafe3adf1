// What goes wrong with files. Texts name the file; each type becomes one TensorFlow status or more (ops/guard.h).
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

namespace sok {

// The system did not do what it was asked to: no space, no such file, no permission, a broken disk.
struct FileError : std::runtime_error {
  FileError(int error, const std::string& doing, const std::string& file)
      : std::runtime_error(file + ": cannot " + doing + ": " + std::strerror(error)), error_number(error) {}
  int error_number;
};

// A file is not what it should be: cut off, changed, another file, or not ours at all.
struct DamagedFile : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace sok
