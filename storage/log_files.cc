#include "log_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <random>
#include <string>

#include "shard_format.h"
#include "sok/block_file.h"
#include "sok/file_error.h"

namespace sok {
namespace {

constexpr const char* kSuffix = ".rows";
constexpr const char* kNote = ".shards";  // behind a log's name: paths of shards that may name it, one a line

// NAME.RANDOM.rows, RANDOM 16 hex digits.
bool IsName(const std::string& name) {
  const size_t end = std::strlen(kSuffix), digits = 16;
  if (name.size() < end + digits + 2 || name.compare(name.size() - end, end, kSuffix) != 0) return false;
  const size_t begin = name.size() - end - digits;
  return name[begin - 1] == '.' && name.find_first_not_of("0123456789abcdef", begin) == name.size() - end;
}

bool IsNamed(const std::string& log) {
  std::ifstream note(log + kNote);
  for (std::string shard; std::getline(note, shard);) {
    if (IsShardGone(shard)) continue;
    try {
      if (ReadShardHead(shard).log.path == log) return true;
    } catch (const std::exception&) {  // it cannot be read now: that is for people to look into
      return true;
    }
  }
  return false;
}

enum class Folder { kMissing, kEmpty, kInUse };

Folder LookInto(const std::string& path) {
  DIR* directory = opendir(path.c_str());
  if (directory == nullptr) return Folder::kMissing;
  Folder found = Folder::kEmpty;
  while (const dirent* entry = readdir(directory))
    if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0) found = Folder::kInUse;
  closedir(directory);
  return found;
}

}  // namespace

bool IsShardGone(const std::string& shard) {
  if (access(shard.c_str(), F_OK) == 0 || errno != ENOENT) return false;
  // A place where nothing is mounted is an empty folder, and what was below it is not there.
  const std::string checkpoint = FolderOf(shard);
  const Folder here = LookInto(checkpoint);
  return here == Folder::kInUse || (here == Folder::kMissing && LookInto(FolderOf(checkpoint)) == Folder::kInUse);
}

std::string NewLogName(const std::string& folder, const std::string& name) {
  std::random_device random;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%08x%08x", random(), random());
  std::string plain = name;
  for (char& c : plain)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' && c != '_') c = '_';
  return folder + "/" + plain.substr(0, 100) + "." + digits + kSuffix;
}

void RemoveLogsLeftOver(const std::string& folder) {
  DIR* directory = opendir(folder.c_str());
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    if (!IsName(entry->d_name)) continue;
    const std::string path = folder + "/" + entry->d_name;
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) continue;
    if (flock(file, LOCK_EX | LOCK_NB) == 0 && !IsNamed(path)) RemoveLog(path);
    close(file);
  }
  closedir(directory);
}

void RemoveLog(const std::string& log) {
  unlink(log.c_str());
  unlink((log + kNote).c_str());
}

void NoteShardOfLog(const std::string& log, const std::string& shard) {
  const std::string note = log + kNote, line = shard + "\n";
  const int file = open(note.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) throw FileError(errno, "open", note);
  const bool is_written = write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  int error = is_written ? 0 : errno == 0 ? ENOSPC : errno;
  if (error == 0 && fsync(file) != 0) error = errno;
  close(file);
  if (error != 0) throw FileError(error, "write", note);
  SyncFolder(FolderOf(note));
}

}  // namespace sok
