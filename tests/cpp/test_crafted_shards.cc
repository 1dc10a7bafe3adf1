// Shards that are damaged, and those whose sums are right and whose numbers are not.
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "files.h"
#include "shards.h"
#include "sok/block_file.h"
#include "sok/error.h"
#include "sok/file_error.h"

namespace {

// A file of these blocks, with right checksums: what somebody could make who knows the format.
void Craft(const std::string& path, const std::vector<std::pair<sok::BlockType, std::string>>& blocks, int64_t rows,
           int64_t erased = 0) {
  sok::BlockWriter file(path);
  for (const auto& [type, payload] : blocks) {
    std::memcpy(file.Payload(static_cast<int64_t>(payload.size())), payload.data(), payload.size());
    file.Write(type);
  }
  file.Finish(rows, erased);
}

std::string HeadOf(const std::string& path) {
  sok::BlockReader file(path);
  const auto block = file.Next(sok::kBlockBytes);
  return {block.data, static_cast<size_t>(block.n)};
}

template <class T>
std::string Changed(std::string bytes, size_t at, T value) {
  return bytes.replace(at, sizeof(value), reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string RowsBlock(uint64_t n, const std::vector<uint64_t>& keys, size_t floats) {
  std::string bytes(8 + 8 * keys.size() + 4 * floats, '\0');
  std::memcpy(&bytes[0], &n, 8);
  if (!keys.empty()) std::memcpy(&bytes[8], keys.data(), 8 * keys.size());
  return bytes;
}

// Of a table with both sets.
std::string HeadOfTrained(const Folder& folder) {
  Table table(Shard(0, 1));
  Train(&table, 4);
  Save(&table, folder / "a");
  return HeadOf(folder / "a");
}

}  // namespace

TEST(EveryFlippedByteAndEveryCutIsNoticed) {
  const Folder folder;
  Table table(Shard(0, 1));
  Train(&table, 4);
  Save(&table, folder / "a");
  const std::string bytes = ReadFile(folder / "a");
  for (size_t i = 0; i < bytes.size(); ++i) {
    WriteFile(folder / "b", Changed(bytes, i, static_cast<char>(bytes[i] ^ (1 << (i % 8)))));
    CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, (folder / "b") + ": at offset ");
    WriteFile(folder / "b", bytes.substr(0, i));
    CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, (folder / "b") + ": at offset ");
  }
}

TEST(CraftedHeadsAreRefused) {
  const Folder folder;
  const std::string head = HeadOfTrained(folder);
  auto refuses = [&](const std::string& changed, const std::string& why) {
    Craft(folder / "b", {{sok::BlockType::kHead, changed}}, 0);
    CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, why);
  };
  refuses(Changed(head, 0, uint32_t{6}), "version 6 of the format; this sok reads up to version 5");
  refuses(Changed(head, 0, uint32_t{5}), "unknown flags");  // rows in a log are of version 5, and only they
  // Rows by hash are of version 3, rows on some ranks of version 4, and only they.
  refuses(Changed(head, 0, uint32_t{3}), "owner -1 makes no sense");
  refuses(Changed(head, 32, int32_t{sok::kByHash}), "owner -2 makes no sense");
  refuses(Changed(head, 32, int32_t{-3}), "owner -3 makes no sense");
  refuses(Changed(head, 0, uint32_t{4}), "owner -1 makes no sense in version 4");
  const auto on_ranks = [&](int first, int count, bool by_hash) {
    return Changed(Changed(head, 0, uint32_t{4}), 32, int32_t{sok::OwnerOfRanks(first, count, by_hash)});
  };
  refuses(on_ranks(0, 2, false), "makes no sense");
  refuses(on_ranks(1, 1, false), "makes no sense");
  refuses(on_ranks(0, 0, false), "makes no sense");
  Craft(folder / "b", {{sok::BlockType::kHead, on_ranks(0, 1, true)}}, 0);
  CHECK_EQ(sok::VerifyShard(folder / "b").head.owner, sok::OwnerOfRanks(0, 1, true));
  refuses(Changed(head, 0, uint32_t{0}), "version 0");
  refuses(Changed(head, 4, uint32_t{4}), "unknown flags");
  refuses(Changed(head, 8, uint32_t{3}), "keys of 3 bytes");
  refuses(Changed(head, 12, uint32_t{0xFFFFFFFF}), "4294967295 slot sets");
  refuses(Changed(head, 12, uint32_t{3}), "too short");
  refuses(Changed(head, 12, uint32_t{1}), "longer than what it says");
  refuses(Changed(head, 16, uint64_t{0}), "rows of dim 0");
  refuses(Changed(head, 16, ~uint64_t{0}), "rows of dim 18446744073709551615");
  refuses(Changed(head, 24, uint32_t{0}), "makes no sense");
  refuses(Changed(head, 28, uint32_t{1}), "rank 1 of 1");
  refuses(Changed(head, 32, int32_t{5}), "owner 5");
  refuses(Changed(head, 40, uint32_t{70000}), "generation has 70000 bytes");
  refuses(Changed(head, 40, uint32_t{60000}), "too short");
  refuses("", "too short");
  const size_t rule = head.find("adam", head.find("adam") + 4);
  refuses(Changed(head, rule, 'x'), "unknown rule 'xdam'");
  refuses(Changed(head, rule + 4, uint32_t{9}), "has 9 slots instead of 2");
  refuses(Changed(head, rule + 8, 0x7FC00000), "not finite");
  refuses(Changed(head, rule + 12, 1.0f), "beta_1 must lie in [0, 1)");
  refuses(Changed(head, rule + 12, -0.5f), "beta_1 must lie in [0, 1)");
  refuses(Changed(head, rule + 16, 2.0f), "beta_2 must lie in [0, 1)");
  refuses(Changed(head, rule + 20, 0.0f), "1 - beta_1 must not be 0.0");
  refuses(Changed(head, rule + 24, 0.5f), "1 - beta_2 must not be 0.5");
  refuses(Changed(Changed(head, rule + 12, 0.9999f), rule + 20, 0.0001f), "must be at most 0.999");
  refuses(Changed(head, rule + 32, ~uint64_t{0}), "calls");
  refuses(Changed(head, rule + 40, uint32_t{1}), "1 runs");
  Craft(folder / "b", {{sok::BlockType::kRows, head}}, 0);
  CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, "does not begin with its head");
  Craft(folder / "b", {{sok::BlockType::kHead, head}, {sok::BlockType::kHead, head}}, 0);
  CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, "a second head");
  Craft(folder / "b", {{sok::BlockType::kHead, head}, {sok::BlockType::kErased, ""}}, 0);
  CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, "erased keys");
}

