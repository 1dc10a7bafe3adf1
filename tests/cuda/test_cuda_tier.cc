// DeviceTier beside EmbeddingTable: random programs give the same on both, whatever lies on the device meanwhile.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "files.h"
#include "tiers.h"

namespace {

constexpr int64_t kDimOf = 3;

// What a random program is made for.
struct Kind {
  const char* name;
  sok::TableConfig config;
  int64_t file_bytes = 0;  // of the memory of a table over a file; 0: without
  uint64_t num_keys = 200;
  int rows_of_budget = 1;  // times the smallest budget
};

sok::TableConfig Hashed() {
  sok::TableConfig config = Config(kDimOf, 4000);
  config.storage.device_bytes = 1;  // Small() sets it
  return config;
}

sok::TableConfig WithPolicies(int64_t after, int64_t older_than, int64_t every) {
  sok::TableConfig config = Hashed();
  config.policies.after = after;
  config.policies.older_than = older_than;
  config.policies.every = every;
  return config;
}

// Keys of four buckets, so that rows are shared and buckets are crowded; or the first numbers.
Keys KeysOf(const Kind& kind) {
  const sok::Partition partition = kind.config.partition();
  Keys keys;
  for (uint64_t i = 0; keys.size() < kind.num_keys; ++i) {
    const uint64_t key = kind.config.hashed ? sok::KeyOfBucketHash((i % 4) * 1000 << 52 | i / 4) : i;
    if (partition.OwnerOf(key) == kind.config.rank) keys.push_back(key);
  }
  return keys;
}

class Program {
 public:
  Program(const Kind& kind, uint32_t seed) : kind_(kind), keys_(KeysOf(kind)), random_(seed) {
    kind_.config.storage.device_bytes = kind.rows_of_budget * LeastDeviceBytes(kind.config);
    pair_ = MakePair();
  }

  void Run(int steps) {
    for (int step = 1; step <= steps; ++step) {
      std::vector<TierPair::Found> looked_up;
      for (uint64_t calls = 1 + Draw(2); calls > 0; --calls)
        looked_up.push_back(pair_->Lookup(Some(22), true, Draw(4) > 0, Draw(2) > 0));
      if (Draw(3) == 0) pair_->Lookup(Some(40), false, Draw(4) > 0, Draw(2) > 0);
      if (Draw(3) == 0) Disturb();
      for (const TierPair::Found& found : looked_up) Update(found);
      pair_->EndStep();
      if (Draw(3) == 0) Disturb();
      if (Draw(4) == 0) Save();
      if (Draw(3) == 0) pair_->Compare(keys_);
      // Of a row that is erased the tier may not have heard that it had changed.
      CHECK(pair_->tier().tier->Changes().rows <= pair_->twin().Changes().rows);
      if (check::failures > 0) {
        check::Fail(__FILE__, __LINE__, std::string(kind_.name) + ", step " + std::to_string(step));
        return;
      }
    }
    pair_->Compare(keys_);
    const sok::StorageCounts counts = pair_->tier().counts();
    CHECK(counts.rows_on_device <= counts.most_rows_on_device);
    CHECK(counts.device_hits > 0 && counts.device_misses > 0);
  }

 private:
  uint64_t Draw(uint64_t n) { return random_() % n; }
  Keys Some(uint64_t most) {
    Keys some(Draw(most + 1));
    const uint64_t from = Draw(2) == 0 ? 0 : Draw(keys_.size());
    for (uint64_t& key : some) key = keys_[(from + Draw(Draw(3) == 0 ? keys_.size() : 30)) % keys_.size()];
    return some;
  }
  std::unique_ptr<TierPair> MakePair() {
    sok::TableConfig mine = kind_.config, twin = kind_.config;
    if (kind_.file_bytes != 0) {
      mine.storage.memory_bytes = twin.storage.memory_bytes = kind_.file_bytes;
      mine.storage.path = folder_.path();
      twin.storage.path = folder_of_twin_.path();
    }
    return std::make_unique<TierPair>(mine, twin);
  }

  void Update(const TierPair::Found& found) {
    // Sums of these are exact.
    Floats grads(found.tier.size() * kDimOf);
    for (float& g : grads) g = static_cast<float>(static_cast<int>(Draw(17)) - 8) / 8.0f;
    for (const uint64_t of : {Draw(2), Draw(5)}) {
      if (of < 2)
        pair_->Apply(Rule(of == 0 ? "adam" : "adagrad", ++calls_, 0.05), of == 0 ? "exact" : "ada", found, grads);
    }
  }

