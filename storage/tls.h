// TLS of a client, over whatever moves bytes: it says which bytes to send, and what those that came mean. By the system's OpenSSL,
// which is loaded when it is first wanted, so that a library without it serves all that needs none.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

#include "sok/redis_client.h"

namespace sok {

// The connection is of no more use; the text does not name the address.
struct ConnectionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The other side is not who it should be, and another try would not make it so.
struct NotTrusted : ConnectionError {
  using ConnectionError::ConnectionError;
};

// What connections of the same options share. Thread-safe.
class TlsContext {
 public:
  // Throws FailedPrecondition where there is no OpenSSL, or a file that does not hold what it should.
  explicit TlsContext(const TlsOptions& options);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsSession;
  void* context_ = nullptr;
  const bool checks_host_;
};

class TlsSession {
 public:
  // host: what the server's certificate must be of, a name or an address.
  TlsSession(std::shared_ptr<TlsContext> context, const std::string& host);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Whether both sides have agreed, so that text travels.
  bool is_ready() const { return is_ready_; }

  // Appends to `wire` what is to be sent now; takes as much of `text` as may travel. Throws ConnectionError.
  void Send(std::string* text, std::string* wire);

  // Takes what came, and appends its text. What it makes necessary to send, the next Send says. Throws ConnectionError.
  void Receive(const char* bytes, size_t n, std::string* text);

 private:
  void Shake();
  [[noreturn]] void Fail() const;

  const std::shared_ptr<TlsContext> context_;
  void* session_ = nullptr;
  void* received_ = nullptr;  // bytes that OpenSSL has not read
  void* to_send_ = nullptr;   // bytes that it has written
  bool is_ready_ = false;
};

}  // namespace sok
