// A connection to a Redis server that never waits by itself: hiredis says and reads the protocol, sockets are ours, so that
// a deadline holds for connecting, sending and receiving together.
#pragma once

#include <hiredis/hiredis.h>

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tls.h"

namespace sok {

using RedisReplyPtr = std::shared_ptr<redisReply>;

class RedisConnection {
 public:
  // Begins to connect, with `tls` to talk it. The name of a host is looked up here, which the system may take its time for.
  explicit RedisConnection(const std::string& address, const std::shared_ptr<TlsContext>& tls = nullptr);
  ~RedisConnection();
  RedisConnection(const RedisConnection&) = delete;
  RedisConnection& operator=(const RedisConnection&) = delete;

  void Queue(const std::vector<std::string_view>& command);
  // Connects, sends and receives as far as the socket lets it.
  void Advance();
  // The next answer, if it is there.
  RedisReplyPtr Take();

  int socket() const { return socket_; }
  short events() const;
  // Until both sides have agreed on how to talk.
  bool is_connecting() const { return is_connecting_ || (tls_ != nullptr && !tls_->is_ready()); }
  // Whether all commands are answered.
  bool is_idle() const { return num_waiting_ == 0; }
  bool was_used() const { return was_used_; }
  std::chrono::steady_clock::time_point begun() const { return begun_; }

 private:
  void Send();
  void Receive();
  void Feed(const char* text, size_t n);

  int socket_ = -1;
  bool is_connecting_ = true;
  bool was_used_ = false;
  int64_t num_waiting_ = 0;
  std::unique_ptr<TlsSession> tls_;
  std::string text_;  // commands that are not in out_ yet
  std::string out_;   // what goes over the socket
  size_t sent_ = 0;
  std::unique_ptr<redisReader, void (*)(redisReader*)> reader_;
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace sok
