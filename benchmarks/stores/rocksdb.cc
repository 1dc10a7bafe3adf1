// RocksDB for benchmarks/stores/rocksdb.py: batches of records under 64-bit keys, read and written by all threads.
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/statistics.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Store {
  std::unique_ptr<rocksdb::DB> db;
  std::shared_ptr<rocksdb::Statistics> statistics;
  std::string error;
  size_t record_bytes;
  int threads;
};

// What sorts as the number does.
void BigEndian(uint64_t key, char* bytes) {
  for (int i = 7; i >= 0; --i, key >>= 8) bytes[i] = static_cast<char>(key & 0xff);
}

// Calls `work(first, count)` for parts of [0, n), each in a thread. The first error that one of them gave, or none.
template <typename Work>
std::string InParts(int threads, size_t n, const Work& work) {
  const size_t parts = std::max<size_t>(1, std::min<size_t>(threads, n / 256));
  std::vector<std::string> errors(parts);
  std::vector<std::thread> others;
  const auto part = [&](size_t i) {
    const size_t first = n * i / parts;
    errors[i] = work(first, n * (i + 1) / parts - first);
  };
  for (size_t i = 1; i < parts; ++i) others.emplace_back(part, i);
  part(0);
  for (std::thread& other : others) other.join();
  for (const std::string& error : errors)
    if (!error.empty()) return error;
  return "";
}

}  // namespace

extern "C" {

// Opens the database of a folder, or makes it. `memory_bytes` are for what it keeps in memory: write buffers and blocks.
void* Open(const char* folder, int64_t memory_bytes, int64_t record_bytes, int threads, int is_direct) {
  auto store = std::make_unique<Store>();
  store->record_bytes = record_bytes;
  store->threads = threads;
  store->statistics = rocksdb::CreateDBStatistics();
  const int64_t buffers = std::clamp<int64_t>(memory_bytes / 4, 1 << 20, 64 << 20);  // two write buffers together
  rocksdb::BlockBasedTableOptions blocks;
  blocks.block_cache = rocksdb::NewLRUCache(std::max<int64_t>(memory_bytes - buffers, 1 << 20));
  blocks.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10, false));
  blocks.cache_index_and_filter_blocks = true;  // counted in the same memory
  blocks.pin_l0_filter_and_index_blocks_in_cache = true;
  blocks.data_block_index_type = rocksdb::BlockBasedTableOptions::kDataBlockBinaryAndHash;
  blocks.block_size = 4096;
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;  // floats do not shrink
  options.write_buffer_size = buffers / 2;
  options.max_write_buffer_number = 2;
  options.optimize_filters_for_hits = true;  // each key is there
  options.use_direct_reads = is_direct != 0;
  options.use_direct_io_for_flush_and_compaction = is_direct != 0;
  options.statistics = store->statistics;
  options.IncreaseParallelism(std::max(2, threads));
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(blocks));
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status = rocksdb::DB::Open(options, folder, &db);
  store->db.reset(db);
  if (!status.ok()) store->error = status.ToString();
  return store.release();
}

const char* Error(void* store) { return static_cast<Store*>(store)->error.c_str(); }

void Close(void* store) { delete static_cast<Store*>(store); }

// Reads the records of `keys` [n], in ascending order, into `records` [n, record_bytes]. False: see Error.
int Read(void* handle, const uint64_t* keys, int64_t n, char* records) {
  Store& store = *static_cast<Store*>(handle);
  store.error = InParts(store.threads, n, [&](size_t first, size_t count) -> std::string {
    std::vector<char> bytes(8 * count);
    std::vector<rocksdb::Slice> slices(count);
    std::vector<rocksdb::PinnableSlice> values(count);
    std::vector<rocksdb::Status> statuses(count);
    for (size_t i = 0; i < count; ++i) {
      BigEndian(keys[first + i], &bytes[8 * i]);
      slices[i] = rocksdb::Slice(&bytes[8 * i], 8);
    }
    store.db->MultiGet(rocksdb::ReadOptions(), store.db->DefaultColumnFamily(), count, slices.data(), values.data(),
                       statuses.data(), /*sorted_input=*/true);
    for (size_t i = 0; i < count; ++i) {
      if (!statuses[i].ok()) return "key " + std::to_string(keys[first + i]) + ": " + statuses[i].ToString();
      if (values[i].size() != store.record_bytes) return "a record has another length";
      std::memcpy(records + (first + i) * store.record_bytes, values[i].data(), store.record_bytes);
    }
    return "";
  });
  return store.error.empty();
}

// Writes `records` [n, record_bytes] under `keys` [n], without a log of writes: nothing outlives a crash. False: see Error.
int Write(void* handle, const uint64_t* keys, int64_t n, const char* records) {
  Store& store = *static_cast<Store*>(handle);
  store.error = InParts(store.threads, n, [&](size_t first, size_t count) -> std::string {
    rocksdb::WriteBatch batch(count * (store.record_bytes + 16));
    char bytes[8];
    for (size_t i = 0; i < count; ++i) {
      BigEndian(keys[first + i], bytes);
      const rocksdb::Status status = batch.Put(
          rocksdb::Slice(bytes, 8), rocksdb::Slice(records + (first + i) * store.record_bytes, store.record_bytes));
      if (!status.ok()) return status.ToString();
    }
    rocksdb::WriteOptions options;
    options.disableWAL = true;
    const rocksdb::Status status = store.db->Write(options, &batch);
    return status.ok() ? "" : status.ToString();
  });
  return store.error.empty();
}

// Writes out what is in write buffers, and puts the levels in order.
int Settle(void* handle) {
  Store& store = *static_cast<Store*>(handle);
  rocksdb::Status status = store.db->Flush(rocksdb::FlushOptions());
  if (status.ok()) status = store.db->CompactRange(rocksdb::CompactRangeOptions(), nullptr, nullptr);
  store.error = status.ok() ? "" : status.ToString();
  return store.error.empty();
}

// Since it was opened: blocks that were read, and in the cache, and bytes that flushes and compactions wrote.
void Counts(void* handle, uint64_t* counts) {
  const rocksdb::Statistics& all = *static_cast<Store*>(handle)->statistics;
  counts[0] = all.getTickerCount(rocksdb::BLOCK_CACHE_DATA_MISS);
  counts[1] = all.getTickerCount(rocksdb::BLOCK_CACHE_DATA_HIT);
  counts[2] = all.getTickerCount(rocksdb::FLUSH_WRITE_BYTES) + all.getTickerCount(rocksdb::COMPACT_WRITE_BYTES);
}

}  // extern "C"