  void Disturb() {
    const Keys some = Some(12);
    switch (Draw(7)) {
      case 0:
        Assign(pair_->tier().tier.get(), some, 0.25f);
        Assign(&pair_->twin(), some, 0.25f);
        break;
      case 1: {
        const int64_t mine = pair_->tier().tier->Erase(some.data(), Size(some));
        CHECK_EQ(mine, pair_->twin().Erase(some.data(), Size(some)));
        break;
      }
      case 2:
        RestoreSome(some);
        break;
      case 3: {
        std::vector<TableStore::SlotSetInfo> infos;
        for (const auto& set : pair_->twin().SlotSets())
          if (set.name == "exact") infos.push_back({set.name, set.rule, set.calls + 2, {{set.calls + 1, 0.01f, 0.0f}}});
        const std::string name = "skip" + std::to_string(++saves_);
        pair_->Both([&](TableStore* store) { store->SkipCalls(name, infos); });
        break;
      }
      case 4: {
        const std::unique_ptr<TierPair> other = MakePair();
        if (Draw(2) == 0) {
          other->Lookup(some, true);
          other->EndStep();
        }
        if (has_snapshot_) break;
        const int64_t step = pair_->twin().step;
        other->tier().tier->Swap(pair_->tier().tier.get());
        other->twin().Swap(&pair_->twin());
        other->Compare(keys_);
        pair_->Compare(keys_);
        if (Draw(2) == 0) other->Lookup(Some(10), true);
        pair_->tier().tier->Swap(other->tier().tier.get());
        pair_->twin().Swap(&other->twin());
        CHECK_EQ(pair_->twin().step.load(), step);
        base_ = false;
        break;
      }
      case 5:
        pair_->Both([&](TableStore* store) { store->Reserve(cpu, static_cast<int64_t>(keys_.size()), Draw(2) == 0); });
        break;
      default:
        ReadSlots(some);
    }
  }

  void RestoreSome(const Keys& some) {
    Collector saved = ReadAll(pair_->twin());
    for (auto it = saved.found.begin(); it != saved.found.end();)
      it = std::find(some.begin(), some.end(), it->first) == some.end() ? saved.found.erase(it) : std::next(it);
    for (auto& [key, kept] : saved.found) kept.row[0] += 0.5f;
    if (Draw(2) == 0) pair_->Both([&](TableStore* store) { store->Erase(some.data(), Size(some) / 2); });
    TableStore::Columns columns;
    if (Draw(3) == 0) columns = {kDimOf, 1, 0, 2};
    const int64_t mine = Restore(pair_->tier().tier.get(), saved, columns);
    CHECK_EQ(mine, Restore(&pair_->twin(), saved, columns));
  }

  void ReadSlots(const Keys& some) {
    const Keys there = pair_->twin().Keys();
    Keys asked;
    for (const uint64_t key : some)
      if (std::find(there.begin(), there.end(), key) != there.end()) asked.push_back(key);
    for (const auto& set : pair_->twin().SlotSets()) {
      if (set.name == sok::kHistorySet) continue;
      const auto floats = static_cast<size_t>(pair_->twin().SlotFloats(set.name));
      CHECK_EQ(static_cast<size_t>(pair_->tier().tier->SlotFloats(set.name)), floats);
      Floats mine(asked.size() * floats), theirs(mine.size());
      Ids stamps(asked.size()), expected(asked.size());
      pair_->tier().tier->Slots(set.name, asked.data(), Size(asked), mine.data(), stamps.data());
      pair_->twin().Slots(set.name, asked.data(), Size(asked), theirs.data(), expected.data());
      CheckNear(mine, theirs);
      CHECK(stamps == expected);
    }
  }