// The head of a table with more sets like its first.
std::string WithMoreSets(std::string head, uint32_t count, uint64_t dim) {
  const size_t first = head.find("adam") - 4, set_bytes = 8 + 8 + 4 + 24 + 8 + 4;
  for (uint32_t i = 0; i < count; ++i) {
    std::string set = head.substr(first, set_bytes);
    set[4] = static_cast<char>('A' + i);
    head += set;
  }
  return Changed(Changed(head, 12, count + 2), 16, dim);
}

// A block holds one row at least, so what a head says of a row is what its reader may need.
TEST(RowsThatNeedTooMuchMemoryAreRefusedByTheHead) {
  const Folder folder;
  const std::string head = HeadOfTrained(folder);
  const auto kHead = sok::BlockType::kHead;
  Craft(folder / "b", {{kHead, WithMoreSets(head, 2, 3)}}, 0);
  CHECK_EQ(sok::VerifyShard(folder / "b").head.sets.size(), size_t{4});  // the crafting itself is right
  Craft(folder / "b", {{kHead, WithMoreSets(head, 8, 1 << 20)}}, 0);
  CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, "rows of 83886088 bytes with their slots");
  Craft(folder / "b", {{kHead, WithMoreSets(head, 20, 3)}}, 0);
  CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, "21 slot sets of rules that decay");
}

TEST(CraftedRowsAreRefusedAndNothingElseIsStored) {
  const Folder folder;
  Table saved(Shard(1, 2));
  saved.Assign({1}, 1.0f);
  Save(&saved, folder / "a");  // no slots: 20 bytes a row
  const std::string head = HeadOf(folder / "a");
  auto refuses = [&](const std::string& rows, int64_t count, const std::string& why) {
    Table table(Shard(0, 1));
    Craft(folder / "b", {{sok::BlockType::kHead, head}, {sok::BlockType::kRows, rows}}, count);
    CHECK_THROWS(Load(&table, folder / "b"), sok::DamagedFile, why);
  };
  refuses("", 0, "cannot hold");
  refuses("abc", 0, "cannot hold");
  refuses(RowsBlock(0, {}, 0), 0, "cannot hold 0 rows");
  refuses(RowsBlock(2, {1}, 3), 2, "cannot hold 2 rows");
  refuses(RowsBlock(~uint64_t{0}, {1}, 3), 1, "cannot hold 18446744073709551615 rows");
  refuses(RowsBlock(uint64_t{1} << 61, {1}, 3), 1, "cannot hold");
  refuses(RowsBlock(1, {1}, 4), 1, "cannot hold 1 rows");
  refuses(RowsBlock(1, {2}, 3), 1, "key 2 does not belong to rank 1 of 2");
  refuses(RowsBlock(2, {1, 1}, 6), 2, "twice");
  refuses(RowsBlock(1, {1}, 3), 2, "the end block counts 2 rows and 0 erased keys, and 1 and 0 are here");
  Table table(Shard(0, 1));
  Craft(folder / "b", {{sok::BlockType::kHead, head}, {sok::BlockType::kRows, RowsBlock(1, {1}, 3)}}, 1);
  CHECK_EQ(Load(&table, folder / "b").stored, 1);  // the crafting itself is right
}

