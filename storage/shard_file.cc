#include "sok/shard_file.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>

#include "log_files.h"
#include "shard_format.h"
#include "sok/block_file.h"
#include "sok/crc32c.h"
#include "sok/error.h"
#include "sok/json.h"

namespace sok {
namespace {

using SlotSetInfo = TableStore::SlotSetInfo;

class ShardSink : public TableStore::RowSink {
 public:
  ShardSink(BlockWriter* file, ShardHead head) : file_(file), head_(std::move(head)) {}

  int64_t Begin(int64_t num_rows, const std::vector<SlotSetInfo>& sets) override {
    head_.sets = sets;
    held_ = num_rows;
    WriteHead(head_, file_);
    return std::max<int64_t>(1, (kBlockBytes - 8) / RowBytes(head_));
  }

  void Erased(const std::vector<uint64_t>& keys) override {
    for (size_t first = 0; first < keys.size(); first += static_cast<size_t>(kErasedPerBlock)) {
      const uint64_t n = std::min(keys.size() - first, static_cast<size_t>(kErasedPerBlock));
      char* payload = file_->Payload(static_cast<int64_t>(8 + 8 * n));
      std::memcpy(payload, &n, 8);
      std::memcpy(payload + 8, keys.data() + first, 8 * n);
      file_->Write(BlockType::kErased);
    }
    erased_ = static_cast<int64_t>(keys.size());
  }

  TableStore::RowTarget Allocate(int64_t n) override {
    rows_ += n;
    return RowsBlock(head_, n, file_);
  }

  void Commit() override { file_->Write(BlockType::kRows); }

  const ShardHead& head() const { return head_; }
  int64_t rows() const { return rows_; }
  int64_t erased() const { return erased_; }
  int64_t held() const { return held_; }

