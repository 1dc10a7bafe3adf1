#include "sok/shard_file.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>

#include "sok/block_file.h"
#include "sok/error.h"
#include "sok/file_error.h"
#include "sok/json.h"

namespace sok {
namespace {

using SlotSetInfo = EmbeddingTable::SlotSetInfo;

constexpr uint32_t kVersion = 1;
constexpr uint32_t kHashed = 1, kUnsigned = 2;
constexpr int64_t kMaxText = 65536;
constexpr int64_t kMaxSets = 1024;
constexpr int64_t kMaxDim = int64_t{1} << 20;
constexpr int64_t kMaxRuns = 0;  // of a full save

// Bytes of a row in a rows block.
int64_t RowBytes(const ShardHead& head) {
  int64_t vectors = 1;
  for (const SlotSetInfo& set : head.sets) vectors += set.rule.num_slots();
  return 8 + 4 * head.dim * vectors;
}

class HeadWriter {
 public:
  template <class T>
  void Put(T number) {
    const char* bytes = reinterpret_cast<const char*>(&number);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof(T));
  }
  void Text(const std::string& text) {
    Put(static_cast<uint32_t>(text.size()));
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  std::vector<char> bytes_;
};

class HeadReader {
 public:
  HeadReader(const BlockReader& file, const BlockReader::Block& block) : file_(file), block_(block) {}

  template <class T>
  T Get() {
    T number;
    std::memcpy(&number, Take(sizeof(T)), sizeof(T));
    return number;
  }
  std::string Text(const char* what) {
    const uint32_t n = Get<uint32_t>();
    if (n > kMaxText) file_.Refuse(std::string("the head's ") + what + " has " + std::to_string(n) + " bytes");
    return {Take(n), n};
  }
  bool AtEnd() const { return at_ == block_.n; }

 private:
  const char* Take(int64_t n) {
    if (n > block_.n - at_) file_.Refuse("the head is too short for what it says");
    at_ += n;
    return block_.data + at_ - n;
  }