TEST(CraftedDeltasAreRefused) {
  const Folder folder;
  Table table(Shard(1, 2));
  Train(&table, 20);
  table.native().BeginSave();
  table.native().EndSave("g0");
  Train(&table, 4);
  table.native().BeginSave();
  sok::SaveShardChanges({kThreads}, table.native(), 8, "g1", folder / "a");
  const std::string head = HeadOf(folder / "a");
  auto refuses = [&](const std::string& changed, const std::vector<std::pair<sok::BlockType, std::string>>& blocks,
                     int64_t erased, const std::string& why) {
    auto all = blocks;
    all.emplace(all.begin(), sok::BlockType::kHead, changed);
    Craft(folder / "b", all, 0, erased);
    CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, why);
  };
  Craft(folder / "b", {{sok::BlockType::kHead, head}, {sok::BlockType::kErased, RowsBlock(1, {1}, 0)}}, 0, 1);
  CHECK_EQ(sok::VerifyShard(folder / "b").erased, 1);  // the crafting itself is right
  const auto kErased = sok::BlockType::kErased;
  refuses(head, {{kErased, ""}}, 0, "cannot hold 0 erased keys");
  refuses(head, {{kErased, RowsBlock(0, {}, 0)}}, 0, "cannot hold 0 erased keys");
  refuses(head, {{kErased, RowsBlock(2, {1}, 0)}}, 2, "cannot hold 2 erased keys");
  refuses(head, {{kErased, RowsBlock(~uint64_t{0}, {1}, 0)}}, 1, "cannot hold 18446744073709551615 erased keys");
  refuses(head, {{kErased, RowsBlock(1, {2}, 0)}}, 1, "key 2 does not belong to rank 1 of 2");
  refuses(head, {{kErased, RowsBlock(1, {1}, 0)}}, 2, "counts 0 rows and 2 erased keys, and 0 and 1 are here");
  refuses(head, {{sok::BlockType::kRows, RowsBlock(1, {1}, 12)}, {kErased, RowsBlock(1, {1}, 0)}}, 1,
          "erased keys behind rows");
  refuses(Changed(Changed(head, 0, uint32_t{1}), 4, uint32_t{4}), {}, 0, "unknown flags");
  refuses(Changed(head, 4, uint32_t{8}), {}, 0, "unknown flags");
  refuses(Changed(head, 4, uint32_t{1}), {}, 0, "runs in a full save");
  const size_t rule = head.find("adam", head.find("adam") + 4);  // then slots, six settings, calls and the runs
  uint32_t num_runs;
  std::memcpy(&num_runs, &head[rule + 40], 4);
  CHECK(num_runs >= 2);
  refuses(Changed(head, rule + 40, uint32_t{1000000}), {}, 0, "has 1000000 runs");
  refuses(Changed(head, rule + 44, uint64_t{0}), {}, 0, "a run that begins at call 0 of 6");
  refuses(Changed(head, rule + 44, uint64_t{7}), {}, 0, "a run that begins at call 7 of 6");
  refuses(Changed(head, rule + 56, uint64_t{4}), {}, 0, "a run that begins at call 4 of 6");
  refuses(Changed(head, rule + 52, 0x7FC00000), {}, 0, "with alpha nan");
  table.native().EndSave("");
}

TEST(KeysThatDoNotFitTheirDtypeAreRefused) {
  const Folder folder;
  for (const bool is_unsigned : {false, true}) {
    sok::TableConfig config = Shard(0, 1);
    config.is_unsigned = is_unsigned;
    Table table(config), other(config);
    sok::SaveShard({kThreads}, table.native(), 4, "g1", folder / "a");
    const std::string head = HeadOf(folder / "a");
    auto craft = [&](uint64_t key) {
      Craft(folder / "b", {{sok::BlockType::kHead, head}, {sok::BlockType::kRows, RowsBlock(1, {key}, 3)}}, 1);
    };
    for (const uint64_t key : {uint64_t{1} << 32, is_unsigned ? ~uint64_t{0} : uint64_t{1} << 31}) {
      craft(key);
      CHECK_THROWS(Load(&other, folder / "b", {}, 4), sok::DamagedFile, "does not fit the key dtype");
    }
    const uint64_t fits = is_unsigned ? 0xFFFFFFFFu : ~uint64_t{0};
    craft(fits);
    CHECK_EQ(Load(&other, folder / "b", {}, 4).stored, 1);
  }
}

