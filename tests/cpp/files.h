// Files that tests write, look into and damage.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

// A folder that goes with the object, with the files that the test has named in it.
class Folder {
 public:
  explicit Folder(const std::string& parent = "/tmp") : path_(parent + "/sok_test_XXXXXX") {
    if (mkdtemp(&path_[0]) == nullptr) std::perror(path_.c_str());
  }
  ~Folder() {
    const std::string command = "rm -rf '" + path_ + "'";
    if (system(command.c_str()) != 0) std::fprintf(stderr, "%s is left\n", path_.c_str());
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::string bytes(file ? static_cast<size_t>(file.tellg()) : 0, '\0');
  file.seekg(0).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

inline void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

inline bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }
