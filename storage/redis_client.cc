#include "sok/redis_client.h"

#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <thread>
#include <utility>

#include "redis_connection.h"
#include "sok/error.h"
#include "sok/file_error.h"

namespace sok {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kIdleConnections = 16;    // of each node; more are made when needed, and closed again
constexpr milliseconds kPause{10};         // before what was refused is tried again
constexpr milliseconds kTopologyAge{100};  // it is read no more often
constexpr milliseconds kAvoided{1000};     // a node that did not answer, while there are others; then twice as long
constexpr int kMaxDoublings = 4;

bool StartsWith(std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; }

std::string_view TextOf(const redisReply& reply) { return {reply.str, reply.len}; }

// What a server says when the same command may succeed later, or elsewhere.
bool IsPassing(std::string_view error) {
  for (const char* with : {"MOVED ", "ASK ", "TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "BUSY"})
    if (StartsWith(error, with)) return true;
  return StartsWith(error, "ERR max number of clients");
}

// "MOVED 3999 127.0.0.1:6381". A node that does not know its own host leaves it out: that of the one that was asked.
std::string AddressIn(std::string_view error, const std::string& asked) {
  const std::string address(error.substr(error.rfind(' ') + 1));
  return StartsWith(address, ":") ? asked.substr(0, asked.rfind(':')) + address : address;
}

[[noreturn]] void Refuse(const std::string& address, std::string_view error) {
  throw FailedPrecondition("Redis at " + address + " refuses: " + std::string(error));
}

}  // namespace

int RedisSlot(std::string_view tag) {
  uint16_t crc = 0;  // CRC-16/XMODEM: https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec
  for (const char c : tag) {
    crc = static_cast<uint16_t>(crc ^ (static_cast<unsigned char>(c) << 8));
    for (int bit = 0; bit < 8; ++bit) crc = static_cast<uint16_t>((crc & 0x8000) ? (crc << 1) ^ 0x1021 : crc << 1);
  }
  return crc % kRedisSlots;
}

// What is known of a read that has no answer yet.
struct RedisClient::Pending {
  std::string moved_to;             // by MOVED or ASK, for the next try alone; empty: where the slot lies
  bool is_asking = false;           // by ASK
  bool was_asking = false;          // in the last try
  std::vector<std::string> absent;  // replicas that do not have the key
  bool done = false;
};

// Commands to one node, and who waits for their answers.
struct RedisClient::Job {
  static constexpr int64_t kMustBeFine = -1, kAny = -2;

  std::string address;
  std::unique_ptr<RedisConnection> connection;
  std::deque<int64_t> expected;  // numbers of reads, or one of the above
  std::vector<std::pair<int64_t, RedisReplyPtr>> answers;
  std::string failed;  // why it answers no more

  void Queue(const std::vector<std::string_view>& command, int64_t who) {
    connection->Queue(command);
    expected.push_back(who);
  }
  void TakeAll() {
    while (!expected.empty()) {
      RedisReplyPtr reply = connection->Take();
      if (reply == nullptr) return;
      answers.emplace_back(expected.front(), std::move(reply));
      expected.pop_front();
    }
  }
  bool is_open() const { return failed.empty() && connection != nullptr && !expected.empty(); }
};

RedisClient::RedisClient(RedisOptions options)
    : options_(std::move(options)), tls_(options_.tls.is_on ? std::make_shared<TlsContext>(options_.tls) : nullptr) {}
RedisClient::~RedisClient() = default;

std::shared_ptr<RedisClient> RedisClient::Shared(const RedisOptions& options) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<RedisClient>> clients;
  std::string key;
  for (const std::string& address : options.addresses) key += address + '\n';
  for (const std::string& text :
       {options.username, options.password, std::to_string(options.database), std::to_string(options.timeout_ms),
        std::to_string(options.connect_timeout_ms), std::to_string(options.tls.is_on * 2 + options.tls.checks_host),
        options.tls.ca, options.tls.cert, options.tls.key})
    key += std::to_string(text.size()) + ' ' + text;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<RedisClient> client = clients[key].lock();
  if (client == nullptr) clients[key] = client = std::make_shared<RedisClient>(options);
  return client;
}

void RedisClient::Run(std::vector<RedisRead>* reads, int timeout_ms) {
  const Time deadline = Clock::now() + milliseconds(timeout_ms);
  std::vector<Pending> pending(reads->size());
  std::string why;
  for (int round = 0;; ++round) {
    const std::shared_ptr<const Topology> topology = CurrentTopology(deadline, &why);
    std::map<std::string, std::vector<size_t>> of_node;
    bool is_left = false, is_advancing = false;
    for (size_t i = 0; i < reads->size(); ++i) {
      if (pending[i].done) continue;
      is_left = true;
      if (topology == nullptr) break;
      const std::string address = Target(*topology, (*reads)[i], pending[i], round);
      if (address.empty()) why = "slot " + std::to_string((*reads)[i].slot) + " of the cluster is served by no node";
      if (!address.empty()) of_node[address].push_back(i);
    }
    if (!is_left) return;
    const Time now = Clock::now();
    if (now >= deadline) {
      throw DeadlineExceeded("Redis did not answer within " + std::to_string(timeout_ms) + " ms" +
                             (why.empty() ? "" : "; last: " + why) + ".");
    }
    std::vector<std::unique_ptr<Job>> jobs;
    for (const auto& [address, asked] : of_node) jobs.push_back(Ask(*topology, address, asked, *reads, pending));
    for (Pending& one : pending) {  // whoever was named may be the one that hangs: the try after goes by the slot again
      one.was_asking = std::exchange(one.is_asking, false);
      one.moved_to.clear();
    }
    // Where somebody else could answer, half of the time is for them.
    const bool has_others = topology != nullptr && topology->has_replicas && round < 3;
    Drive(&jobs, has_others ? now + (deadline - now) / 2 : deadline);
    for (const auto& job : jobs) {
      for (const auto& [who, reply] : job->answers) {
        if (who == Job::kMustBeFine && reply->type == REDIS_REPLY_ERROR) Refuse(job->address, TextOf(*reply));
        if (who < 0) continue;
        const auto i = static_cast<size_t>(who);
        is_advancing |= TakeAnswer(*topology, job->address, reply, &(*reads)[i], &pending[i], &why);
      }
    }
    Settle(&jobs, &why);
    if (!is_advancing) std::this_thread::sleep_for(std::min<Clock::duration>(kPause, deadline - Clock::now()));
  }
}

void RedisClient::QueueCredentials(Job* job) const {
  if (options_.password.empty()) return;
  std::vector<std::string_view> command = {"AUTH"};
  if (!options_.username.empty()) command.push_back(options_.username);
  command.push_back(options_.password);
  job->Queue(command, Job::kMustBeFine);
}

// A job with all that one node is asked.
std::unique_ptr<RedisClient::Job> RedisClient::Ask(const Topology& topology, const std::string& address,
                                                   const std::vector<size_t>& asked,
                                                   const std::vector<RedisRead>& reads,
                                                   const std::vector<Pending>& pending) {
  auto job = std::make_unique<Job>();
  job->address = address;
  try {
    job->connection = Lease(address);
    if (!job->connection->was_used()) {
      QueueCredentials(job.get());
      const std::string database = std::to_string(options_.database);
      if (options_.database != 0) job->Queue({"SELECT", database}, Job::kMustBeFine);
      if (topology.is_cluster) job->Queue({"READONLY"}, Job::kAny);
    }
    for (const size_t i : asked) {
      if (pending[i].is_asking) job->Queue({"ASKING"}, Job::kAny);
      std::vector<std::string_view> command = {"HMGET", reads[i].key};
      command.insert(command.end(), reads[i].fields.begin(), reads[i].fields.end());
      job->Queue(command, static_cast<int64_t>(i));
    }
  } catch (const ConnectionError& e) {
    job->failed = e.what();
  }
  return job;
}

// Whether the read is answered, or is to be sent elsewhere at once.
bool RedisClient::TakeAnswer(const Topology& topology, const std::string& address, const std::shared_ptr<void>& reply,
                             RedisRead* read, Pending* pending, std::string* why) {
  const auto& answer = *static_cast<const redisReply*>(reply.get());
  if (answer.type == REDIS_REPLY_ERROR) return TakeError(address, TextOf(answer), *read, pending, why);
  const bool is_right = answer.type == REDIS_REPLY_ARRAY && answer.elements == read->fields.size() &&
                        std::all_of(answer.element, answer.element + answer.elements, [](const redisReply* value) {
                          return value->type == REDIS_REPLY_STRING || value->type == REDIS_REPLY_NIL;
                        });
  if (!is_right) throw DamagedFile("Redis at " + address + ": HMGET of " + read->key + " answered something else");
  const auto& nodes = topology.Nodes(read->slot);
  const bool is_primary = topology.is_cluster && !nodes.empty() && nodes[0] == address;
  if (answer.element[0]->type == REDIS_REPLY_NIL && !is_primary && nodes.size() > 1) {
    auto& absent = pending->absent;
    const auto is_absent = [&](const std::string& node) {
      return std::find(absent.begin(), absent.end(), node) != absent.end();
    };
    if (!is_absent(address)) absent.push_back(address);
    *why = address + " does not have " + read->key;
    if (!std::all_of(nodes.begin(), nodes.end(), is_absent)) return true;
  }
  read->values.assign(answer.elements, std::string_view());
  for (size_t f = 0; f < answer.elements; ++f)
    if (answer.element[f]->type == REDIS_REPLY_STRING) read->values[f] = TextOf(*answer.element[f]);
  read->owner = reply;
  pending->done = true;
  return true;
}

// The same of an error. ASK leads on at once; MOVED after a pause, since two nodes that name one another must not spin.
bool RedisClient::TakeError(const std::string& address, std::string_view error, const RedisRead& read, Pending* pending,
                            std::string* why) {
  if (StartsWith(error, "WRONGTYPE")) throw DamagedFile("Redis at " + address + ": key " + read.key + " is no hash");
  if (!IsPassing(error)) Refuse(address, error);
  *why = address + " says " + std::string(error);
  if (StartsWith(error, "ASK ")) {
    pending->moved_to = AddressIn(error, address);
    pending->is_asking = true;
    return !pending->was_asking;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  is_stale_ = true;
  if (StartsWith(error, "MOVED ")) {
    pending->moved_to = AddressIn(error, address);
  } else {
    health_[address].until = Clock::now() + kAvoided;
  }
  return false;
}

// Keeps connections that have answered all, and remembers nodes that have not.
void RedisClient::Settle(std::vector<std::unique_ptr<Job>>* jobs, std::string* why) {
  for (auto& job : *jobs) {
    if (job->failed.empty()) {
      GiveBack(job->address, std::move(job->connection));
      continue;
    }
    *why = job->address + ": " + job->failed;
    // The server may have closed a connection that was kept, when it was started anew: then so it has the others.
    const bool was_used = job->connection != nullptr && job->connection->was_used();
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.erase(job->address);
    is_stale_ = true;
    if (was_used && job->answers.empty() && job->failed.find("closed") != std::string::npos) continue;
    Health& health = health_[job->address];
    health.until = Clock::now() + kAvoided * (1 << std::min(health.failures, kMaxDoublings));
    ++health.failures;
  }
}

void RedisClient::Drive(std::vector<std::unique_ptr<Job>>* jobs, Time until) {
  const milliseconds to_connect(options_.connect_timeout_ms);
  for (;;) {
    std::vector<pollfd> sockets;
    std::vector<Job*> open;
    const Time now = Clock::now();
    Time next = until;
    for (auto& job : *jobs) {
      if (!job->is_open()) continue;
      const Time connected = job->connection->begun() + to_connect;
      if (job->connection->is_connecting() && connected <= now) {
        job->failed = "no connection within " + std::to_string(options_.connect_timeout_ms) + " ms";
        continue;
      }
      if (until <= now) {
        job->failed = "no answer in time";
        continue;
      }
      if (job->connection->is_connecting()) next = std::min(next, connected);
      open.push_back(job.get());
      sockets.push_back({job->connection->socket(), job->connection->events(), 0});
    }
    if (open.empty()) return;
    const auto wait = std::chrono::duration_cast<milliseconds>(next - now).count() + 1;
    if (poll(sockets.data(), sockets.size(), static_cast<int>(wait)) <= 0) continue;
    for (size_t i = 0; i < open.size(); ++i) {
      if (sockets[i].revents == 0) continue;
      try {
        open[i]->connection->Advance();
        open[i]->TakeAll();
      } catch (const NotTrusted& e) {
        throw FailedPrecondition("Redis at " + open[i]->address + ": " + e.what() + ". Nothing was asked of it.");
      } catch (const ConnectionError& e) {
        open[i]->failed = e.what();
      }
    }
  }
}

std::string RedisClient::Target(const Topology& topology, const RedisRead& read, const Pending& pending, int round) {
  if (!pending.moved_to.empty()) return pending.moved_to;
  const std::vector<std::string>& all = topology.Nodes(read.slot);
  std::vector<const std::string*> nodes;
  for (const std::string& node : all)
    if (std::find(pending.absent.begin(), pending.absent.end(), node) == pending.absent.end()) nodes.push_back(&node);
  if (nodes.empty()) return "";
  const std::lock_guard<std::mutex> lock(mutex_);
  const Time now = Clock::now();
  for (const std::string* node : nodes) {
    const auto health = health_.find(*node);
    if (health == health_.end() || health->second.until <= now) return *node;
  }
  return *nodes[static_cast<size_t>(round) % nodes.size()];
}

std::unique_ptr<RedisConnection> RedisClient::Lease(const std::string& address) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& idle = idle_[address];
    if (!idle.empty()) {
      auto connection = std::move(idle.back());
      idle.pop_back();
      return connection;
    }
  }
  return std::make_unique<RedisConnection>(address, tls_);
}