 private:
  BlockWriter* file_;
  ShardHead head_;
  int64_t rows_ = 0, erased_ = 0, held_ = 0;
};

ShardHead HeadOf(const TableStore& table, int key_bytes, const std::string& generation) {
  const TableConfig& config = table.config();
  ShardHead head;
  head.hashed = config.hashed;
  head.is_unsigned = config.is_unsigned;
  head.key_bytes = key_bytes;
  head.dim = config.dim;
  head.world_size = config.world_size;
  head.rank = config.rank;
  head.owner = config.owner;
  head.generation = generation;
  head.table = config.name;
  return head;
}

ShardSummary WriteShard(const TableStore& table, int key_bytes, const std::string& generation, const std::string& path,
                        bool is_delta, const std::function<void(TableStore::RowSink*)>& read) {
  ShardHead head = HeadOf(table, key_bytes, generation);
  head.is_delta = is_delta;
  BlockWriter file(path);
  ShardSink sink(&file, head);
  read(&sink);
  ShardSummary summary;
  summary.digest = file.digest();
  file.Finish(sink.rows(), sink.erased());
  summary.head = sink.head();
  summary.rows = sink.rows();
  summary.erased = sink.erased();
  summary.held = sink.held();
  summary.bytes = file.bytes();
  return summary;
}

// Throws InvalidArgument if the rows of a file cannot be a table's.
void CheckFits(const ShardHead& head, const std::string& path, int key_bytes, const TableStore::Columns& columns,
               const TableStore& table) {
  const TableConfig& config = table.config();
  const int64_t dim = columns.dim > 0 ? columns.dim : config.dim;
  if (head.dim != dim) {
    throw InvalidArgument(table.Label() + ": its rows have dim " + std::to_string(dim) + ", those in " + path +
                          " have dim " + std::to_string(head.dim) + ".");
  }
  if (columns.dim > 0 && (columns.n < 1 || columns.from < 0 || columns.n > dim - columns.from || columns.to < 0 ||
                          columns.n > config.dim - columns.to)) {
    throw InvalidArgument(table.Label() + ": columns " + std::to_string(columns.from) + " to " +
                          std::to_string(columns.from + columns.n) + " of " + path + " cannot be those from " +
                          std::to_string(columns.to) + " on here.");
  }
  if (head.is_unsigned != config.is_unsigned || head.key_bytes != key_bytes) {
    auto name = [](bool is_unsigned, int bytes) {
      return std::string(is_unsigned ? "uint" : "int") + std::to_string(8 * bytes);
    };
    throw InvalidArgument(table.Label() + ": its keys are " + name(config.is_unsigned, key_bytes) + ", those in " +
                          path + " are " + name(head.is_unsigned, head.key_bytes) + ".");
  }
}

}  // namespace

ShardSummary SaveShard(const Cpu& cpu, const TableStore& table, int key_bytes, const std::string& generation,
                       const std::string& path) {
  return WriteShard(table, key_bytes, generation, path, /*is_delta=*/false,
                    [&](TableStore::RowSink* sink) { table.ReadAll(cpu, sink); });
}

ShardSummary SaveShardChanges(const Cpu& cpu, const TableStore& table, int key_bytes, const std::string& generation,
                              const std::string& path) {
  return WriteShard(table, key_bytes, generation, path, /*is_delta=*/true,
                    [&](TableStore::RowSink* sink) { table.ReadChanges(cpu, sink); });
}

ShardSummary SaveShardSnapshot(const Cpu& cpu, TableStore* table, int key_bytes, const std::string& generation,
                               const std::string& path, bool changes) {
  return WriteShard(*table, key_bytes, generation, path, changes,
                    [&](TableStore::RowSink* sink) { table->ReadSnapshot(cpu, sink); });
}

ShardSummary SaveShardVersion(EmbeddingTable* table, int key_bytes, const std::string& generation,
                              const std::string& path, bool is_beside) {
  ShardSummary summary;
  summary.head = HeadOf(*table, key_bytes, generation);
  const EmbeddingTable::Version& version = table->WriteVersion(path, is_beside);
  summary.head.sets = version.sets;
  summary.head.log.path = version.log;
  summary.head.log.floats = version.shape.floats;
  summary.head.log.block_bytes = version.shape.block_bytes;
  summary.head.log.segment_bytes = version.shape.segment_bytes;
  summary.head.log.version = version.number;
  summary.head.log.rows = version.row_numbers;
  summary.head.log.digest = version.digest;
  summary.head.log.offsets = version.offsets;
  summary.head.log.stamps = version.stamps;
  NoteShardOfLog(version.log, path);
  BlockWriter file(path);
  WriteHead(summary.head, &file);
  for (size_t first = 0; first < version.bits.size(); first += static_cast<size_t>(kBitWordsPerBlock)) {
    const size_t n = std::min(version.bits.size() - first, static_cast<size_t>(kBitWordsPerBlock));
    std::memcpy(file.Payload(static_cast<int64_t>(8 * n)), version.bits.data() + first, 8 * n);
    file.Write(BlockType::kRowBits);
  }
  summary.digest = file.digest();
  file.Finish(version.num_rows, 0);
  summary.rows = summary.held = version.num_rows;
  summary.bytes = file.bytes();
  return summary;
}

ShardSummary LoadShard(const Cpu& cpu, const std::string& path, int key_bytes,
                       const std::vector<std::pair<std::string, std::string>>& set_names, TableStore* table,
                       const TableStore::Columns& columns) {
  const TableConfig& config = table->config();
  Scratch scratch;
  std::vector<SlotSetInfo> sets;  // as the table calls them
  std::vector<size_t> places;     // of those sets in the file
  int64_t stored = 0;
  bool is_delta = false;
  ShardVisitor visitor;
  visitor.head = [&](const BlockReader&, const ShardHead& head) {
    CheckFits(head, path, key_bytes, columns, *table);
    for (const auto& [from, to] : set_names) {
      const auto found = std::find_if(head.sets.begin(), head.sets.end(),
                                      [&from = from](const SlotSetInfo& set) { return set.name == from; });
      if (found == head.sets.end()) continue;  // no optimizer had touched the table on the rank that wrote this
      sets.push_back(*found);
      sets.back().name = to;
      places.push_back(static_cast<size_t>(found - head.sets.begin()));
    }
    is_delta = head.is_delta;
    if (is_delta) table->SkipCalls(head.generation, sets);
  };
  visitor.erased = [&](const BlockReader&, const uint64_t* keys, int64_t n) { table->Erase(keys, n); };
  visitor.rows = [&](const BlockReader& file, const TableStore::RowValues& values) {
    int64_t mine = 0;
    for (int64_t i = 0; i < values.n; ++i) mine += config.partition().OwnerOf(values.keys[i]) == config.rank;
    TableStore::RowValues chosen = values;
    chosen.columns = columns;
    chosen.slots.clear();
    for (const size_t place : places) chosen.slots.push_back(values.slots[place]);
    scratch.Reset();
    const int64_t fresh = table->Restore(cpu, &scratch, sets, chosen);
    if (fresh != mine && !is_delta && columns.dim == 0) file.Refuse("a key is in the checkpoint twice");
    stored += mine;
  };
  ShardSummary summary = ReadShard(path, visitor);
  summary.stored = stored;
  return summary;
}

ShardSummary VerifyShard(const std::string& path) { return ReadShard(path, {}); }

std::string ShardSummaryJson(const ShardSummary& summary) {
  const ShardHead& head = summary.head;
  char digest[9];
  std::snprintf(digest, sizeof(digest), "%08x", summary.digest);
  std::string json =
      "{\"table\": " + JsonText(head.table) + ", \"generation\": " + JsonText(head.generation) +
      ", \"dim\": " + std::to_string(head.dim) + ", \"key_dtype\": \"" + (head.is_unsigned ? "uint" : "int") +
      std::to_string(8 * head.key_bytes) + "\", \"hashed\": " + (head.hashed ? "true" : "false") +
      ", \"world_size\": " + std::to_string(head.world_size) + ", \"rank\": " + std::to_string(head.rank) +
      ", \"owner\": " + std::to_string(head.owner) + ", \"rows\": " + std::to_string(summary.rows) +
      ", \"delta\": " + (head.is_delta ? "true" : "false") + ", \"erased\": " + std::to_string(summary.erased) +
      ", \"held\": " + std::to_string(summary.held) + ", \"stored\": " + std::to_string(summary.stored) +
      ", \"bytes\": " + std::to_string(summary.bytes) + ", \"digest\": \"" + digest + "\", \"slot_sets\": [";
  for (size_t s = 0; s < head.sets.size(); ++s) {
    const SlotSetInfo& set = head.sets[s];
    json += std::string(s > 0 ? ", " : "") + "{\"name\": " + JsonText(set.name) + ", \"rule\": \"" +
            RuleName(set.rule.rule) + "\", \"num_slots\": " + std::to_string(set.rule.num_slots()) +
            ", \"calls\": " + std::to_string(set.calls) + "}";
  }
  return json + "]}";
}

std::string ChangesJson(const TableStore::ChangeInfo& info) {
  std::string json = std::string("{\"on\": ") + (info.is_on ? "true" : "false") + ", \"base\": " + JsonText(info.base) +
                     ", \"rows\": " + std::to_string(info.rows) + ", \"erased\": " + std::to_string(info.erased) +
                     ", \"copied_bytes\": " + std::to_string(info.copied_bytes) + ", \"steps\": {";
  int64_t num_runs = 0;
  std::string steps;
  for (const SlotSetInfo& set : info.sets) {
    if (!set.rule.decays()) continue;
    uint32_t digest = 0;
    for (const AlphaHistory::Run& run : set.missed) {
      const int64_t first = run.first_call - set.missed[0].first_call;
      digest = Crc32c(&run.alpha, sizeof(run.alpha), Crc32c(&first, sizeof(first), digest));
      if (set.rule.has_extra()) digest = Crc32c(&run.extra, sizeof(run.extra), digest);
    }
    num_runs += static_cast<int64_t>(set.missed.size());
    steps += (steps.empty() ? "" : ", ") + JsonText(set.name) + ": [" + std::to_string(set.num_missed()) + ", " +
             std::to_string(digest) + "]";
  }
  return json + steps + "}, \"fits\": " + (num_runs <= kMaxShardRuns ? "true" : "false") + "}";
}

}  // namespace sok
