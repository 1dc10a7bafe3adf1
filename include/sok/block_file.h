// Files made of checksummed blocks: docs/design/checkpoint.md says what they look like.
//
// Neither class is thread-safe. Errors are FileError (the system refused) and DamagedFile (naming file and offset).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "sok/direct_file.h"

namespace sok {

enum class BlockType : uint32_t { kHead = 1, kRows = 2, kErased = 3, kEnd = 4, kRowBits = 5 };

// No block is longer, except one that holds a single row.
constexpr int64_t kBlockBytes = int64_t{4} << 20;
constexpr int64_t kBlockHeaderBytes = 24;

// Writes a file that appears under its name when it is whole, and never before.
class BlockWriter {
 public:
  // Creates `path`.tmp, or empties it.
  explicit BlockWriter(const std::string& path);
  // Without Finish: removes what was written.
  ~BlockWriter();
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;

  // Where to put the payload of the next block: n bytes, aligned to 8. Valid until Write.
  char* Payload(int64_t n);
  void Write(BlockType type);

  // Writes the end block, waits until the disk has everything, and gives the file its name.
  void Finish(int64_t rows, int64_t erased);

  int64_t bytes() const { return bytes_; }
  uint32_t digest() const { return digest_; }  // of the blocks written so far, the end block left out

 private:
  std::string path_;
  DirectFile file_;
  bool is_finished_ = false;
  std::vector<char> buffer_;  // block header and payload
  int64_t payload_ = 0;
  int64_t bytes_ = 0;
  int64_t blocks_ = 0;
  uint32_t digest_ = 0;
};

// Reads such a file from front to back, one block in memory at a time.
class BlockReader {
 public:
  // Opens the file; no byte is read.
  explicit BlockReader(const std::string& path);
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;

  struct Block {
    BlockType type;
    const char* data;  // aligned to 8, valid until the next call
    int64_t n;
  };
  // The next block, checked against its CRC; payloads above `limit` are refused before memory is taken. The end block is the
  // last one: what it says of blocks and digest, and that nothing follows it, is checked too.
  Block Next(int64_t limit);

  int64_t bytes() const { return size_; }
  int64_t offset() const { return block_offset_; }  // of the block that Next gave last
  uint32_t digest() const { return digest_; }       // of the blocks before the end block
  int64_t rows() const { return rows_; }            // after the end block: what it says
  int64_t erased() const { return erased_; }

  // Throws DamagedFile naming the file and the offset of the block that Next gave last.
  [[noreturn]] void Refuse(const std::string& what) const;

 private:
  void ReadIn(char* data, size_t n);
  void CheckEnd(const Block& block);

  std::string path_;
  DirectFile file_;
  std::vector<char> buffer_;
  int64_t size_ = 0;
  int64_t at_ = 0;
  int64_t block_offset_ = 0;
  int64_t blocks_ = 0;
  int64_t rows_ = 0, erased_ = 0;
  uint32_t digest_ = 0;
};

// The folder of a file.
std::string FolderOf(const std::string& path);

// Waits until the disk has the names in a folder.
void SyncFolder(const std::string& folder);

}  // namespace sok
