// The shards of a chain of saves, made one.
#include <algorithm>
#include <cstring>
#include <utility>

#include "shard_format.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/hash_table.h"
#include "sok/shard_file.h"

namespace sok {
namespace {

using SlotSetInfo = TableStore::SlotSetInfo;
using RowValues = TableStore::RowValues;

// Keys that newer links have given a row or taken it away.
class KeySet {
 public:
  explicit KeySet(const Cpu& cpu) : cpu_(cpu), keys_(int64_t{1} << 23) {}

  // found[i]: whether keys[i] is here.
  void Find(const uint64_t* keys, int64_t n, std::vector<bool>* found) {
    rows_.resize(static_cast<size_t>(n));
    keys_.Find(keys, n, rows_.data());
    found->resize(static_cast<size_t>(n));
    for (size_t i = 0; i < rows_.size(); ++i) (*found)[i] = rows_[i] != HashTable::kNoRow;
  }
  void Add(const std::vector<uint64_t>& keys) {
    scratch_.Reset();
    rows_.resize(keys.size());
    keys_.InsertMissing(cpu_, &scratch_, keys.data(), static_cast<int64_t>(keys.size()), rows_.data(),
                        [&](const bool* first, int64_t) {
                          for (size_t i = 0; i < keys.size(); ++i)
                            if (first[i]) rows_[i] = 0;
                        });
  }

 private:
  const Cpu& cpu_;
  HashTable keys_;
  Scratch scratch_;
  std::vector<uint32_t> rows_;
};

// Rows that were picked from a block, with their slots.
struct Picked {
  std::vector<uint64_t> keys;
  std::vector<float> rows;
  std::vector<std::vector<float>> slots;

  void Pick(const RowValues& from, const std::vector<int64_t>& chosen, int64_t dim,
            const std::vector<SlotSetInfo>& sets) {
    keys.clear();
    rows.clear();
    slots.assign(sets.size(), {});
    for (const int64_t i : chosen) {
      keys.push_back(from.keys[i]);
      rows.insert(rows.end(), from.rows + i * dim, from.rows + (i + 1) * dim);
      for (size_t s = 0; s < sets.size(); ++s) {
        const int64_t floats = sets[s].rule.slot_floats(dim);
        slots[s].insert(slots[s].end(), from.slots[s] + i * floats, from.slots[s] + (i + 1) * floats);
      }
    }
  }
  RowValues values() const {
    RowValues all{keys.data(), rows.data(), {}, static_cast<int64_t>(keys.size())};
    for (const auto& of_set : slots) all.slots.push_back(of_set.data());
    return all;
  }
};

// Whether the rows of two files of one save have missed the same. Ranks may number their calls from different beginnings.
bool SameSteps(const SlotSetInfo& a, const SlotSetInfo& b) {
  const UpdateRule &one = a.rule, &other = b.rule;
  if (one.rule != other.rule || one.beta_1 != other.beta_1 || one.beta_2 != other.beta_2 ||
      one.epsilon != other.epsilon || a.num_missed() != b.num_missed() || a.missed.size() != b.missed.size()) {
    return false;
  }
  for (size_t i = 0; i < a.missed.size(); ++i) {
    if (a.missed[i].alpha != b.missed[i].alpha || a.missed[i].extra != b.missed[i].extra ||
        a.missed[i].first_call - a.missed[0].first_call != b.missed[i].first_call - b.missed[0].first_call) {
      return false;
    }
  }
  return true;
}

// Gives the slot sets of a chain, as its newest link has them; for each link what its rows must be told of each set.
std::vector<SlotSetInfo> CollectSets(const std::vector<std::vector<std::string>>& links, ShardHead* head,
                                     std::vector<std::vector<SlotSetInfo>>* of_links) {
  std::vector<SlotSetInfo> all;
  bool is_first = true;
  of_links->resize(links.size());
  for (size_t l = links.size(); l-- > 0;) {
    for (const std::string& path : links[l]) {
      const ShardHead found = ReadShardHead(path);
      if (found.is_delta != (l > 0)) {
        throw DamagedFile(path + ": at offset 0: " + (l > 0 ? "all rows, where a delta" : "a delta, where all rows") +
                          " should be");
      }
      if (is_first) {
        head->is_unsigned = found.is_unsigned;
        head->key_bytes = found.key_bytes;
        head->dim = found.dim;
        head->table = found.table;
        is_first = false;
      }
      if (found.dim != head->dim || found.is_unsigned != head->is_unsigned || found.key_bytes != head->key_bytes ||
          found.table != head->table) {
        throw DamagedFile(path + ": at offset 0: the head is that of another table than the chain's");
      }
      for (const SlotSetInfo& set : found.sets) {
        auto same = [&set](const SlotSetInfo& other) { return other.name == set.name; };
        if (std::none_of(all.begin(), all.end(), same)) {
          all.push_back(set);
          all.back().missed.clear();
        }
        std::vector<SlotSetInfo>& here = (*of_links)[l];
        const auto before = std::find_if(here.begin(), here.end(), same);
        if (before == here.end()) {
          here.push_back(set);
        } else if (!SameSteps(*before, set)) {
          throw DamagedFile(path + ": at offset 0: slot set '" + set.name +
                            "' has other steps than in another file of the same save");
        }
      }
    }
  }
  return all;
}

// Brings rows of one link up to the last one, and writes them.
class Settler : public TableStore::RowSink {
 public:
  Settler(const Cpu& cpu, const ShardHead& head, BlockWriter* out) : cpu_(cpu), head_(head), out_(out) {}

