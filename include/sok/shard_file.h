// One worker's share of a table as a file: docs/design/checkpoint.md.
//
// Errors are FileError and DamagedFile, beside those of the table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sok/device.h"
#include "sok/embedding_table.h"
#include "sok/scratch.h"
#include "sok/table_store.h"

namespace sok {

// Rows that are not in the shard, but in a log of a table over a file (RowLog): docs/design/versions.md.
struct ShardLog {
  std::string path;                                        // empty: they are in the shard
  int64_t floats = 0, block_bytes = 0, segment_bytes = 0;  // RowLogShape
  uint32_t version = 0;
  int64_t rows = 0;              // numbers of rows are below it
  uint64_t digest = 0;           // of their records (DigestOf)
  std::vector<int64_t> offsets;  // of the slots of each set, in a record
  std::vector<int64_t> stamps;   // of each set, the call up to which it is current, there; -1: it always is
};

// What a shard says of itself before its rows.
struct ShardHead {
  bool is_delta = false;  // what has changed since the save before, and not all rows
  bool hashed = true;
  bool is_unsigned = false;
  int key_bytes = 8;  // of the key dtype; keys are stored as 64-bit words
  int64_t dim = 0;
  int world_size = 1;
  int rank = 0;
  int owner = kByKey;
  std::string generation;  // names the save that the file belongs to
  std::string table;
  std::vector<TableStore::SlotSetInfo> sets;
  ShardLog log;
};

struct ShardSummary {
  ShardHead head;
  int64_t rows = 0;
  int64_t erased = 0;  // keys, of a delta
  int64_t held = 0;    // rows in the table that SaveShard has read
  int64_t stored = 0;  // of those rows, what LoadShard has put into the table
  int64_t bytes = 0;
  uint32_t digest = 0;
};

// Runs of alphas that a delta has at most, all slot sets together: with more of them its head would outgrow a block.
constexpr int64_t kMaxShardRuns = 262144;

// Writes all rows and slots of a table, as they stand at one point in time; updates of the table wait meanwhile. The file
// appears under its name when the disk has all of it. Needs memory for one block.
ShardSummary SaveShard(const Cpu& cpu, const TableStore& table, int key_bytes, const std::string& generation,
                       const std::string& path);

// The same of what has changed since the last complete save (TableStore::ReadChanges).
ShardSummary SaveShardChanges(const Cpu& cpu, const TableStore& table, int key_bytes, const std::string& generation,
                              const std::string& path);

// The same of the snapshot that BeginSave made (TableStore::ReadSnapshot): training may go on meanwhile.
ShardSummary SaveShardSnapshot(const Cpu& cpu, TableStore* table, int key_bytes, const std::string& generation,
                               const std::string& path, bool changes);

// The same of the version that BeginSave began: the rows stay in the table's file, and the shard says where. Training may go on
// meanwhile: then is_beside.
ShardSummary SaveShardVersion(EmbeddingTable* table, int key_bytes, const std::string& generation,
                              const std::string& path, bool is_beside = false);

// Puts the rows of the file that this rank owns into the table, which has none of them yet, but for other columns of theirs
// (`columns`, where the file has rows that are cut otherwise); of a delta, into a table that
// holds what the save before held: keys that were erased lose their rows, and an exact Adam catches up. Of slot set
// set_names[i].first the slots go to the table's set set_names[i].second; other sets are left out. A file of another dim
// or key dtype is InvalidArgument. Whatever is thrown, some rows may have been stored: load into a table that can be
// thrown away. Needs memory for one block.
ShardSummary LoadShard(const Cpu& cpu, const std::string& path, int key_bytes,
                       const std::vector<std::pair<std::string, std::string>>& set_names, TableStore* table,
                       const TableStore::Columns& columns = {});

// Writes what a chain of saves holds of one rank as the shard of a full save: rows as the newest link leaves them. links:
// the files, oldest link first, that can hold keys of that rank. head: whose hashed, world_size, rank, owner and generation
// the shard gets; the rest comes from the files. Reads all files `passes` times, and needs memory for some blocks and for
// 1 / passes of the keys that the deltas hold, 20 bytes each.
ShardSummary CompactShards(const Cpu& cpu, const std::vector<std::vector<std::string>>& links, ShardHead head,
                           int64_t passes, const std::string& path);

// Reads a file to its end and checks all that can be checked without a table.
ShardSummary VerifyShard(const std::string& path);

// Text as JSON, for people and Python.
std::string ShardSummaryJson(const ShardSummary& summary);
std::string ChangesJson(const TableStore::ChangeInfo& info);

}  // namespace sok
