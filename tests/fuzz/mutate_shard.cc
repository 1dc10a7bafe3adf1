// Changes to shards that get past their checksums: blocks are taken apart, one is changed, and all are summed again. One change in
// sixteen is one of bytes, with the sums left alone.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "sok/crc32c.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

constexpr uint32_t kMagic = 0x4B4C4253, kRows = 2, kEnd = 4;

struct Block {
  uint32_t type;
  std::string payload;
};
using Random = std::minstd_rand;

template <class T>
T Get(const std::string& bytes, size_t at) {
  T value{};
  if (at + sizeof(T) <= bytes.size()) std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

template <class T>
void Put(std::string* bytes, size_t at, T value) {
  if (at + sizeof(T) <= bytes->size()) std::memcpy(&(*bytes)[at], &value, sizeof(T));
}

std::vector<Block> Taken(const std::string& file) {
  std::vector<Block> blocks;
  for (size_t at = 0; at + 24 <= file.size();) {
    const size_t length = std::min<uint64_t>(Get<uint64_t>(file, at + 8), file.size() - at - 24);
    blocks.push_back({Get<uint32_t>(file, at + 4), file.substr(at + 24, length)});
    at += 24 + length;
  }
  return blocks;
}

// The file of these blocks, every block with its CRC, the end block with the digest and, if wanted, with the right counts.
std::string Summed(std::vector<Block> blocks, bool counted) {
  std::string file;
  uint32_t digest = 0;
  uint64_t rows = 0, before = 0;
  for (Block& block : blocks) {
    if (block.type == kEnd) {
      block.payload.resize(std::max<size_t>(block.payload.size(), 32));
      if (counted) Put(&block.payload, 0, rows);
      Put(&block.payload, 16, before);
      Put(&block.payload, 24, digest);
      Put(&block.payload, 28, uint32_t{0});
    } else if (block.type == kRows) {
      rows += Get<uint64_t>(block.payload, 0);
    }
    std::string header(24, '\0');
    Put(&header, 0, kMagic);
    Put(&header, 4, block.type);
    Put(&header, 8, static_cast<uint64_t>(block.payload.size()));
    const uint32_t crc = sok::Crc32c(block.payload.data(), block.payload.size(), sok::Crc32c(header.data() + 4, 12, 0));
    Put(&header, 16, crc);
    digest = sok::Crc32c(&crc, sizeof(crc), digest);
    ++before;
    file += header + block.payload;
  }
  return file;
}

// Bytes of a row as the head says them; 0 if it says nothing that can be.
size_t RowBytes(const std::string& head) {
  const uint64_t dim = Get<uint64_t>(head, 16);
  if (dim == 0 || dim > 64) return 0;
  size_t at = 40, slots = 0;
  for (int text = 0; text < 2; ++text) at += 4 + Get<uint32_t>(head, at);
  for (uint32_t set = 0; set < std::min<uint32_t>(Get<uint32_t>(head, 12), 8) && at < head.size(); ++set) {
    for (int text = 0; text < 2; ++text) at += 4 + Get<uint32_t>(head, at);
    slots += std::min<uint32_t>(Get<uint32_t>(head, at), 8);
    at += 4 + 6 * 4 + 8 + 4;
  }
  return 8 + 4 * dim * (1 + slots);
}

// A block of rows that fits the head: keys of its rank, some of them twice.
std::string NewRows(const std::string& head, Random* random) {
  const size_t row_bytes = RowBytes(head), n = 1 + (*random)() % 4;
  if (row_bytes == 0) return std::string(8, '\1');
  const uint64_t world = std::max<uint64_t>(Get<uint32_t>(head, 24), 1), rank = Get<uint32_t>(head, 28);
  std::string payload(8 + n * row_bytes, '\0');
  Put(&payload, 0, static_cast<uint64_t>(n));
  for (size_t i = 0; i < n; ++i) Put(&payload, 8 + 8 * i, static_cast<uint64_t>((*random)() % 64) * world + rank);
  for (size_t at = 8 + 8 * n; at + 4 <= payload.size(); at += 4) Put(&payload, at, static_cast<float>((*random)() % 9));
  return payload;
}

void Change(std::vector<Block>* blocks, size_t room, Random* random) {
  const size_t i = (*random)() % blocks->size();
  Block& block = (*blocks)[i];
  switch ((*random)() % 8) {
    case 0:
      if (blocks->size() > 1) blocks->erase(blocks->begin() + static_cast<long>(i));
      return;
    case 1:
      blocks->insert(blocks->begin() + static_cast<long>(i), Block(block));
      return;
    case 2:
      std::swap(block, (*blocks)[(*random)() % blocks->size()]);
      return;
    case 3:
      block.type = 1 + (*random)() % 5;
      return;
    case 4:
      blocks->insert(blocks->begin() + static_cast<long>(std::max<size_t>(i, 1)),
                     Block{kRows, NewRows(blocks->front().payload, random)});
      return;
    default: {
      std::vector<uint8_t> bytes(block.payload.begin(), block.payload.end());
      const size_t size = bytes.size();
      bytes.resize(size + room);
      const size_t changed = LLVMFuzzerMutate(bytes.data(), size, bytes.size());
      block.payload.assign(bytes.begin(), bytes.begin() + static_cast<long>(changed));
    }
  }
}

size_t Given(const std::string& file, uint8_t* data, size_t max_size) {
  const size_t size = std::min(file.size(), max_size);
  std::memcpy(data, file.data(), size);
  return size;
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  Random random(seed + 1);
  std::vector<Block> blocks = Taken({reinterpret_cast<char*>(data), size});
  if (blocks.empty() || random() % 16 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const size_t room = size < max_size ? max_size - size : 0;
  for (size_t changes = 1 + random() % 2; changes > 0; --changes) Change(&blocks, std::min<size_t>(room, 512), &random);
  return Given(Summed(blocks, random() % 8 != 0), data, max_size);
}

extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* a, size_t a_size, const uint8_t* b, size_t b_size,
                                            uint8_t* out, size_t max_size, unsigned int seed) {
  Random random(seed + 1);
  std::vector<Block> mine = Taken({reinterpret_cast<const char*>(a), a_size});
  const std::vector<Block> theirs = Taken({reinterpret_cast<const char*>(b), b_size});
  if (mine.empty() || theirs.empty()) return 0;
  mine[random() % mine.size()] = theirs[random() % theirs.size()];
  return Given(Summed(mine, true), out, max_size);
}
