// Saves of tables over files that are marks, for tests.
#pragma once

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "file_tables.h"
#include "sok/file_error.h"
#include "sok/shard_file.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kLess = 8;  // of what takes long
#else
inline constexpr int kLess = 1;
#endif

struct Small {  // segments and memory, so that much is moved
  Small() {
    setenv("SOK_STORAGE_SEGMENT_BYTES", "8192", 1);
    setenv("SOK_STORAGE_FRAMES", "150", 1);
  }
  ~Small() {
    unsetenv("SOK_STORAGE_SEGMENT_BYTES");
    unsetenv("SOK_STORAGE_FRAMES");
  }
};

inline std::string ShardOf(const std::string& folder, int64_t version) {
  return folder + "/v" + std::to_string(version);
}

// Writes the version that was begun, beside whatever others do, or ends it without one.
inline void WriteBegun(Table* table, const std::string& path, int64_t version) {
  try {
    sok::SaveShardVersion(&table->native(), 8, "v" + std::to_string(version), path);
  } catch (...) {
    table->native().EndSave("");
    throw;
  }
  table->native().EndSave("v" + std::to_string(version));
}

inline void Save(Table* table, const std::string& path, int64_t version) {
  table->native().BeginSave(sok::TableStore::SnapshotOf::kVersion);
  WriteBegun(table, path, version);
}

inline void LoadAll(const std::string& shard, Table* table) {
  const sok::ShardHead head = sok::VerifyShard(shard).head;
  std::vector<std::pair<std::string, std::string>> names;
  for (const auto& set : head.sets) names.emplace_back(set.name, set.name);
  sok::LoadShard({kThreads}, shard, 8, names, &table->native());
}