  void Save() {
    const std::string name = Draw(5) == 0 ? "" : "save" + std::to_string(++saves_);
    const auto read = [&](const auto& call) {
      Collector mine(kDimOf, 5), theirs(kDimOf, 5);
      call(pair_->tier().tier.get(), &mine);
      call(&pair_->twin(), &theirs);
      CheckSameRows(mine, theirs);
    };
    if (has_snapshot_) {
      read([](TableStore* store, Collector* to) { store->ReadSnapshot(cpu, to); });
      has_snapshot_ = false;
    } else if (Draw(2) == 0) {
      const auto of = base_ && Draw(2) == 0 ? TableStore::SnapshotOf::kChanges : TableStore::SnapshotOf::kAllRows;
      pair_->Both([&](TableStore* store) { store->BeginSave(of); });
      has_snapshot_ = true;
      return;
    } else {
      pair_->Both([&](TableStore* store) { store->BeginSave(TableStore::SnapshotOf::kNothing); });
      if (base_ && Draw(2) == 0) {
        read([](TableStore* store, Collector* to) { store->ReadChanges(cpu, to); });
      } else {
        read([](TableStore* store, Collector* to) { store->ReadAll(cpu, to); });
      }
    }
    pair_->Both([&](TableStore* store) { store->EndSave(name); });
    base_ = base_ || !name.empty();
  }

  Kind kind_;
  const Keys keys_;
  const Folder folder_, folder_of_twin_;
  std::mt19937 random_;
  std::unique_ptr<TierPair> pair_;
  int64_t calls_ = 0, saves_ = 0;
  bool base_ = false, has_snapshot_ = false;
};

// One program of each kind; with SOK_TEST_SLOW=1 five.
void Run(const Kind& kind) {
  const uint32_t programs = std::getenv("SOK_TEST_SLOW") != nullptr ? 5 : 1;
  for (uint32_t seed = 1; seed <= programs; ++seed) Program(kind, seed).Run(kFewer == 1 ? 20 : 8);
}

}  // namespace

TEST(RowsGoHomeAndComeBackAsTheyWere) {
  Run({"hashed", Hashed()});
  Kind roomy{"room for three", Hashed()};
  roomy.rows_of_budget = 3;
  Run(roomy);
  sok::TableConfig identity = Hashed();
  identity.hashed = false;
  Run({"identity", identity});
}

TEST(KeysAreAdmittedAsOnTheHost) {
  Run({"after", WithPolicies(2, 6, 2)});
  Kind luck{"luck", Hashed()};
  luck.config.policies.admit_below = uint64_t{1} << 63;
  luck.config.policies.chance_seed = 5;
  Run(luck);
  Kind filter{"filter", WithPolicies(2, 0, 1)};
  filter.config.policies.bloom_cells = 64;
  filter.config.policies.bloom_hashes = 2;
  Run(filter);
  Kind constant{"constant", WithPolicies(3, 9, 3)};
  constant.config.policies.reads_constant = true;
  constant.config.policies.constant = 0.125f;
  Run(constant);
  Kind shared{"shared", WithPolicies(3, 5, 2)};
  shared.config.policies.shared_rows = 4096;
  Run(shared);
}

TEST(RowsLeaveAsOnTheHost) {
  Run({"older", WithPolicies(0, 4, 2)});
  Kind norm{"norm", WithPolicies(0, 0, 3)};
  norm.config.policies.norm_below = 0.4f;
  Run(norm);
  Kind full{"when full", Hashed()};
  full.config.policies.max_rows = 20 << sok::kBucketBits;
  full.config.policies.when_full = true;
  full.config.policies.keeps_frequent = true;
  Run(full);
  Kind most{"max_rows", WithPolicies(0, 12, 2)};
  most.config.policies.max_rows = 16 << sok::kBucketBits;
  Run(most);
  Kind identity{"identity that evicts", WithPolicies(0, 4, 2)};
  identity.config.hashed = false;
  Run(identity);
}

TEST(ATableOverAFileDoesTheSame) {
  setenv("SOK_STORAGE_FRAMES", "40", 1);
  Kind plain{"over a file", Hashed()};
  plain.file_bytes = int64_t{64} << 20;
  Run(plain);
  Kind evicts{"over a file, with policies", WithPolicies(2, 5, 2)};
  evicts.file_bytes = int64_t{64} << 20;
  evicts.config.policies.shared_rows = 4096;
  Run(evicts);
  unsetenv("SOK_STORAGE_FRAMES");
}

TEST(AShardDoesWhatTheWholeDoes) {
  Kind shard{"shard", WithPolicies(2, 6, 2)};
  shard.config.world_size = 3;
  shard.config.rank = 1;
  shard.config.owner = sok::kByHash;
  shard.config.policies.shared_rows = 4096;
  Run(shard);
  Kind identity{"shard of an identity table", Hashed()};
  identity.config.world_size = 3;
  identity.config.rank = 2;
  identity.config.hashed = false;
  Run(identity);
}
