#include "sok/host_memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace sok {
namespace {

// The number behind `name` in a file of lines "name number", or of a file that is one number (an empty name); -1 without.
int64_t NumberIn(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (!name.empty() && word != name) continue;
    if (!name.empty()) file >> word;
    return word.find_first_not_of("0123456789") == std::string::npos ? std::strtoll(word.c_str(), nullptr, 10) : -1;
  }
  return -1;
}

// What the files of a version of control groups are called.
struct GroupNames {
  const char *limit, *taken, *files;
};
constexpr GroupNames kVersion1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"};
constexpr GroupNames kVersion2 = {"/memory.max", "/memory.current", "inactive_file"};

// What the group at root + path, and those it is in, leave of `available`.
int64_t Within(const GroupNames& names, const std::string& root, std::string path, int64_t available) {
  for (;; path.resize(path.rfind('/'))) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    const std::string group = root + path;
    const int64_t limit = NumberIn(group + names.limit, ""), taken = NumberIn(group + names.taken, "");
    if (limit >= 0 && taken >= 0) {
      // Pages of files that nobody has used lately count as taken, and go when somebody needs them.
      const int64_t files = std::max<int64_t>(0, NumberIn(group + "/memory.stat", names.files));
      available = std::min(available, std::max<int64_t>(0, limit - taken + files));
    }
    if (path.find('/') == std::string::npos) return available;
  }
}

}  // namespace

int64_t AvailableBytesIn(const std::string& proc, const std::string& groups) {
  const int64_t kibibytes = NumberIn(proc + "/meminfo", "MemAvailable:");
  int64_t available = Within(kVersion2, groups, "", kibibytes < 0 ? INT64_MAX : kibibytes << 10);
  std::ifstream file(proc + "/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // number:controllers:path
    std::istringstream words(line);
    std::string number, controllers, path;
    if (!std::getline(std::getline(std::getline(words, number, ':'), controllers, ':'), path)) continue;
    if (controllers.empty()) available = Within(kVersion2, groups, path, available);
    if (controllers == "memory") available = Within(kVersion1, groups + "/memory", path, available);
  }
  return available;
}

int64_t AvailableHostBytes() { return AvailableBytesIn("/proc", "/sys/fs/cgroup"); }

}  // namespace sok
