#include "sok/block_file.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "files.h"
#include "sok/crc32c.h"
#include "sok/file_error.h"

using sok::BlockReader;
using sok::BlockType;
using sok::BlockWriter;

namespace {

void Put(BlockWriter* file, BlockType type, const std::string& payload) {
  std::memcpy(file->Payload(static_cast<int64_t>(payload.size())), payload.data(), payload.size());
  file->Write(type);
}

std::string Write(const std::string& path, const std::vector<std::string>& payloads) {
  BlockWriter file(path);
  for (size_t i = 0; i < payloads.size(); ++i) {
    Put(&file, i == 0 ? BlockType::kHead : BlockType::kRows, payloads[i]);
  }
  file.Finish(7, 3);
  return ReadFile(path);
}

std::vector<std::string> Read(const std::string& path, int64_t limit = sok::kBlockBytes) {
  BlockReader file(path);
  std::vector<std::string> payloads;
  for (;;) {
    const BlockReader::Block block = file.Next(limit);
    if (block.type == BlockType::kEnd) break;
    payloads.emplace_back(block.data, static_cast<size_t>(block.n));
  }
  CHECK_EQ(file.rows(), 7);
  CHECK_EQ(file.erased(), 3);
  return payloads;
}

// A block as the documentation says, by hand.
std::string Block(uint32_t type, const std::string& payload, uint64_t length, uint32_t magic = 0x4B4C4253) {
  std::string header(24, '\0');
  std::memcpy(&header[0], &magic, 4);
  std::memcpy(&header[4], &type, 4);
  std::memcpy(&header[8], &length, 8);
  const uint32_t crc = sok::Crc32c(payload.data(), payload.size(), sok::Crc32c(&header[4], 12));
  std::memcpy(&header[16], &crc, 4);
  return header + payload;
}

}  // namespace

TEST(WhatWasWrittenIsRead) {
  const Folder folder;
  const std::vector<std::string> payloads = {"head", "", std::string(100000, 'x'), "last"};
  Write(folder / "a", payloads);
  CHECK(Read(folder / "a") == payloads);
  CHECK(!Exists(folder / "a.tmp"));
}

TEST(BlocksLongerThanWhatIsWrittenAtATimeAreRead) {
  const Folder folder;
  std::vector<std::string> payloads;
  for (const size_t n : {(size_t{4} << 20) - 24, size_t{1}, size_t{9} << 20, size_t{4072}, size_t{0}, size_t{3} << 20})
    payloads.emplace_back(n, static_cast<char>('a' + n % 26));
  Write(folder / "a", payloads);
  CHECK(Read(folder / "a", int64_t{16} << 20) == payloads);
  const Folder memory("/dev/shm");  // a file system without direct access
  Write(memory / "a", payloads);
  CHECK(Read(memory / "a", int64_t{16} << 20) == payloads);
}

TEST(BytesAreAsDocumented) {
  const Folder folder;
  const std::string bytes = Write(folder / "a", {"head"});
  const std::string head = Block(1, "head", 4);
  CHECK(bytes.substr(0, 28) == head);
  uint32_t digest = sok::Crc32c(&head[16], 4);
  std::string end(32, '\0');
  end[0] = 7;
  end[8] = 3;
  end[16] = 1;
  std::memcpy(&end[24], &digest, 4);
  CHECK(bytes.substr(28) == Block(4, end, 32));
}

TEST(AFileThatIsNotFinishedNeverAppears) {
  const Folder folder;
  Write(folder / "a", {"old"});
  {
    BlockWriter file(folder / "a");
    Put(&file, BlockType::kHead, "new");
    CHECK(Exists(folder / "a.tmp"));
  }
  CHECK(!Exists(folder / "a.tmp"));
  CHECK(Read(folder / "a") == std::vector<std::string>{"old"});
}

TEST(EveryCutIsNoticed) {
  const Folder folder;
  const std::string bytes = Write(folder / "a", {"head", "some rows", ""});
  for (size_t n = 0; n < bytes.size(); ++n) {
    WriteFile(folder / "b", bytes.substr(0, n));
    CHECK_THROWS(Read(folder / "b"), sok::DamagedFile, (folder / "b") + ": at offset ");
  }
}