  const BlockReader& file_;
  const BlockReader::Block& block_;
  int64_t at_ = 0;
};

std::vector<char> HeadBytes(const ShardHead& head) {
  HeadWriter out;
  out.Put(kVersion);
  out.Put((head.hashed ? kHashed : 0u) | (head.is_unsigned ? kUnsigned : 0u));
  out.Put(static_cast<uint32_t>(head.key_bytes));
  out.Put(static_cast<uint32_t>(head.sets.size()));
  out.Put(static_cast<uint64_t>(head.dim));
  out.Put(static_cast<uint32_t>(head.world_size));
  out.Put(static_cast<uint32_t>(head.rank));
  out.Put(static_cast<int32_t>(head.owner));
  out.Put(uint32_t{0});
  out.Text(head.generation);
  out.Text(head.table);
  for (const SlotSetInfo& set : head.sets) {
    out.Text(set.name);
    out.Text(RuleName(set.rule.rule));
    out.Put(static_cast<uint32_t>(set.rule.num_slots()));
    for (const float x : {set.rule.slot_init, set.rule.beta_1, set.rule.beta_2, set.rule.one_minus_beta_1,
                          set.rule.one_minus_beta_2, set.rule.epsilon}) {
      out.Put(x);
    }
    out.Put(static_cast<uint64_t>(set.calls));
    out.Put(uint32_t{0});  // runs
  }
  return out.bytes();
}

SlotSetInfo ReadSlotSet(const BlockReader& file, HeadReader* in) {
  SlotSetInfo set;
  set.name = in->Text("slot set");
  const std::string rule = in->Text("rule");
  try {
    set.rule.rule = ParseRule(rule);
  } catch (const InvalidArgument&) {
    file.Refuse("slot set '" + set.name + "' has the unknown rule '" + rule + "'");
  }
  const uint32_t num_slots = in->Get<uint32_t>();
  if (num_slots != static_cast<uint32_t>(set.rule.num_slots())) {
    file.Refuse("slot set '" + set.name + "' of rule '" + rule + "' has " + std::to_string(num_slots) +
                " slots instead of " + std::to_string(set.rule.num_slots()));
  }
  for (float* x : {&set.rule.slot_init, &set.rule.beta_1, &set.rule.beta_2, &set.rule.one_minus_beta_1,
                   &set.rule.one_minus_beta_2, &set.rule.epsilon}) {
    *x = in->Get<float>();
    if (!std::isfinite(*x)) file.Refuse("slot set '" + set.name + "' has a setting that is not finite");
  }
  const uint64_t calls = in->Get<uint64_t>();
  if (calls > UINT32_MAX) file.Refuse("slot set '" + set.name + "' counts " + std::to_string(calls) + " calls");
  set.calls = static_cast<int64_t>(calls);
  const uint32_t runs = in->Get<uint32_t>();
  if (runs > kMaxRuns) file.Refuse("slot set '" + set.name + "' has " + std::to_string(runs) + " runs in a full save");
  return set;
}

ShardHead ReadHead(BlockReader* file) {
  const BlockReader::Block block = file->Next(kBlockBytes);
  if (block.type != BlockType::kHead) file->Refuse("the file does not begin with its head");
  HeadReader in(*file, block);
  const uint32_t version = in.Get<uint32_t>();
  if (version == 0 || version > kVersion) {
    file->Refuse("written in version " + std::to_string(version) + " of the format; this sok reads up to version " +
                 std::to_string(kVersion) + ". Use a newer sok.");
  }
  ShardHead head;
  const uint32_t flags = in.Get<uint32_t>();
  if (flags > (kHashed | kUnsigned)) file->Refuse("the head has unknown flags");
  head.hashed = (flags & kHashed) != 0;
  head.is_unsigned = (flags & kUnsigned) != 0;
  const uint32_t key_bytes = in.Get<uint32_t>(), num_sets = in.Get<uint32_t>();
  const uint64_t dim = in.Get<uint64_t>();
  const uint32_t world_size = in.Get<uint32_t>(), rank = in.Get<uint32_t>();
  const int32_t owner = in.Get<int32_t>();
  if (key_bytes != 4 && key_bytes != 8) file->Refuse("keys of " + std::to_string(key_bytes) + " bytes");
  if (num_sets > kMaxSets) file->Refuse(std::to_string(num_sets) + " slot sets");
  if (dim < 1 || dim > static_cast<uint64_t>(kMaxDim)) file->Refuse("rows of dim " + std::to_string(dim));
  if (world_size < 1 || world_size > INT32_MAX || rank >= world_size || owner < kByKey ||
      owner >= static_cast<int64_t>(world_size) || (owner != kByKey && owner != static_cast<int64_t>(rank)) ||
      in.Get<uint32_t>() != 0) {
    file->Refuse("rank " + std::to_string(rank) + " of " + std::to_string(world_size) + " with owner " +
                 std::to_string(owner) + " makes no sense");
  }
  head.key_bytes = static_cast<int>(key_bytes);
  head.dim = static_cast<int64_t>(dim);
  head.world_size = static_cast<int>(world_size);
  head.rank = static_cast<int>(rank);
  head.owner = owner;
  head.generation = in.Text("generation");
  head.table = in.Text("table name");
  for (uint32_t s = 0; s < num_sets; ++s) {
    head.sets.push_back(ReadSlotSet(*file, &in));
    for (uint32_t other = 0; other < s; ++other)
      if (head.sets[other].name == head.sets[s].name) file->Refuse("two slot sets '" + head.sets[s].name + "'");
  }
  if (!in.AtEnd()) file->Refuse("the head is longer than what it says");
  return head;
}

// The rows of a block, checked.
EmbeddingTable::RowValues ReadRows(const BlockReader& file, const ShardHead& head, const BlockReader::Block& block) {
  const int64_t row_bytes = RowBytes(head);
  uint64_t n = 0;
  if (block.n >= 8) std::memcpy(&n, block.data, 8);
  if (n < 1 || (block.n - 8) % row_bytes != 0 || static_cast<uint64_t>((block.n - 8) / row_bytes) != n) {
    file.Refuse("a block of " + std::to_string(block.n) + " bytes cannot hold " + std::to_string(n) + " rows of " +
                std::to_string(row_bytes));
  }
  EmbeddingTable::RowValues values;
  values.n = static_cast<int64_t>(n);
  values.keys = reinterpret_cast<const uint64_t*>(block.data + 8);
  values.rows = reinterpret_cast<const float*>(values.keys + values.n);
  const float* at = values.rows + values.n * head.dim;
  for (const SlotSetInfo& set : head.sets) {
    values.slots.push_back(at);
    at += values.n * head.dim * set.rule.num_slots();
  }
  const Partition partition = {head.world_size, head.owner, head.is_unsigned};
  for (int64_t i = 0; i < values.n; ++i) {
    const uint64_t key = values.keys[i];
    const bool fits = head.key_bytes == 8 || (head.is_unsigned ? key <= UINT32_MAX
                                                               : static_cast<int64_t>(key) ==
                                                                     static_cast<int32_t>(static_cast<uint32_t>(key)));
    if (fits && partition.OwnerOf(key) == head.rank) continue;
    const std::string text = head.is_unsigned ? std::to_string(key) : std::to_string(static_cast<int64_t>(key));
    file.Refuse(
        "key " + text +
        (fits ? " does not belong to rank " + std::to_string(head.rank) + " of " + std::to_string(head.world_size)
              : " does not fit the key dtype"));
  }
  return values;
}

// Reads a file from front to back; check is given the head, take every block of rows.
ShardSummary ReadShard(const std::string& path, const std::function<void(const BlockReader&, const ShardHead&)>& check,
                       const std::function<void(const BlockReader&, const EmbeddingTable::RowValues&)>& take) {
  BlockReader file(path);
  ShardSummary summary;
  summary.bytes = file.bytes();
  summary.head = ReadHead(&file);
  check(file, summary.head);
  const int64_t limit = std::max(kBlockBytes, 8 + RowBytes(summary.head));
  for (;;) {
    const BlockReader::Block block = file.Next(limit);
    if (block.type == BlockType::kEnd) break;
    if (block.type == BlockType::kHead) file.Refuse("a second head");
    if (block.type == BlockType::kErased) file.Refuse("erased keys in a full save");
    const EmbeddingTable::RowValues values = ReadRows(file, summary.head, block);
    summary.rows += values.n;
    take(file, values);
  }
  if (file.rows() != summary.rows || file.erased() != 0) {
    file.Refuse("the end block counts " + std::to_string(file.rows()) + " rows, and " + std::to_string(summary.rows) +
                " are here");
  }
  summary.digest = file.digest();
  return summary;
}

class ShardSink : public EmbeddingTable::RowSink {
 public:
  ShardSink(BlockWriter* file, ShardHead head) : file_(file), head_(std::move(head)) {}