// The head of a table whose one slot set is of a rule with two slots, and where in it the rule's name begins.
std::string HeadOfNamed(const Folder& folder, size_t* rule) {
  Table table(Shard(0, 1));
  UseNamedRule(&table, {1, 2});
  Save(&table, folder / "a");
  const std::string head = HeadOf(folder / "a");
  *rule = head.find(kNamedRule);
  return head;
}

TEST(CraftedNamedRulesAreRefused) {
  const Folder folder;
  size_t rule = 0;
  const std::string head = HeadOfNamed(folder, &rule);
  const size_t end = rule + std::string(kNamedRule).size();  // then slots, what they begin as, calls and runs
  auto refuses = [&](const std::string& changed, const std::string& why) {
    Craft(folder / "b", {{sok::BlockType::kHead, changed}}, 0);
    CHECK_THROWS(sok::VerifyShard(folder / "b"), sok::DamagedFile, why);
  };
  Craft(folder / "b", {{sok::BlockType::kHead, head}}, 0);
  CHECK(sok::VerifyShard(folder / "b").head.sets[0].rule.is_named());  // the crafting itself is right
  refuses(Changed(head, rule + 7, '['), "unknown rule 'RMSpr0p[velocity,momentum)'");
  refuses(Changed(head, end - 1, ','), "unknown rule 'RMSpr0p(velocity,momentum,'");
  refuses(Changed(head, rule + 16, '.'), "has 2 slots instead of 1");
  refuses(Changed(head, rule + 10, ','), "has 2 slots instead of 3");
  refuses(Changed(head, end, uint32_t{7}), "has 7 slots instead of 2");
  refuses(Changed(head, end + 4, 0x7F800000), "not finite");
  refuses(Changed(head, end + 24, 0x7FC00000), "not finite");  // of a slot that the rule does not have
  refuses(Changed(head, end + 28, ~uint64_t{0}), "calls");
  refuses(Changed(head, end + 36, uint32_t{1}), "1 runs in a full save");
}

// What a checksum cannot stop: bytes changed by somebody who sums them again. The sanitizers look on.
TEST(RandomChangesWithRightChecksumsDoNoHarm) {
  const Folder folder;
  Table table(Shard(0, 1));
  Train(&table, 6);
  Save(&table, folder / "a");
  std::vector<std::pair<sok::BlockType, std::string>> blocks;
  {
    sok::BlockReader file(folder / "a");
    for (;;) {
      const auto block = file.Next(sok::kBlockBytes);
      if (block.type == sok::BlockType::kEnd) break;
      blocks.emplace_back(block.type, std::string(block.data, static_cast<size_t>(block.n)));
    }
  }
  uint32_t x = 7;
  auto random = [&x](size_t below) { return ((x = x * 1664525u + 1013904223u) >> 8) % below; };
  int refused = 0, loaded = 0;
  for (int round = 0; round < 400; ++round) {
    auto changed = blocks;
    for (size_t changes = 1 + random(3); changes > 0; --changes) {
      std::string& payload = changed[random(changed.size())].second;
      if (payload.empty()) continue;
      const size_t at = random(payload.size());
      switch (random(4)) {
        case 0:
          payload[at] = static_cast<char>(random(256));
          break;
        case 1:
          payload.erase(at, 1 + random(9));
          break;
        case 2:
          payload.insert(at, std::string(1 + random(9), static_cast<char>(random(2) * 255)));
          break;
        default:
          payload = Changed(payload + std::string(8, '\0'), at, random(2) == 0 ? ~uint64_t{0} : uint64_t{1} << 40);
      }
    }
    Craft(folder / "b", changed, 6);
    Table other(Shard(0, 1, 50));
    try {
      Load(&other, folder / "b");
      ++loaded;
    } catch (const sok::DamagedFile&) {
      ++refused;
    } catch (const sok::InvalidArgument&) {
      ++refused;
    } catch (const sok::TableFull&) {
      ++refused;
    }
  }
  CHECK(refused > 200);
  CHECK(loaded > 10);  // a changed weight is a weight
}
