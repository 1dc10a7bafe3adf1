#include "sok/block_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "sok/crc32c.h"
#include "sok/file_error.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the format is little-endian, and numbers are written as they lie in memory"
#endif

namespace sok {
namespace {

constexpr uint32_t kMagic = 0x4B4C4253;  // "SBLK"
constexpr int64_t kEndBytes = 32;

struct BlockHeader {
  uint32_t magic;
  uint32_t type;
  uint64_t length;
  uint32_t crc;
  uint32_t zero;
};
static_assert(sizeof(BlockHeader) == kBlockHeaderBytes, "as documented");

uint32_t BlockCrc(const BlockHeader& header, const char* payload) {
  const char* bytes = reinterpret_cast<const char*>(&header);
  return Crc32c(payload, header.length, Crc32c(bytes + 4, 12));
}

}  // namespace

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

void SyncFolder(const std::string& folder) {
  const int file = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) throw FileError(errno, "open the folder", folder);
  // Some network file systems cannot sync folders and need not be asked to.
  const int error = fsync(file) == 0 || errno == EINVAL || errno == ENOTSUP ? 0 : errno;
  close(file);
  if (error != 0) throw FileError(error, "sync the folder", folder);
}

BlockWriter::BlockWriter(const std::string& path)
    : path_(path), file_(path + ".tmp", O_WRONLY | O_CREAT | O_TRUNC, "create") {}

BlockWriter::~BlockWriter() {
  if (!is_finished_) unlink((path_ + ".tmp").c_str());
}

char* BlockWriter::Payload(int64_t n) {
  payload_ = n;
  const size_t needed = static_cast<size_t>(kBlockHeaderBytes + n);
  if (buffer_.size() < needed) buffer_.resize(needed);
  return buffer_.data() + kBlockHeaderBytes;
}

void BlockWriter::Write(BlockType type) {
  BlockHeader header = {kMagic, static_cast<uint32_t>(type), static_cast<uint64_t>(payload_), 0, 0};
  header.crc = BlockCrc(header, buffer_.data() + kBlockHeaderBytes);
  std::memcpy(buffer_.data(), &header, sizeof(header));
  file_.Append(buffer_.data(), static_cast<size_t>(kBlockHeaderBytes + payload_));
  bytes_ += kBlockHeaderBytes + payload_;
  if (type == BlockType::kEnd) return;
  digest_ = Crc32c(&header.crc, sizeof(header.crc), digest_);
  ++blocks_;
}

void BlockWriter::Finish(int64_t rows, int64_t erased) {
  const uint64_t words[3] = {static_cast<uint64_t>(rows), static_cast<uint64_t>(erased),
                             static_cast<uint64_t>(blocks_)};
  const uint32_t last[2] = {digest_, 0};
  char* payload = Payload(kEndBytes);
  std::memcpy(payload, words, sizeof(words));
  std::memcpy(payload + sizeof(words), last, sizeof(last));
  Write(BlockType::kEnd);
  file_.Sync();
  file_.Close();
  if (rename((path_ + ".tmp").c_str(), path_.c_str()) != 0) throw FileError(errno, "rename", path_ + ".tmp");
  is_finished_ = true;
  SyncFolder(FolderOf(path_));
}

BlockReader::BlockReader(const std::string& path)
    : path_(path), file_(path, O_RDONLY | O_NONBLOCK, "open") {  // a pipe is not waited for
  struct stat status;
  if (fstat(file_.descriptor(), &status) != 0 || !S_ISREG(status.st_mode)) throw DamagedFile(path + ": not a file");
  size_ = static_cast<int64_t>(status.st_size);
}

void BlockReader::Refuse(const std::string& what) const {
  throw DamagedFile(path_ + ": at offset " + std::to_string(block_offset_) + ": " + what);
}

void BlockReader::ReadIn(char* data, size_t n) {
  const size_t got = file_.Read(data, n);
  at_ += static_cast<int64_t>(got);
  if (got < n) Refuse("the file has become shorter while it was read");
}

BlockReader::Block BlockReader::Next(int64_t limit) {
  block_offset_ = at_;
  if (size_ - at_ < kBlockHeaderBytes) {
    Refuse(at_ == 0 ? "not a shard of a sok checkpoint: it has " + std::to_string(size_) + " bytes"
                    : "the file ends before its end block: it was cut off");
  }
  BlockHeader header;
  ReadIn(reinterpret_cast<char*>(&header), sizeof(header));
  if (header.magic != kMagic) {
    Refuse(block_offset_ == 0 ? "not a shard of a sok checkpoint" : "no block begins here: the file was changed");
  }
  if (header.zero != 0) Refuse("the block's header was changed");
  if (header.length > static_cast<uint64_t>(size_ - at_)) {
    Refuse("a block of " + std::to_string(header.length) + " bytes, where " + std::to_string(size_ - at_) +
           " are left: the file was cut off or changed");
  }
  if (header.length > static_cast<uint64_t>(limit)) {
    Refuse("a block of " + std::to_string(header.length) + " bytes, where at most " + std::to_string(limit) +
           " make sense");
  }
  const size_t n = static_cast<size_t>(header.length);
  if (buffer_.size() < n) buffer_.resize(n);
  ReadIn(buffer_.data(), n);
  if (BlockCrc(header, buffer_.data()) != header.crc) Refuse("wrong checksum: the block was changed");
  const Block block = {static_cast<BlockType>(header.type), buffer_.data(), static_cast<int64_t>(n)};
  switch (block.type) {
    case BlockType::kHead:
    case BlockType::kRows:
    case BlockType::kErased:
    case BlockType::kRowBits:
      digest_ = Crc32c(&header.crc, sizeof(header.crc), digest_);
      ++blocks_;
      break;
    case BlockType::kEnd:
      CheckEnd(block);
      break;
    default:
      Refuse("a block of unknown type " + std::to_string(header.type));
  }
  return block;
}

void BlockReader::CheckEnd(const Block& block) {
  uint64_t words[3];
  uint32_t last[2];
  if (block.n != kEndBytes) Refuse("an end block of " + std::to_string(block.n) + " bytes");
  std::memcpy(words, block.data, sizeof(words));
  std::memcpy(last, block.data + sizeof(words), sizeof(last));
  if (words[2] != static_cast<uint64_t>(blocks_) || last[0] != digest_ || last[1] != 0) {
    Refuse("the end block counts other blocks than are here: the file was put together from several");
  }
  if (at_ != size_) Refuse(std::to_string(size_ - at_) + " bytes follow the end block");
  if (words[0] > INT64_MAX || words[1] > INT64_MAX) Refuse("the end block counts more rows than there can be");
  rows_ = static_cast<int64_t>(words[0]);
  erased_ = static_cast<int64_t>(words[1]);
}

}  // namespace sok