  int64_t Begin(int64_t, const std::vector<SlotSetInfo>& sets) override {
    head_.sets = sets;
    const std::vector<char> bytes = HeadBytes(head_);
    std::memcpy(file_->Payload(static_cast<int64_t>(bytes.size())), bytes.data(), bytes.size());
    file_->Write(BlockType::kHead);
    return std::max<int64_t>(1, (kBlockBytes - 8) / RowBytes(head_));
  }

  EmbeddingTable::RowTarget Allocate(int64_t n) override {
    char* payload = file_->Payload(8 + n * RowBytes(head_));
    const uint64_t count = static_cast<uint64_t>(n);
    std::memcpy(payload, &count, 8);
    EmbeddingTable::RowTarget target;
    target.keys = reinterpret_cast<uint64_t*>(payload + 8);
    target.rows = reinterpret_cast<float*>(target.keys + n);
    float* at = target.rows + n * head_.dim;
    for (const SlotSetInfo& set : head_.sets) {
      target.slots.push_back(at);
      at += n * head_.dim * set.rule.num_slots();
    }
    rows_ += n;
    return target;
  }

  void Commit() override { file_->Write(BlockType::kRows); }

  const ShardHead& head() const { return head_; }
  int64_t rows() const { return rows_; }

 private:
  BlockWriter* file_;
  ShardHead head_;
  int64_t rows_ = 0;
};

void CheckText(const std::string& what, const std::string& text) {
  if (static_cast<int64_t>(text.size()) <= kMaxText) return;
  throw InvalidArgument(what + " has " + std::to_string(text.size()) + " bytes; a checkpoint takes at most " +
                        std::to_string(kMaxText) + ".");
}

}  // namespace

ShardSummary SaveShard(const Cpu& cpu, const EmbeddingTable& table, int key_bytes, const std::string& generation,
                       const std::string& path) {
  const TableConfig& config = table.config();
  CheckText("the table's name", config.name);
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
  BlockWriter file(path);
  ShardSink sink(&file, head);
  table.ReadAll(cpu, &sink);
  ShardSummary summary;
  summary.digest = file.digest();
  file.Finish(sink.rows(), 0);
  summary.head = sink.head();
  summary.rows = sink.rows();
  summary.bytes = file.bytes();
  return summary;
}

ShardSummary LoadShard(const Cpu& cpu, const std::string& path, int key_bytes,
                       const std::vector<std::pair<std::string, std::string>>& set_names, EmbeddingTable* table) {
  const TableConfig& config = table->config();
  Scratch scratch;
  std::vector<SlotSetInfo> sets;  // as the table calls them
  std::vector<size_t> places;     // of those sets in the file
  int64_t stored = 0;
  ShardSummary summary = ReadShard(
      path,
      [&](const BlockReader&, const ShardHead& head) {
        if (head.dim != config.dim) {
          throw InvalidArgument(table->Label() + ": its rows have dim " + std::to_string(config.dim) + ", those in " +
                                path + " have dim " + std::to_string(head.dim) + ".");
        }
        if (head.is_unsigned != config.is_unsigned || head.key_bytes != key_bytes) {
          auto name = [](bool is_unsigned, int bytes) {
            return std::string(is_unsigned ? "uint" : "int") + std::to_string(8 * bytes);
          };
          throw InvalidArgument(table->Label() + ": its keys are " + name(config.is_unsigned, key_bytes) +
                                ", those in " + path + " are " + name(head.is_unsigned, head.key_bytes) + ".");
        }
        for (const auto& [from, to] : set_names) {
          const auto found = std::find_if(head.sets.begin(), head.sets.end(),
                                          [&from = from](const SlotSetInfo& set) { return set.name == from; });
          if (found == head.sets.end()) continue;  // no optimizer had touched the table on the rank that wrote this
          sets.push_back(*found);
          sets.back().name = to;
          places.push_back(static_cast<size_t>(found - head.sets.begin()));
        }
      },
      [&](const BlockReader& file, const EmbeddingTable::RowValues& values) {
        int64_t mine = 0;
        for (int64_t i = 0; i < values.n; ++i) mine += table->OwnerOf(values.keys[i]) == config.rank;
        EmbeddingTable::RowValues chosen = values;
        chosen.slots.clear();
        for (const size_t place : places) chosen.slots.push_back(values.slots[place]);
        scratch.Reset();
        if (table->Restore(cpu, &scratch, sets, chosen) != mine) file.Refuse("a key is in the checkpoint twice");
        stored += mine;
      });
  summary.stored = stored;
  return summary;
}

ShardSummary VerifyShard(const std::string& path) {
  return ReadShard(
      path, [](const BlockReader&, const ShardHead&) {}, [](const BlockReader&, const EmbeddingTable::RowValues&) {});
}

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
      ", \"stored\": " + std::to_string(summary.stored) + ", \"bytes\": " + std::to_string(summary.bytes) +
      ", \"digest\": \"" + digest + "\", \"slot_sets\": [";
  for (size_t s = 0; s < head.sets.size(); ++s) {
    const SlotSetInfo& set = head.sets[s];
    json += std::string(s > 0 ? ", " : "") + "{\"name\": " + JsonText(set.name) + ", \"rule\": \"" +
            RuleName(set.rule.rule) + "\", \"num_slots\": " + std::to_string(set.rule.num_slots()) +
            ", \"calls\": " + std::to_string(set.calls) + "}";
  }
  return json + "]}";
}

}  // namespace sok