void RedisClient::GiveBack(const std::string& address, std::unique_ptr<RedisConnection> connection) {
  if (connection == nullptr || !connection->is_idle()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto health = health_.find(address);
  if (health != health_.end() && health->second.failures > 0) health_.erase(health);
  auto& idle = idle_[address];
  if (idle.size() < kIdleConnections) idle.push_back(std::move(connection));
}

std::shared_ptr<const RedisClient::Topology> RedisClient::CurrentTopology(Time deadline, std::string* why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool is_due =
        topology_ == nullptr || (topology_->is_cluster && is_stale_ && Clock::now() - read_at_ > kTopologyAge);
    if (!is_due) return topology_;
    read_at_ = Clock::now();  // so that others go on with the old one meanwhile
  }
  std::string said;
  std::shared_ptr<const Topology> read = ReadTopology(deadline, &said);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (read != nullptr) {
    topology_ = read;
    is_stale_ = false;
  }
  if (read == nullptr && !said.empty()) *why = said;
  return topology_;
}

std::shared_ptr<const RedisClient::Topology> RedisClient::ReadTopology(Time deadline, std::string* why) {
  std::vector<std::string> nodes;
  const auto add = [&nodes](const std::string& node) {
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (topology_ != nullptr)
      for (const auto& of_slot : topology_->of_slot)
        for (const std::string& node : of_slot) add(node);
    for (const std::string& node : options_.addresses) add(node);
    const auto is_avoided = [&](const std::string& node) {
      const auto health = health_.find(node);
      return health != health_.end() && health->second.until > Clock::now();
    };
    std::stable_partition(nodes.begin(), nodes.end(), [&](const std::string& node) { return !is_avoided(node); });
  }
  for (size_t i = 0; i < nodes.size() && Clock::now() < deadline; ++i) {
    const Time now = Clock::now();
    const Time until = i + 1 < nodes.size() ? now + (deadline - now) / 2 : deadline;
    try {
      return TopologyOf(nodes[i], until);
    } catch (const ConnectionError& e) {
      *why += (why->empty() ? "" : "; ") + nodes[i] + ": " + e.what();
      const std::lock_guard<std::mutex> lock(mutex_);
      health_[nodes[i]].until = Clock::now() + kAvoided;
    }
  }
  return nullptr;
}

