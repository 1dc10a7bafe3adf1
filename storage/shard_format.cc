#include "shard_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "sok/error.h"

namespace sok {
namespace {

using SlotSetInfo = TableStore::SlotSetInfo;

// 1: a full save; 2: a delta; 3: of rows spread by hash; 4: of rows spread over some ranks; 5: of rows in a log. Older ones do not
// know later.
constexpr uint32_t kVersion = 5;
constexpr uint32_t kHashed = 1, kUnsigned = 2, kDelta = 4, kInLog = 8;
constexpr int64_t kMaxLogRows = int64_t{1} << 31;
constexpr int64_t kMaxSets = 1024;
constexpr int kMaxDecayingSets = 16;                 // what restoring one costs does not depend on the file's size
constexpr int64_t kMaxRowBytes = int64_t{64} << 20;  // a block holds one row at least, so this is memory for a reader
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
    if (n > kMaxNameBytes) file_.Refuse(std::string("the head's ") + what + " has " + std::to_string(n) + " bytes");
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

// What a head says of a rule, in the file's order.
std::vector<float*> SettingsOf(UpdateRule* rule) {
  if (rule->files_hold_betas()) {
    return {&rule->slot_inits[0],    &rule->beta_1,           &rule->beta_2,
            &rule->one_minus_beta_1, &rule->one_minus_beta_2, &rule->epsilon};
  }
  std::vector<float*> settings;
  for (float& init : rule->slot_inits) settings.push_back(&init);
  if (rule->decays()) {
    for (float* x : {&rule->beta_1, &rule->beta_2, &rule->one_minus_beta_1, &rule->one_minus_beta_2, &rule->epsilon})
      settings.push_back(x);
  }
  return settings;
}

// What a head says of a rule's slots: how many are vectors, and in the upper half how many are scalars.
uint32_t SlotWord(const UpdateRule& rule) {
  return static_cast<uint32_t>(rule.slots().vectors) | static_cast<uint32_t>(rule.slots().scalars) << 16;
}

std::string SlotText(uint32_t word) {
  const std::string scalars = word >> 16 == 0 ? "" : " and " + std::to_string(word >> 16) + " scalars";
  return std::to_string(word & 0xFFFF) + " slots" + scalars;
}

// What makes no sense in a slot set; empty: nothing.
std::string SetError(const SlotSetInfo& set) {
  const UpdateRule& rule = set.rule;
  const std::string who = "slot set '" + set.name + "' ";
  UpdateRule copy = rule;
  for (const float* x : SettingsOf(&copy))
    if (!std::isfinite(*x)) return who + "has a setting that is not finite";
  const std::string error = SettingsError(rule);
  if (!error.empty()) return who + "has settings that make no sense: " + error;
  if (set.calls < 0 || set.calls > UINT32_MAX) return who + "counts " + std::to_string(set.calls) + " calls";
  return {};
}

// The version that brought this way to spread rows. What an older sok would understand, it shall read.
uint32_t VersionOf(int owner) { return owner <= kByRanks ? 4 : owner == kByHash ? 3 : 1; }

// What makes no sense in a head; empty: nothing. Readers and writers ask the same, so what was written can be read.
std::string HeadError(const ShardHead& head) {
  if (head.key_bytes != 4 && head.key_bytes != 8) return "keys of " + std::to_string(head.key_bytes) + " bytes";
  if (head.dim < 1 || head.dim > kMaxDim) return "rows of dim " + std::to_string(static_cast<uint64_t>(head.dim));
  const Partition partition = {head.world_size, head.owner};
  if (head.rank < 0 || head.rank >= head.world_size || !partition.IsValid() || !partition.Holds(head.rank) ||
      (partition.is_by_hash() && !head.hashed)) {
    return "rank " + std::to_string(head.rank) + " of " + std::to_string(head.world_size) + " with owner " +
           std::to_string(head.owner) + " makes no sense";
  }
  if (static_cast<int64_t>(head.sets.size()) > kMaxSets) return std::to_string(head.sets.size()) + " slot sets";
  int num_decaying = 0;
  for (size_t s = 0; s < head.sets.size(); ++s) {
    const SlotSetInfo& set = head.sets[s];
    for (size_t other = 0; other < s; ++other)
      if (head.sets[other].name == set.name) return "two slot sets '" + set.name + "'";
    const std::string error = SetError(set);
    if (!error.empty()) return error;
    num_decaying += set.rule.decays();
  }
  if (num_decaying > kMaxDecayingSets) return std::to_string(num_decaying) + " slot sets of rules that decay";
  if (!head.log.path.empty()) {
    const ShardLog& log = head.log;
    if (log.version < 1 || log.rows < 0 || log.rows > kMaxLogRows || log.floats < head.dim ||
        log.floats > kMaxRowBytes / 4 || log.block_bytes < 1 || log.block_bytes > log.segment_bytes ||
        log.segment_bytes % log.block_bytes != 0 || log.segment_bytes > kMaxRowBytes || head.is_delta) {
      return "its rows cannot be in a log of such a shape";
    }
    for (size_t s = 0; s < head.sets.size(); ++s) {
      const int64_t floats = head.sets[s].rule.slot_floats(head.dim);
      if (log.offsets[s] < 0 || log.offsets[s] > log.floats - floats || log.stamps[s] >= log.floats ||
          (log.stamps[s] >= 0) != head.sets[s].rule.decays()) {
        return "slots lie outside of their records";
      }
    }
  }
  if (RowBytes(head) > kMaxRowBytes) {
    return "rows of " + std::to_string(RowBytes(head)) + " bytes with their slots; at most " +
           std::to_string(kMaxRowBytes) + " can be";
  }
  return {};
}

// The runs of a slot set whose other members are there.
void ReadRuns(const BlockReader& file, HeadReader* in, bool has_runs, SlotSetInfo* set) {
  const uint32_t runs = in->Get<uint32_t>();
  const std::string where = "slot set '" + set->name + "' has ";
  if (runs > 0 && !has_runs) file.Refuse(where + std::to_string(runs) + " runs in a full save");
  if (runs > 0 && !set->rule.decays()) file.Refuse(where + "runs, which its rule does not know");
  if (runs > kMaxShardRuns) file.Refuse(where + std::to_string(runs) + " runs");
  for (uint32_t i = 0; i < runs; ++i) {
    const uint64_t first = in->Get<uint64_t>();
    const float alpha = in->Get<float>(), extra = set->rule.has_extra() ? in->Get<float>() : 0.0f;
    const uint64_t least = i == 0 ? 1 : static_cast<uint64_t>(set->missed.back().first_call) + 1;
    if (first < least || first > static_cast<uint64_t>(std::max<int64_t>(0, set->calls)) || !std::isfinite(alpha) ||
        !std::isfinite(extra)) {
      file.Refuse(where + "a run that begins at call " + std::to_string(first) + " of " + std::to_string(set->calls) +
                  " with alpha " + std::to_string(alpha));
    }
    set->missed.push_back({static_cast<int64_t>(first), alpha, extra});
  }
}

SlotSetInfo ReadSlotSet(const BlockReader& file, HeadReader* in, bool has_runs) {
  SlotSetInfo set;
  set.name = in->Text("slot set");
  const std::string rule = in->Text("rule");
  try {
    set.rule.rule = ParseRule(rule);
  } catch (const InvalidArgument&) {
    file.Refuse("slot set '" + set.name + "' has the unknown rule '" + rule + "'");
  }
  const uint32_t counts = in->Get<uint32_t>();
  if (counts != SlotWord(set.rule)) {
    file.Refuse("slot set '" + set.name + "' of rule '" + rule + "' has " + SlotText(counts) + " instead of " +
                SlotText(SlotWord(set.rule)));
  }
  for (float* x : SettingsOf(&set.rule)) *x = in->Get<float>();
  if (set.rule.files_hold_betas()) std::fill_n(set.rule.slot_inits + 1, kMaxSlots - 1, set.rule.slot_inits[0]);
  set.calls = static_cast<int64_t>(in->Get<uint64_t>());
  ReadRuns(file, in, has_runs, &set);
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
  const uint32_t known = version == 1 ? 0 : version < 5 ? kDelta : kDelta | kInLog;
  if ((flags & ~(kHashed | kUnsigned | known)) != 0 || (version == 5 && (flags & kInLog) == 0)) {
    file->Refuse("the head has unknown flags");
  }
  head.is_delta = (flags & kDelta) != 0;
  head.hashed = (flags & kHashed) != 0;
  head.is_unsigned = (flags & kUnsigned) != 0;
  const uint32_t key_bytes = in.Get<uint32_t>(), num_sets = in.Get<uint32_t>();
  const uint64_t dim = in.Get<uint64_t>();
  const uint32_t world_size = in.Get<uint32_t>(), rank = in.Get<uint32_t>();
  const int32_t owner = in.Get<int32_t>();
  if (key_bytes > 8) file->Refuse("keys of " + std::to_string(key_bytes) + " bytes");
  if (world_size > INT32_MAX || rank > INT32_MAX || in.Get<uint32_t>() != 0) {
    file->Refuse("rank " + std::to_string(rank) + " of " + std::to_string(world_size) + " makes no sense");
  }
  if (version < 5 && VersionOf(owner) != (version > 2 ? version : 1)) {
    file->Refuse("owner " + std::to_string(owner) + " makes no sense in version " + std::to_string(version));
  }
  if (num_sets > kMaxSets) file->Refuse(std::to_string(num_sets) + " slot sets");
  head.key_bytes = static_cast<int>(key_bytes);
  head.dim = static_cast<int64_t>(dim);
  head.world_size = static_cast<int>(world_size);
  head.rank = static_cast<int>(rank);
  head.owner = owner;
  head.generation = in.Text("generation");
  head.table = in.Text("table name");
  for (uint32_t s = 0; s < num_sets; ++s)
    head.sets.push_back(ReadSlotSet(*file, &in, head.is_delta || (flags & kInLog) != 0));
  if ((flags & kInLog) != 0) {
    head.log.path = in.Text("path of a log");
    if (head.log.path.empty()) file->Refuse("a log without a path");
    for (int64_t* x : {&head.log.floats, &head.log.block_bytes, &head.log.segment_bytes, &head.log.rows})
      *x = static_cast<int64_t>(in.Get<uint64_t>());
    head.log.version = in.Get<uint32_t>();
    head.log.digest = in.Get<uint64_t>();
    for (uint32_t s = 0; s < num_sets; ++s) {
      head.log.offsets.push_back(static_cast<int64_t>(in.Get<uint64_t>()));
      head.log.stamps.push_back(static_cast<int64_t>(in.Get<uint64_t>()));
    }
  }
  if (!in.AtEnd()) file->Refuse("the head is longer than what it says");
  const std::string error = HeadError(head);
  if (!error.empty()) file->Refuse(error);
  return head;
}

// Refuses keys that the rank of the file cannot have held.
void CheckKeys(const BlockReader& file, const ShardHead& head, const uint64_t* keys, int64_t n) {
  const Partition partition = {head.world_size, head.owner, head.is_unsigned};
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = keys[i];
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
}

// The keys of a block of erased ones, checked.
const uint64_t* ReadErased(const BlockReader& file, const ShardHead& head, const BlockReader::Block& block,
                           int64_t* n) {
  uint64_t count = 0;
  if (block.n >= 8) std::memcpy(&count, block.data, 8);
  if (count < 1 || (block.n - 8) % 8 != 0 || static_cast<uint64_t>((block.n - 8) / 8) != count) {
    file.Refuse("a block of " + std::to_string(block.n) + " bytes cannot hold " + std::to_string(count) +
                " erased keys");
  }
  *n = static_cast<int64_t>(count);
  const uint64_t* keys = reinterpret_cast<const uint64_t*>(block.data + 8);
  CheckKeys(file, head, keys, *n);
  return keys;
}

// The rows of a block, checked.
TableStore::RowValues ReadRows(const BlockReader& file, const ShardHead& head, const BlockReader::Block& block) {
  const int64_t row_bytes = RowBytes(head);
  uint64_t n = 0;
  if (block.n >= 8) std::memcpy(&n, block.data, 8);
  if (n < 1 || (block.n - 8) % row_bytes != 0 || static_cast<uint64_t>((block.n - 8) / row_bytes) != n) {
    file.Refuse("a block of " + std::to_string(block.n) + " bytes cannot hold " + std::to_string(n) + " rows of " +
                std::to_string(row_bytes));
  }
  TableStore::RowValues values;
  values.n = static_cast<int64_t>(n);
  values.keys = reinterpret_cast<const uint64_t*>(block.data + 8);
  values.rows = reinterpret_cast<const float*>(values.keys + values.n);
  const float* at = values.rows + values.n * head.dim;
  for (const SlotSetInfo& set : head.sets) {
    values.slots.push_back(at);
    at += values.n * set.rule.slot_floats(head.dim);
  }
  CheckKeys(file, head, values.keys, values.n);
  return values;
}

}  // namespace

int64_t RowBytes(const ShardHead& head) {
  int64_t floats = head.dim;
  for (const SlotSetInfo& set : head.sets) floats += set.rule.slot_floats(head.dim);
  return 8 + 4 * floats;
}

void WriteHead(const ShardHead& head, BlockWriter* file) {
  std::string error = HeadError(head);
  auto check = [&](const char* what, const std::string& text) {
    if (error.empty() && static_cast<int64_t>(text.size()) > kMaxNameBytes)
      error = what + (" has " + std::to_string(text.size())) + " bytes, of at most " + std::to_string(kMaxNameBytes);
  };
  check("the table's name", head.table);
  check("the generation", head.generation);
  for (const SlotSetInfo& set : head.sets) check("a slot set's name", set.name);
  const std::vector<char> bytes = error.empty() ? HeadBytes(head) : std::vector<char>();
  if (static_cast<int64_t>(bytes.size()) > kBlockBytes)
    error = "its names and steps have " + std::to_string(bytes.size()) + " bytes, of at most " +
            std::to_string(kBlockBytes);
  if (!error.empty())
    throw InvalidArgument("table '" + head.table.substr(0, 100) + "' fits no checkpoint: " + error + ".");
  std::memcpy(file->Payload(static_cast<int64_t>(bytes.size())), bytes.data(), bytes.size());
  file->Write(BlockType::kHead);
}

std::vector<char> HeadBytes(const ShardHead& head) {
  HeadWriter out;
  const bool in_log = !head.log.path.empty(), has_runs = head.is_delta || in_log;
  out.Put(in_log ? uint32_t{5} : std::max(VersionOf(head.owner), head.is_delta ? uint32_t{2} : uint32_t{1}));
  out.Put((head.hashed ? kHashed : 0u) | (head.is_unsigned ? kUnsigned : 0u) | (head.is_delta ? kDelta : 0u) |
          (in_log ? kInLog : 0u));
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
    out.Put(SlotWord(set.rule));
    UpdateRule rule = set.rule;
    for (const float* x : SettingsOf(&rule)) out.Put(*x);
    out.Put(static_cast<uint64_t>(set.calls));
    out.Put(static_cast<uint32_t>(has_runs ? set.missed.size() : 0));
    if (!has_runs) continue;
    for (const AlphaHistory::Run& run : set.missed) {
      out.Put(static_cast<uint64_t>(run.first_call));
      out.Put(run.alpha);
      if (set.rule.has_extra()) out.Put(run.extra);
    }
  }
  if (!in_log) return out.bytes();
  out.Text(head.log.path);
  for (const int64_t x : {head.log.floats, head.log.block_bytes, head.log.segment_bytes, head.log.rows})
    out.Put(static_cast<uint64_t>(x));
  out.Put(head.log.version);
  out.Put(head.log.digest);
  for (size_t s = 0; s < head.sets.size(); ++s) {
    out.Put(static_cast<uint64_t>(head.log.offsets[s]));
    out.Put(static_cast<uint64_t>(head.log.stamps[s]));
  }
  return out.bytes();
}