TEST(EveryFlippedBitIsNoticed) {
  const Folder folder;
  const std::string bytes = Write(folder / "a", {"head", "some rows", ""});
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string changed = bytes;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << (bit % 8)));
    WriteFile(folder / "b", changed);
    CHECK_THROWS(Read(folder / "b"), sok::DamagedFile, (folder / "b") + ": at offset ");
  }
}

TEST(BlocksThatAreMissingRepeatedOrExchangedAreNoticed) {
  const Folder folder;
  Write(folder / "a", {"head", "rows one", "rows two"});
  const std::string bytes = ReadFile(folder / "a");
  const std::string head = bytes.substr(0, 28), one = bytes.substr(28, 32), two = bytes.substr(60, 32),
                    end = bytes.substr(92);
  for (const std::string& wrong : {head + one + end, head + one + one + two + end, head + two + one + end}) {
    WriteFile(folder / "b", wrong);
    CHECK_THROWS(Read(folder / "b"), sok::DamagedFile, "put together from several");
  }
  WriteFile(folder / "b", bytes + "x");
  CHECK_THROWS(Read(folder / "b"), sok::DamagedFile, "1 bytes follow the end block");
}

TEST(AbsurdLengthsTakeNoMemory) {
  const Folder folder;
  for (const uint64_t length : {uint64_t{1} << 62, ~uint64_t{0}, uint64_t{5}}) {
    WriteFile(folder / "a", Block(1, "head", length));
    CHECK_THROWS(Read(folder / "a"), sok::DamagedFile, "4 are left");
  }
  WriteFile(folder / "a", Block(1, std::string(2000, 'x'), 2000));
  CHECK_THROWS(Read(folder / "a", 1000), sok::DamagedFile, "a block of 2000 bytes, where at most 1000 make sense");
}

TEST(ForeignFilesAreRefused) {
  const Folder folder;
  WriteFile(folder / "a", "this is a letter to somebody and not a checkpoint at all");
  CHECK_THROWS(Read(folder / "a"), sok::DamagedFile, "at offset 0: not a shard of a sok checkpoint");
  WriteFile(folder / "a", "short");
  CHECK_THROWS(Read(folder / "a"), sok::DamagedFile, "it has 5 bytes");
  WriteFile(folder / "a", Block(9, "", 0));
  CHECK_THROWS(Read(folder / "a"), sok::DamagedFile, "unknown type 9");
  CHECK_THROWS(BlockReader(folder.path()), sok::DamagedFile, "not a file");
  CHECK_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  CHECK_THROWS(BlockReader(folder / "pipe"), sok::DamagedFile, "not a file");
  CHECK_THROWS(BlockReader(folder / "none"), sok::FileError, "cannot open: No such file");
  CHECK_THROWS(BlockWriter(folder / "none/a"), sok::FileError, "cannot create: No such file");
}

TEST(AFullDiskIsAnErrorAndLeavesTheOldFile) {
  const Folder folder;
  Write(folder / "a", {"old"});
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 10000;
  setrlimit(RLIMIT_FSIZE, &small);
  {
    BlockWriter file(folder / "a");
    Put(&file, BlockType::kHead, "new");
    Put(&file, BlockType::kRows, std::string(20000, 'x'));  // kept back: a few megabytes are written at a time
    CHECK_THROWS(file.Finish(1, 0), sok::FileError, "a.tmp: cannot write at offset 10000: File too large");
  }
  {
    BlockWriter file(folder / "a");
    Put(&file, BlockType::kRows, std::string(5 << 20, 'x'));  // at work
    CHECK_THROWS(Put(&file, BlockType::kRows, std::string(5 << 20, 'x')), sok::FileError,
                 "a.tmp: cannot write at offset ");
  }
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK(!Exists(folder / "a.tmp"));
  CHECK(Read(folder / "a") == std::vector<std::string>{"old"});
}