std::shared_ptr<const RedisClient::Topology> RedisClient::TopologyOf(const std::string& address, Time until) {
  std::vector<std::unique_ptr<Job>> jobs;
  jobs.push_back(std::make_unique<Job>());
  Job& job = *jobs[0];
  job.address = address;
  job.connection = std::make_unique<RedisConnection>(address, tls_);
  QueueCredentials(&job);
  job.Queue({"CLUSTER", "SLOTS"}, 0);
  Drive(&jobs, until);
  if (!job.failed.empty()) throw ConnectionError(job.failed);
  for (auto& [who, reply] : job.answers)
    if (who == Job::kMustBeFine && reply->type == REDIS_REPLY_ERROR) Refuse(address, TextOf(*reply));
  const redisReply& answer = *job.answers.back().second;
  auto topology = std::make_shared<Topology>();
  if (answer.type == REDIS_REPLY_ERROR) {
    const std::string_view error = TextOf(answer);
    if (IsPassing(error)) throw ConnectionError(std::string(error));
    if (StartsWith(error, "NOAUTH") || StartsWith(error, "WRONGPASS") || StartsWith(error, "NOPERM"))
      Refuse(address, error);
    topology->of_slot = {options_.addresses};  // "This instance has cluster support disabled"
    topology->has_replicas = options_.addresses.size() > 1;
    return topology;
  }
  topology->is_cluster = true;
  topology->of_slot.resize(kRedisSlots);
  for (size_t r = 0; answer.type == REDIS_REPLY_ARRAY && r < answer.elements; ++r) {
    const redisReply& range = *answer.element[r];  // [first, last, [host, port, ...] of the primary and each replica]
    if (range.type != REDIS_REPLY_ARRAY || range.elements < 3)
      throw ConnectionError("CLUSTER SLOTS answered something else");
    std::vector<std::string> nodes;
    for (size_t n = 2; n < range.elements; ++n) {
      const redisReply& node = *range.element[n];
      if (node.type != REDIS_REPLY_ARRAY || node.elements < 2) continue;
      const std::string port = std::to_string(node.element[1]->integer);
      const bool is_named = node.element[0]->type == REDIS_REPLY_STRING && node.element[0]->len > 0;
      const std::string host = is_named ? std::string(TextOf(*node.element[0])) : address.substr(0, address.rfind(':'));
      nodes.push_back(host + ":" + port);
    }
    topology->has_replicas |= nodes.size() > 1;
    for (int64_t s = std::max<int64_t>(0, range.element[0]->integer);
         s <= std::min<int64_t>(kRedisSlots - 1, range.element[1]->integer); ++s)
      topology->of_slot[static_cast<size_t>(s)] = nodes;
  }
  return topology;
}

}  // namespace sok
