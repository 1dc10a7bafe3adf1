// Tables over a file, for tests.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "collector.h"
#include "files.h"
#include "rules.h"
#include "sok/error.h"
#include "tables.h"

inline constexpr int64_t kMany = int64_t{64} << 20;  // bytes: all rows of a test
inline const ThreadExecutor kThreads(3);

// The smallest budget, or a little more.
inline int64_t LeastBytes(int64_t dim, int64_t capacity) {
  sok::TableConfig config = Config(dim, capacity);
  config.storage = {1, "/tmp"};
  try {
    sok::EmbeddingTable table(config);
  } catch (const sok::InvalidArgument& error) {
    const std::string text = error.what(), before = "memory_bytes of at least ";
    return std::stoll(text.substr(text.find(before) + before.size()));
  }
  return -1;
}

inline sok::TableConfig WithFile(sok::TableConfig config, const Folder& folder, int64_t bytes) {
  config.storage = {bytes, folder.path()};
  return config;
}

inline std::vector<std::string> FilesIn(const std::string& folder) {
  std::vector<std::string> names;
  DIR* directory = opendir(folder.c_str());
  while (const dirent* entry = readdir(directory))
    if (entry->d_name[0] != '.') names.push_back(folder + "/" + entry->d_name);
  closedir(directory);
  return names;
}

inline AllRows Contents(sok::EmbeddingTable* table) {
  Collector collector(table->dim(), 1000);
  table->ReadAll({kThreads}, &collector);
  return collector.found;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// The same calls on a table in memory and on one with a file.
class Pair {
 public:
  Pair(const sok::TableConfig& config, const Folder& folder, int64_t bytes)
      : memory_(config), file_(WithFile(config, folder, bytes)), dim_(config.dim) {}

  std::vector<int64_t> Lookup(const std::vector<uint64_t>& keys, bool insert = true) {
    const Rows a = memory_.Lookup(keys, insert), b = file_.Lookup(keys, insert);
    CHECK(SameBits(a.values, b.values));
    CHECK(a.ids == b.ids);
    return a.ids;
  }
  std::vector<int64_t> Pool(const std::vector<uint64_t>& keys, const std::vector<int64_t>& splits, bool insert) {
    const Rows a = memory_.LookupCombine(keys, splits, insert), b = file_.LookupCombine(keys, splits, insert);
    CHECK(SameBits(a.values, b.values));
    CHECK(a.ids == b.ids);
    return a.ids;
  }
  void Apply(const std::string& rule, int64_t step, const std::vector<int64_t>& ids, std::mt19937* random) {
    std::vector<float> grads(ids.size() * static_cast<size_t>(dim_));
    for (float& g : grads) g = static_cast<float>(static_cast<int>((*random)() % 2001) - 1000) / 1000.0f;
    memory_.Apply(rule, HyperOf(rule, 0.01), ids, grads, step);
    file_.Apply(rule, HyperOf(rule, 0.01), ids, grads, step);
  }
  void Erase(const std::vector<uint64_t>& keys) { CHECK_EQ(memory_.Erase(keys), file_.Erase(keys)); }
  void Assign(const std::vector<uint64_t>& keys, float value) {
    memory_.Assign(keys, value);
    file_.Assign(keys, value);
  }
  void Compare() { CHECK(Contents(&memory_.native()) == Contents(&file_.native())); }

  Table& memory() { return memory_; }
  Table& file() { return file_; }

 private:
  Table memory_, file_;
  const int64_t dim_;
};

inline std::vector<uint64_t> SomeKeys(std::mt19937* random, size_t n, uint64_t below) {
  std::vector<uint64_t> keys(n);
  for (uint64_t& key : keys) {
    const double u = static_cast<double>((*random)()) / 4294967296.0;
    key = static_cast<uint64_t>(u * u * u * static_cast<double>(below));  // low ones are frequent
  }
  return keys;
}

// A table whose row of key 100007 was changed in the file, and is not in memory; the row ids of its keys from 100000 on.
struct Damaged {
  Damaged() : table(WithFile(Config(64, 20000), folder, LeastBytes(64, 20000) + (1 << 20))) {
    for (size_t i = 0; i < 9000; ++i) keys.push_back(100000 + i);
    ids = table.Lookup(keys).ids;
    values = table.Lookup({100007}, false).values;
    table.Lookup(keys);
    const std::string file = FilesIn(folder.path()).at(0), bytes = ReadFile(file);
    const size_t at = bytes.find(std::string(reinterpret_cast<const char*>(values.data()), 64 * sizeof(float)));
    CHECK(at != std::string::npos);
    const int opened = open(file.c_str(), O_WRONLY);
    const char other = static_cast<char>(bytes[at] ^ 1);
    CHECK_EQ(pwrite(opened, &other, 1, static_cast<off_t>(at)), 1);
    close(opened);
    table.Lookup(std::vector<uint64_t>(keys.begin() + 3000, keys.end()));
  }
  void Apply(const std::vector<int64_t>& some) {
    table.Apply("sgd", HyperOf("sgd", 0.1), some, std::vector<float>(some.size() * 64, 1.0f));
  }

  const Folder folder;
  Table table;
  std::vector<uint64_t> keys;
  std::vector<int64_t> ids;
  std::vector<float> values;
};
