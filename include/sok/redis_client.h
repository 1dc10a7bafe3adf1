// Reads of hashes in Redis: one server, one with replicas, or a Redis Cluster. Read-only, batched, with a deadline.
//
// Errors: DeadlineExceeded, with the address and what it said last, also where nobody listens (TensorFlow takes "unavailable"
// for trouble of its own network); FailedPrecondition where Redis refuses the credentials or the command; DamagedFile
// where it answers what is no answer.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace sok {

constexpr int kRedisSlots = 16384;  // of a cluster

// How to talk TLS, if at all.
struct TlsOptions {
  bool is_on = false;
  std::string ca;         // PEM: authorities that are trusted; empty: the system's
  std::string cert, key;  // PEM: of the client; empty: none
  bool checks_host = true;
};

struct RedisOptions {
  std::vector<std::string> addresses;  // "host:port"; of a cluster any of its nodes, else the server and its replicas
  int database = 0;
  std::string username, password;  // empty: none
  int timeout_ms = 1000;           // of a call of `Run`
  int connect_timeout_ms = 200;    // TLS agreed on included
  TlsOptions tls;
};

// The slot of a cluster in which a key with this hash tag lies.
int RedisSlot(std::string_view tag);

// HMGET key field...: what is asked, and the answer.
struct RedisRead {
  std::string key;
  int slot = 0;
  std::vector<std::string_view> fields;  // the first is one that the key has if the key is there at all
  std::vector<std::string_view> values;  // [fields] of the answer; data() is null where there is no such field
  std::shared_ptr<const void> owner;     // of the values
};

class RedisConnection;
class TlsContext;

// Thread-safe. Connections are kept for later calls. Rows of a version never change, so that replicas answer where a
// primary does not; what a replica lacks is asked of the others before it counts as missing.
class RedisClient {
 public:
  // Throws FailedPrecondition for files of TLS that do not hold what they should.
  explicit RedisClient(RedisOptions options);
  ~RedisClient();

  // The client of these options, which all tables with the same ones share.
  static std::shared_ptr<RedisClient> Shared(const RedisOptions& options);

  // Answers all reads, or throws. All commands of one node travel together, and the nodes work at the same time.
  // Follows MOVED and ASK, and asks a replica, or again, until `timeout_ms` is over.
  void Run(std::vector<RedisRead>* reads, int timeout_ms);

  const RedisOptions& options() const { return options_; }

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Topology {
    bool is_cluster = false;
    std::vector<std::vector<std::string>> of_slot;  // addresses, the primary first; [1] where there is no cluster
    bool has_replicas = false;

    const std::vector<std::string>& Nodes(int slot) const {
      static const std::vector<std::string> none;
      if (!is_cluster) return of_slot[0];
      return of_slot.empty() ? none : of_slot[static_cast<size_t>(slot)];
    }
  };
  struct Pending;
  struct Job;
  struct Health {
    Time until;
    int failures = 0;
  };

  std::shared_ptr<const Topology> CurrentTopology(Time deadline, std::string* why);
  std::shared_ptr<const Topology> ReadTopology(Time deadline, std::string* why);
  std::shared_ptr<const Topology> TopologyOf(const std::string& address, Time until);
  std::string Target(const Topology& topology, const RedisRead& read, const Pending& pending, int round);
  void QueueCredentials(Job* job) const;
  std::unique_ptr<Job> Ask(const Topology& topology, const std::string& address, const std::vector<size_t>& asked,
                           const std::vector<RedisRead>& reads, const std::vector<Pending>& pending);
  std::unique_ptr<RedisConnection> Lease(const std::string& address);
  void GiveBack(const std::string& address, std::unique_ptr<RedisConnection> connection);
  void Drive(std::vector<std::unique_ptr<Job>>* jobs, Time until);
  void Settle(std::vector<std::unique_ptr<Job>>* jobs, std::string* why);
  bool TakeAnswer(const Topology& topology, const std::string& address, const std::shared_ptr<void>& reply,
                  RedisRead* read, Pending* pending, std::string* why);
  bool TakeError(const std::string& address, std::string_view error, const RedisRead& read, Pending* pending,
                 std::string* why);

  const RedisOptions options_;
  const std::shared_ptr<TlsContext> tls_;  // null: none
  std::mutex mutex_;                       // of all that follows
  std::shared_ptr<const Topology> topology_;
  bool is_stale_ = false;
  Time read_at_;
  std::map<std::string, Health> health_;
  std::map<std::string, std::vector<std::unique_ptr<RedisConnection>>> idle_;
};

}  // namespace sok