  void Write(const std::vector<SlotSetInfo>& sets, const RowValues& values,
             const std::vector<std::vector<SlotSetInfo>>& later) {
    TableConfig config;
    config.name = head_.table;
    config.dim = head_.dim;
    config.capacity = values.n;
    config.is_unsigned = head_.is_unsigned;
    EmbeddingTable table(config);
    table.SkipCalls("", head_.sets);  // so that all sets are there, in the head's order
    scratch_.Reset();
    table.Restore(cpu_, &scratch_, sets, values);
    for (const std::vector<SlotSetInfo>& link : later) table.SkipCalls("", link);
    table.ReadAll(cpu_, this);
    rows += values.n;
  }

  int64_t Begin(int64_t, const std::vector<SlotSetInfo>&) override {
    return std::max<int64_t>(1, (kBlockBytes - 8) / RowBytes(head_));
  }
  TableStore::RowTarget Allocate(int64_t n) override { return RowsBlock(head_, n, out_); }
  void Commit() override { out_->Write(BlockType::kRows); }

  int64_t rows = 0;

 private:
  const Cpu& cpu_;
  const ShardHead& head_;
  BlockWriter* out_;
  Scratch scratch_;
};

}  // namespace

ShardSummary CompactShards(const Cpu& cpu, const std::vector<std::vector<std::string>>& links, ShardHead head,
                           int64_t passes, const std::string& path) {
  std::vector<std::vector<SlotSetInfo>> of_links;
  head.is_delta = false;
  head.sets = CollectSets(links, &head, &of_links);
  const Partition partition = {head.world_size, head.owner, head.is_unsigned};
  BlockWriter out(path);
  WriteHead(head, &out);
  Settler settler(cpu, head, &out);
  std::vector<bool> found;
  std::vector<int64_t> chosen;
  Picked picked;
  for (int64_t pass = 0; pass < passes; ++pass) {
    KeySet newer(cpu);
    // Positions of the keys that this pass and this file are about, and that no newer link knows.
    auto choose = [&](const uint64_t* keys, int64_t n) {
      newer.Find(keys, n, &found);
      chosen.clear();
      for (int64_t i = 0; i < n; ++i) {
        const uint64_t part = ((keys[i] * 0x9E3779B97F4A7C15ull) >> 32) % static_cast<uint64_t>(passes);
        if (!found[static_cast<size_t>(i)] && part == static_cast<uint64_t>(pass) &&
            partition.OwnerOf(keys[i]) == head.rank) {
          chosen.push_back(i);
        }
      }
    };
    for (size_t l = links.size(); l-- > 0;) {
      const std::vector<std::vector<SlotSetInfo>> later(of_links.begin() + static_cast<int64_t>(l) + 1, of_links.end());
      std::vector<SlotSetInfo> sets;  // of the file that is read
      ShardVisitor visitor;
      visitor.head = [&](const BlockReader&, const ShardHead& of_file) { sets = of_file.sets; };
      visitor.erased = [&](const BlockReader&, const uint64_t* keys, int64_t n) {
        choose(keys, n);
        std::vector<uint64_t> gone;
        for (const int64_t i : chosen) gone.push_back(keys[i]);
        newer.Add(gone);
      };
      visitor.rows = [&](const BlockReader&, const RowValues& values) {
        choose(values.keys, values.n);
        if (chosen.empty()) return;
        picked.Pick(values, chosen, head.dim, sets);
        settler.Write(sets, picked.values(), later);
        if (l > 0) newer.Add(picked.keys);
      };
      for (const std::string& file : links[l]) ReadShard(file, visitor);
    }
  }
  ShardSummary summary;
  summary.digest = out.digest();
  out.Finish(settler.rows, 0);
  summary.head = head;
  summary.rows = summary.held = settler.rows;
  summary.bytes = out.bytes();
  return summary;
}

}  // namespace sok
