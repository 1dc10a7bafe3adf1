#include "sok/redis_table.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

#include "row_cache.h"
#include "sok/crc32c.h"
#include "sok/error.h"
#include "sok/file_error.h"
#include "sok/redis_client.h"

namespace sok {
namespace {

constexpr size_t kFieldsAtATime = 1024;  // of one HMGET: Redis does nothing else meanwhile
constexpr int kOpenMs = 5000;            // when a model is loaded
constexpr char kHeaderField[] = "h";     // no key's field, which have eight bytes

// Lines "word value".
std::map<std::string, std::string> WordsOf(const std::string& text) {
  std::map<std::string, std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    const size_t space = line.find(' ');
    if (space != std::string::npos) words[line.substr(0, space)] = line.substr(space + 1);
    begin = end + 1;
  }
  return words;
}

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> SplitAddresses(const std::string& text) {
  std::vector<std::string> addresses;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) addresses.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return addresses;
}

// The hash tags of 2^bits buckets, whose slots lie evenly: each is the smallest number in decimals that has its slot.
std::vector<std::string> TagsOf(int bits) {
  const size_t count = size_t{1} << bits, width = kRedisSlots >> bits;
  std::vector<std::string> tags(count);
  size_t left = count;
  for (uint64_t number = 0; left > 0; ++number) {
    const std::string tag = std::to_string(number);
    const auto slot = static_cast<size_t>(RedisSlot(tag));
    if (slot % width != width / 2 || !tags[slot / width].empty()) continue;
    tags[slot / width] = tag;
    --left;
  }
  return tags;
}

}  // namespace

class RedisTable final : public ServingTable {
 public:
  explicit RedisTable(const std::string& path) : ServingTable(path) {
    const auto words = WordsOf(source());
    const auto text = [&](const char* word) {
      const auto found = words.find(word);
      if (found == words.end())
        throw DamagedFile(path + ": says that rows lie elsewhere, and not where ('" + word + "')");
      return found->second;
    };
    const auto number = [&](const char* word) {
      const std::string value = text(word);
      const int64_t n = value.size() < 18 ? std::strtoll(value.c_str(), nullptr, 10) : -1;
      if (n < 0 || std::to_string(n) != value)
        throw DamagedFile(path + ": '" + word + " " + value + "' makes no sense");
      return n;
    };
    RedisOptions options;
    const std::string elsewhere = Environment("SOK_REDIS_ADDRESS");
    options.addresses = SplitAddresses(elsewhere.empty() ? text("addresses") : elsewhere);
    for (const std::string& address : options.addresses)
      if (address.find(':') == std::string::npos)
        throw InvalidArgument("SOK_REDIS_ADDRESS must be host:port, or several with commas. Received: " + elsewhere);
    options.database = static_cast<int>(number("database"));
    options.username = text("username");
    options.password = Environment("SOK_REDIS_PASSWORD");
    options.timeout_ms = static_cast<int>(number("timeout_ms"));
    options.connect_timeout_ms = static_cast<int>(number("connect_timeout_ms"));
    options.tls.is_on = words.count("tls") > 0;
    if (options.tls.is_on) {
      options.tls.checks_host = number("check_hostname") != 0;
      const auto file = [&](const char* word, const char* variable) {
        const std::string of_this_host = Environment(variable);
        return of_this_host.empty() ? text(word) : of_this_host;
      };
      options.tls.ca = file("ca", "SOK_REDIS_CA");
      options.tls.cert = file("cert", "SOK_REDIS_CERT");
      options.tls.key = file("key", "SOK_REDIS_KEY");
    }
    bits_ = static_cast<int>(number("bucket_bits"));
    if (bits_ > 13 || options.addresses.empty()) throw DamagedFile(path + ": the source of its rows makes no sense");
    max_request_bytes_ = number("max_request_bytes");
    version_ = text("version");
    const std::string number_of_table = std::to_string(number("table"));
    const std::string own = version_ + ":" + number_of_table;
    // Rows that an older version has handed on unchanged have its identity.
    const std::string identity = words.count("identity") > 0 ? text("identity") : own;
    identity_crc_ = Crc32c(identity.data(), identity.size());
    const std::vector<std::string> tags = TagsOf(bits_);
    for (size_t b = 0; b < tags.size(); ++b) {
      slots_.push_back(RedisSlot(tags[b]));
      names_.push_back(text("prefix") + ":{" + tags[b] + "}:" + own + ":" + std::to_string(b));
      headers_.push_back("sok1 " + version_ + " " + number_of_table + " " + std::to_string(b) + " ");
    }
    cache_ = std::make_unique<RowCache>(number("cache_bytes"), row_bytes());
    client_ = RedisClient::Shared(options);
    CheckAllThere();
  }