TableStore::RowTarget RowsBlock(const ShardHead& head, int64_t n, BlockWriter* file) {
  char* payload = file->Payload(8 + n * RowBytes(head));
  const uint64_t count = static_cast<uint64_t>(n);
  std::memcpy(payload, &count, 8);
  TableStore::RowTarget target;
  target.keys = reinterpret_cast<uint64_t*>(payload + 8);
  target.rows = reinterpret_cast<float*>(target.keys + n);
  float* at = target.rows + n * head.dim;
  for (const SlotSetInfo& set : head.sets) {
    target.slots.push_back(at);
    at += n * set.rule.slot_floats(head.dim);
  }
  return target;
}

ShardHead ReadShardHead(const std::string& path) {
  BlockReader file(path);
  return ReadHead(&file);
}

ShardSummary ReadShard(const std::string& path, const ShardVisitor& visitor) {
  BlockReader file(path);
  ShardSummary summary;
  summary.bytes = file.bytes();
  summary.head = ReadHead(&file);
  visitor.head(file, summary.head);
  const int64_t limit = std::max(kBlockBytes, 8 + RowBytes(summary.head));
  const bool in_log = !summary.head.log.path.empty();
  std::vector<uint64_t> bits;
  for (;;) {
    const BlockReader::Block block = file.Next(limit);
    if (block.type == BlockType::kEnd) break;
    if (block.type == BlockType::kHead) file.Refuse("a second head");
    if (in_log != (block.type == BlockType::kRowBits)) file.Refuse("a block that such a shard does not have");
    if (in_log) {
      const size_t words = static_cast<size_t>(block.n / 8), has = bits.size();
      if (block.n % 8 != 0 || static_cast<int64_t>(has + words) > (summary.head.log.rows + 63) / 64)
        file.Refuse("more bits than rows");
      bits.resize(has + words);
      std::memcpy(bits.data() + has, block.data, static_cast<size_t>(block.n));
      continue;
    }
    if (block.type == BlockType::kErased) {
      if (!summary.head.is_delta) file.Refuse("erased keys in a full save");
      if (summary.rows > 0) file.Refuse("erased keys behind rows");
      int64_t n = 0;
      const uint64_t* keys = ReadErased(file, summary.head, block, &n);
      summary.erased += n;
      visitor.erased(file, keys, n);
      continue;
    }
    const TableStore::RowValues values = ReadRows(file, summary.head, block);
    summary.rows += values.n;
    visitor.rows(file, values);
  }
  if (in_log) {
    if (static_cast<int64_t>(bits.size()) != (summary.head.log.rows + 63) / 64) file.Refuse("bits of rows are missing");
    summary.rows = ScanVersion(summary.head, bits, kBlockBytes / RowBytes(summary.head) + 1,
                               [&](const TableStore::RowValues& values) {
                                 CheckKeys(file, summary.head, values.keys, values.n);
                                 visitor.rows(file, values);
                               });
  }
  if (file.rows() != summary.rows || file.erased() != summary.erased) {
    file.Refuse("the end block counts " + std::to_string(file.rows()) + " rows and " + std::to_string(file.erased()) +
                " erased keys, and " + std::to_string(summary.rows) + " and " + std::to_string(summary.erased) +
                " are here");
  }
  summary.digest = file.digest();
  return summary;
}

}  // namespace sok
