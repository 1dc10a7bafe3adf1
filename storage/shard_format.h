// The blocks of a shard file, to bytes and back.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sok/block_file.h"
#include "sok/embedding_table.h"
#include "sok/file_error.h"
#include "sok/shard_file.h"

namespace sok {

constexpr int64_t kMaxNameBytes = 65536;  // bytes of a name

// Bytes of a row in a rows block.
int64_t RowBytes(const ShardHead& head);

// The payload of a head block.
std::vector<char> HeadBytes(const ShardHead& head);

// Writes it. Throws InvalidArgument for a head that no reader would take, naming what is wrong.
void WriteHead(const ShardHead& head, BlockWriter* file);

// Where the next n rows of a file go: its next block.
TableStore::RowTarget RowsBlock(const ShardHead& head, int64_t n, BlockWriter* file);

// Keys that a block of erased keys has at most.
constexpr int64_t kErasedPerBlock = (kBlockBytes - 8) / 8;

// Which rows a shard has in a log: a bit for each number, in words.
constexpr int64_t kBitWordsPerBlock = kBlockBytes / 8;

// Gives the rows of a shard that are in a log to `rows`, in parts of about `per_part`; gives how many they are. Throws DamagedFile.
int64_t ScanVersion(const ShardHead& head, const std::vector<uint64_t>& bits, int64_t per_part,
                    const std::function<void(const TableStore::RowValues&)>& rows);

// What a reader of a shard does with it.
struct ShardVisitor {
  std::function<void(const BlockReader&, const ShardHead&)> head = [](const BlockReader&, const ShardHead&) {};
  std::function<void(const BlockReader&, const TableStore::RowValues&)> rows = [](const BlockReader&,
                                                                                  const TableStore::RowValues&) {};
  std::function<void(const BlockReader&, const uint64_t* keys, int64_t n)> erased = [](const BlockReader&,
                                                                                       const uint64_t*, int64_t) {};
};

// Reads a file from front to back, each block checked before the visitor sees it.
ShardSummary ReadShard(const std::string& path, const ShardVisitor& visitor);

// The head alone.
ShardHead ReadShardHead(const std::string& path);

}  // namespace sok
