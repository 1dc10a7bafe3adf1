#include "detail/host_memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>

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

}  // namespace

int64_t AvailableBytesIn(const std::string& proc, const std::string& group) {
  const int64_t kibibytes = NumberIn(proc + "/meminfo", "MemAvailable:");
  int64_t available = kibibytes < 0 ? INT64_MAX : kibibytes << 10;
  const int64_t limit = NumberIn(group + "/memory.max", ""), taken = NumberIn(group + "/memory.current", "");
  if (limit >= 0 && taken >= 0) {
    // Pages of files that nobody has used lately count as taken, and go when somebody needs them.
    const int64_t files = std::max<int64_t>(0, NumberIn(group + "/memory.stat", "inactive_file"));
    available = std::min(available, std::max<int64_t>(0, limit - taken + files));
  }
  return available;
}

int64_t AvailableHostBytes() { return AvailableBytesIn("/proc", "/sys/fs/cgroup"); }

}  // namespace sok