  void Lookup(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, float* rows) const override {
    LookupRemote(cpu, scratch, {{this, keys, n, rows}});
  }

  // Answers what the cache knows; is_known [n].
  void ReadCached(const Cpu& cpu, const ServingAsk& ask, uint8_t* is_known) const {
    if (!hashed()) {
      for (int64_t i = 0; i < ask.n; ++i)
        if (ask.keys[i] >= static_cast<uint64_t>(num_rows())) RefuseKey(ask.keys[i]);
    }
    cpu.executor.For(ask.n, 300 + dim(), [&](int64_t begin, int64_t end) {
      std::vector<float> stored(static_cast<size_t>(row_bytes() / 4));
      char* bytes = reinterpret_cast<char*>(stored.data());
      for (int64_t i = begin; i < end; ++i) {
        const RowCache::Found found = cache_->Read(MixKey(ask.keys[i]), bytes);
        is_known[i] = found != RowCache::Found::kNothing;
        if (found == RowCache::Found::kRow) ReadStored(bytes, ask.rows + i * dim());
        if (found == RowCache::Found::kUnseen) ReadUnseen(ask.keys[i], ask.rows + i * dim());
      }
    });
  }

  // The row of a key that was asked of bucket b; `value` is what Redis has of it, or null.
  void TakeRecord(size_t b, uint64_t key, std::string_view value, std::vector<float>* stored, float* row) const {
    if (value.data() == nullptr) {
      if (!hashed()) Damaged(b, key, "is missing");
      cache_->Put(MixKey(key), nullptr);
      return ReadUnseen(key, row);
    }
    const auto size = static_cast<size_t>(row_bytes());
    if (value.size() != size + 4) {
      Damaged(b, key, "has " + std::to_string(value.size()) + " bytes instead of " + std::to_string(size + 4));
    }
    uint32_t crc;
    std::memcpy(&crc, value.data() + size, 4);
    if (crc != Crc32c(value.data(), size, Crc32c(&key, 8, identity_crc_)))
      Damaged(b, key, "does not have its checksum");
    stored->resize(size / 4);  // aligned, as the answer is not
    std::memcpy(stored->data(), value.data(), size);
    ReadStored(reinterpret_cast<const char*>(stored->data()), row);
    cache_->Put(MixKey(key), value.data());
  }

  // Whether a bucket is that of this version.
  void CheckHeader(size_t b, std::string_view header) const {
    if (header.data() == nullptr) {
      throw FailedPrecondition(
          Label() + "version " + version_ +
          " of its rows is not in Redis (any more): it was removed after a newer one was published, or Redis has lost "
          "it. Load the newest export, or export the model again.");
    }
    if (header.substr(0, headers_[b].size()) != headers_[b]) {
      throw DamagedFile(Label() + "key " + names_[b] + " in Redis is that of something else: '" +
                        std::string(header.substr(0, 100)) + "'. Export the model again.");
    }
  }

  size_t BucketOf(uint64_t key) const { return bits_ == 0 ? 0 : static_cast<size_t>(MixKey(key) >> (64 - bits_)); }
  RedisRead ReadOf(size_t b) const { return {names_[b], slots_[b], {kHeaderField}, {}, nullptr}; }
  RedisClient* client() const { return client_.get(); }
  int64_t max_request_bytes() const { return max_request_bytes_; }
  int64_t record_bytes() const { return row_bytes() + 4; }
  std::string Label() const { return "table '" + name() + "': "; }

 private:
  void CheckAllThere() const {
    std::vector<RedisRead> reads;
    for (size_t b = 0; b < names_.size(); ++b) reads.push_back(ReadOf(b));
    client_->Run(&reads, std::max(kOpenMs, client_->options().timeout_ms));
    for (size_t b = 0; b < names_.size(); ++b) CheckHeader(b, reads[b].values[0]);
  }

  [[noreturn]] void Damaged(size_t b, uint64_t key, const std::string& what) const {
    const std::string text = is_unsigned() ? std::to_string(key) : std::to_string(static_cast<int64_t>(key));
    throw DamagedFile(Label() + "the row of key " + text + " in " + names_[b] + " of Redis " + what +
                      ". Export the model again.");
  }

