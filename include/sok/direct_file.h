// A file that is written or read once, from front to back, past the system's page cache where the file system can do that:
// neither are pages of other programs pushed out, nor is every byte copied into memory that first has to be found. The
// disk works on one buffer while the caller fills or empties the other.
//
// Not thread-safe. Errors are FileError; those of writing come with a later call, at the latest with Sync.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>

namespace sok {

class DirectFile {
 public:
  // flags as for open(2). doing: "create" or "open", for messages.
  DirectFile(const std::string& path, int flags, const char* doing);
  ~DirectFile();
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  void Append(const char* data, size_t n);
  // Waits until the disk has everything that was appended. Nothing may be appended afterwards.
  void Sync();
  // Closes the file before the destructor does, to hear of errors.
  void Close();

  // Reads n bytes, or fewer at the end of the file; gives how many.
  size_t Read(char* data, size_t n);

  int descriptor() const { return file_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  using Buffer = std::unique_ptr<char, Free>;  // aligned, as direct access asks for

  static constexpr size_t kBufferBytes = size_t{4} << 20;

  void Allocate(Buffer* buffer);  // if it has not been
  size_t Finished();              // waits for the disk; what WriteOut or ReadIn gave
  void StartWriting();
  size_t WriteOut(const char* data, size_t n);
  size_t ReadIn(char* data);
  void GoThroughCache();

  std::string path_;
  int file_ = -1;
  bool is_direct_ = false;
  size_t buffer_bytes_ = kBufferBytes;
  Buffer mine_, disks_;          // made when needed
  size_t begin_ = 0, end_ = 0;   // what lies in mine_: read and not yet asked for, or still to be written
  int64_t offset_ = 0;           // of the file, behind what was written or read
  std::future<size_t> pending_;  // what the disk does with disks_
};

}  // namespace sok
