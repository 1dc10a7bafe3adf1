// What the readers of a shard do with bytes that anybody may have made: one input is one file.
//
// The file is verified and, where that finds nothing wrong, loaded into tables. Whatever comes, it is read or refused with one
// of the errors that shard_file.h promises; anything else ends the process, as do the sanitizers. Of a file that was loaded
// the table is saved and loaded again: both files of ours must be equal byte by byte.
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "harness.h"
#include "sok/device.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/file_error.h"
#include "sok/shard_file.h"

namespace {

constexpr int64_t kCapacity = 300;  // files of more rows find the table full
constexpr int64_t kMaxDim = 512;    // an empty table maps 64 rows at once: 128 KiB

const sok::SerialExecutor kSerial;

std::string Bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

sok::TableConfig ConfigFor(const sok::ShardHead& head) {
  sok::TableConfig config;
  config.name = head.table;
  config.dim = head.dim;
  config.capacity = kCapacity;
  config.hashed = head.hashed;
  config.is_unsigned = head.is_unsigned;
  config.world_size = head.world_size;
  config.rank = head.rank;
  config.owner = head.owner;
  return config;
}

std::vector<std::pair<std::string, std::string>> AllSets(const sok::ShardHead& head) {
  std::vector<std::pair<std::string, std::string>> names;
  for (const auto& set : head.sets) names.emplace_back(set.name, set.name);
  return names;
}

// Nothing if the file is refused for what is in its rows, or the table has no room.
std::optional<sok::ShardSummary> Loaded(const std::string& path, const sok::ShardHead& head,
                                        const std::vector<std::pair<std::string, std::string>>& sets,
                                        sok::EmbeddingTable* table) {
  try {
    return sok::LoadShard({kSerial}, path, head.key_bytes, sets, table);
  } catch (const sok::DamagedFile&) {      // a key that comes twice
  } catch (const sok::InvalidArgument&) {  // a key beyond an identity table
  } catch (const sok::TableFull&) {
  }
  return {};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input = Folder() + "/input", saved = Folder() + "/saved", again = Folder() + "/again";
  Write(input, reinterpret_cast<const char*>(data), size);
  sok::ShardSummary seen;
  try {
    seen = sok::VerifyShard(input);
  } catch (const sok::DamagedFile& error) {
    Require(std::string(error.what()).rfind(input + ": ", 0) == 0, "an error names the file");
    return 0;
  }
  Require(sok::ShardSummaryJson(seen).back() == '}', "a summary is an object");
  Require(seen.bytes == static_cast<int64_t>(size), "all bytes were looked at");
  const sok::ShardHead& head = seen.head;
  if (head.dim > kMaxDim) return 0;

  sok::EmbeddingTable table(ConfigFor(head));
  const auto loaded = Loaded(input, head, AllSets(head), &table);
  if (!loaded) return 0;
  Require(loaded->stored == seen.rows && table.size() == seen.rows, "every row was stored");
  Require(loaded->digest == seen.digest, "both readers saw the same blocks");

  // Another world takes over its share, without the slots.
  sok::TableConfig other = ConfigFor(head);
  other.world_size = 3;
  other.rank = 1;
  other.owner = sok::kByKey;
  sok::EmbeddingTable part(other);
  const auto share = Loaded(input, head, {}, &part);
  Require(!share || share->stored == part.size(), "a share was stored");

  const sok::ShardSummary first = sok::SaveShard({kSerial}, table, head.key_bytes, head.generation, saved);
  Require(first.rows == seen.rows, "every row was saved");
  sok::EmbeddingTable second(ConfigFor(head));
  Require(Loaded(saved, head, AllSets(first.head), &second).has_value(), "what was saved can be loaded");
  sok::SaveShard({kSerial}, second, head.key_bytes, head.generation, again);
  if (Bytes(saved) != Bytes(again)) {
    // Sets without calls are the only thing that a table without rows forgets.
    Require(seen.rows == 0, "saved, loaded and saved again, a table gives the same file");
  }
  return 0;
}
