#include "redis_connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

namespace sok {
namespace {

std::string Said(const char* doing, int error) { return std::string(doing) + ": " + std::strerror(error); }

}  // namespace

RedisConnection::RedisConnection(const std::string& address, const std::shared_ptr<TlsContext>& tls)
    : reader_(redisReaderCreate(), redisReaderFree), begun_(std::chrono::steady_clock::now()) {
  if (reader_ == nullptr) throw std::bad_alloc();
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (tls != nullptr) tls_ = std::make_unique<TlsSession>(tls, host);
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int failed = getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found);
  if (failed != 0) throw ConnectionError(std::string("no such host: ") + gai_strerror(failed));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  socket_ = ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket_ < 0) throw ConnectionError(Said("no socket", errno));
  const int on = 1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(socket_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  if (connect(socket_, found->ai_addr, found->ai_addrlen) == 0) {
    is_connecting_ = false;
  } else if (errno != EINPROGRESS) {
    const int error = errno;
    close(socket_);
    throw ConnectionError(Said("cannot connect", error));
  }
}

RedisConnection::~RedisConnection() { close(socket_); }

void RedisConnection::Queue(const std::vector<std::string_view>& command) {
  std::vector<const char*> parts;
  std::vector<size_t> lengths;
  for (const std::string_view part : command) {
    parts.push_back(part.data());
    lengths.push_back(part.size());
  }
  char* text = nullptr;
  const auto bytes = redisFormatCommandArgv(&text, static_cast<int>(parts.size()), parts.data(), lengths.data());
  if (bytes < 0) throw std::bad_alloc();
  text_.append(text, static_cast<size_t>(bytes));
  redisFreeCommand(text);
  ++num_waiting_;
}

short RedisConnection::events() const {
  // What waits for an agreement is not to be sent yet.
  const bool sends = sent_ < out_.size() || (!text_.empty() && !is_connecting());
  return is_connecting_ || sends ? static_cast<short>(POLLIN | POLLOUT) : static_cast<short>(POLLIN);
}

void RedisConnection::Advance() {
  if (is_connecting_) {
    int error = 0;
    socklen_t size = sizeof(error);
    if (getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) throw ConnectionError(Said("cannot connect", error));
    pollfd ready = {socket_, POLLOUT, 0};
    if (poll(&ready, 1, 0) != 1) return;
    is_connecting_ = false;
  }
  Send();
  Receive();
  if (tls_ != nullptr) Send();  // what came may ask for an answer, or let commands travel
}

void RedisConnection::Send() {
  if (tls_ != nullptr) {
    tls_->Send(&text_, &out_);
  } else {
    out_ += text_;
    text_.clear();
  }
  while (sent_ < out_.size()) {
    const ssize_t sent = send(socket_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) throw ConnectionError(Said("cannot send", errno));
    sent_ += static_cast<size_t>(sent);
  }
  out_.clear();
  sent_ = 0;
}

void RedisConnection::Receive() {
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = recv(socket_, buffer, sizeof(buffer), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got < 0) throw ConnectionError(Said("cannot receive", errno));
    if (got == 0) throw ConnectionError("the server has closed the connection");
    if (tls_ == nullptr) {
      Feed(buffer, static_cast<size_t>(got));
    } else {
      std::string text;
      tls_->Receive(buffer, static_cast<size_t>(got), &text);
      Feed(text.data(), text.size());
    }
    if (got < static_cast<ssize_t>(sizeof(buffer))) return;
  }
}

void RedisConnection::Feed(const char* text, size_t n) {
  if (n > 0 && redisReaderFeed(reader_.get(), text, n) != REDIS_OK) {
    throw ConnectionError(std::string("no answer in Redis' protocol: ") + reader_->errstr);
  }
}

RedisReplyPtr RedisConnection::Take() {
  void* reply = nullptr;
  if (redisReaderGetReply(reader_.get(), &reply) != REDIS_OK) {
    throw ConnectionError(std::string("no answer in Redis' protocol: ") + reader_->errstr);
  }
  if (reply == nullptr) return nullptr;
  RedisReplyPtr owned(static_cast<redisReply*>(reply), [](redisReply* r) { freeReplyObject(r); });
  if (num_waiting_ == 0) throw ConnectionError("an answer that nobody has asked for");
  --num_waiting_;
  was_used_ = true;
  return owned;
}

}  // namespace sok