  int bits_ = 0;
  int64_t max_request_bytes_ = 0;
  std::string version_;
  uint32_t identity_crc_ = 0;         // of "version:table", which is before each record's own
  std::vector<int> slots_;            // of each bucket
  std::vector<std::string> names_;    // of its key
  std::vector<std::string> headers_;  // what its header begins with; the number of rows follows
  std::unique_ptr<RowCache> cache_;
  std::shared_ptr<RedisClient> client_;
};

std::shared_ptr<const ServingTable> OpenServingTable(const std::string& path) {
  auto opened = std::make_shared<const ServingTable>(path);
  if (!opened->is_remote()) return opened;
  return std::make_shared<const RedisTable>(path);
}

namespace {

// A key that the cache does not know, and where its row goes.
struct Miss {
  const RedisTable* table;
  uint64_t key;
  size_t bucket;
  float* row;
};

// Asks one client for misses that are sorted by table, bucket and key.
void Fetch(const std::vector<Miss>& misses) {
  std::vector<RedisRead> reads;
  std::vector<size_t> first;  // of each read: the number of its first miss
  int64_t bytes = 0;
  for (size_t m = 0; m < misses.size(); ++m) {
    const Miss &one = misses[m], *before = m > 0 ? &misses[m - 1] : nullptr;
    const bool is_same = before != nullptr && before->table == one.table && before->bucket == one.bucket;
    if (is_same && before->key == one.key) continue;
    if (!is_same || reads.back().fields.size() > kFieldsAtATime) {
      reads.push_back(one.table->ReadOf(one.bucket));
      first.push_back(m);
    }
    reads.back().fields.emplace_back(reinterpret_cast<const char*>(&one.key), sizeof(one.key));
    bytes += one.table->record_bytes();
  }
  const RedisTable& table = *misses[0].table;
  if (bytes > table.max_request_bytes()) {
    throw InvalidArgument(table.Label() + "a request needs " + std::to_string(bytes) +
                          " bytes of rows from Redis, where `max_request_bytes` allows " +
                          std::to_string(table.max_request_bytes()) + ". Ask for fewer keys at a time.");
  }
  try {
    table.client()->Run(&reads, table.client()->options().timeout_ms);
  } catch (const DeadlineExceeded& e) {
    throw DeadlineExceeded(table.Label() + e.what());
  }
  std::vector<float> stored;
  for (size_t r = 0; r < reads.size(); ++r) {
    misses[first[r]].table->CheckHeader(misses[first[r]].bucket, reads[r].values[0]);
    size_t field = 0;
    const size_t last = r + 1 < reads.size() ? first[r + 1] : misses.size();
    for (size_t m = first[r]; m < last; ++m) {
      const Miss& one = misses[m];
      const auto dim = static_cast<size_t>(one.table->dim());
      if (m > first[r] && misses[m - 1].key == one.key) {
        std::memcpy(one.row, misses[m - 1].row, dim * sizeof(float));
        continue;
      }
      one.table->TakeRecord(one.bucket, one.key, reads[r].values[++field], &stored, one.row);
    }
  }
}

}  // namespace

void LookupRemote(const Cpu& cpu, Scratch* scratch, const std::vector<ServingAsk>& asks) {
  std::map<RedisClient*, std::vector<Miss>> of_client;
  for (const ServingAsk& ask : asks) {
    if (!ask.table->is_remote()) continue;
    const auto* table = static_cast<const RedisTable*>(ask.table);
    uint8_t* is_known = scratch->Get<uint8_t>(ask.n);
    table->ReadCached(cpu, ask, is_known);
    for (int64_t i = 0; i < ask.n; ++i) {
      if (is_known[i]) continue;
      of_client[table->client()].push_back(
          {table, ask.keys[i], table->BucketOf(ask.keys[i]), ask.rows + i * table->dim()});
    }
  }
  for (auto& [client, misses] : of_client) {
    std::sort(misses.begin(), misses.end(), [](const Miss& a, const Miss& b) {
      if (a.table != b.table) return std::less<>()(a.table, b.table);
      return a.bucket != b.bucket ? a.bucket < b.bucket : a.key < b.key;
    });
    Fetch(misses);
  }
}

}  // namespace sok

extern "C" int SokHasRedis() { return 1; }
