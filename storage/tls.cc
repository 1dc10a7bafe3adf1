#include "tls.h"

#include <arpa/inet.h>
#include <dlfcn.h>

#include <utility>

#include "sok/error.h"

namespace sok {
namespace {

// Of OpenSSL's headers, which need not be there when this is compiled: they are the same in 1.1 and 3.
constexpr int kFileIsPem = 1, kVerifyPeer = 1, kErrorWantsRead = 2, kErrorWantsWrite = 3, kErrorClosed = 6;
constexpr int kSetMinimumVersion = 123, kSetHostName = 55, kPending = 10;
constexpr long kTls12 = 0x0303;

#define SOK_OPENSSL_FUNCTIONS(F)                                                   \
  F(TLS_client_method, const void*, (void))                                        \
  F(SSL_CTX_new, void*, (const void*))                                             \
  F(SSL_CTX_free, void, (void*))                                                   \
  F(SSL_CTX_ctrl, long, (void*, int, long, void*))                                 \
  F(SSL_CTX_set_verify, void, (void*, int, void*))                                 \
  F(SSL_CTX_load_verify_locations, int, (void*, const char*, const char*))         \
  F(SSL_CTX_set_default_verify_paths, int, (void*))                                \
  F(SSL_CTX_use_certificate_chain_file, int, (void*, const char*))                 \
  F(SSL_CTX_use_PrivateKey_file, int, (void*, const char*, int))                   \
  F(SSL_CTX_set_default_passwd_cb, void, (void*, int (*)(char*, int, int, void*))) \
  F(SSL_new, void*, (void*))                                                       \
  F(SSL_free, void, (void*))                                                       \
  F(SSL_set_bio, void, (void*, void*, void*))                                      \
  F(SSL_ctrl, long, (void*, int, long, void*))                                     \
  F(SSL_set1_host, int, (void*, const char*))                                      \
  F(SSL_get0_param, void*, (void*))                                                \
  F(SSL_connect, int, (void*))                                                     \
  F(SSL_read, int, (void*, void*, int))                                            \
  F(SSL_write, int, (void*, const void*, int))                                     \
  F(SSL_get_error, int, (const void*, int))                                        \
  F(SSL_get_verify_result, long, (const void*))                                    \
  F(X509_VERIFY_PARAM_set1_ip_asc, int, (void*, const char*))                      \
  F(X509_verify_cert_error_string, const char*, (long))                            \
  F(BIO_s_mem, const void*, (void))                                                \
  F(BIO_new, void*, (const void*))                                                 \
  F(BIO_read, int, (void*, void*, int))                                            \
  F(BIO_write, int, (void*, const void*, int))                                     \
  F(BIO_ctrl, long, (void*, int, long, void*))                                     \
  F(ERR_get_error, unsigned long, (void))                                          \
  F(ERR_error_string_n, void, (unsigned long, char*, size_t))

struct OpenSsl {
#define SOK_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  SOK_OPENSSL_FUNCTIONS(SOK_MEMBER)
#undef SOK_MEMBER
  std::string missing;  // why it cannot be used; empty: it can
};

const OpenSsl& Library() {
  static const OpenSsl& library = *[] {
    auto* found = new OpenSsl;
    int how = RTLD_NOW | RTLD_LOCAL;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    how |= RTLD_DEEPBIND;  // a server may have a TLS library of its own, with functions of these names
#endif
    void* handle = nullptr;
    for (const char* name : {"libssl.so.3", "libssl.so.1.1"}) handle = handle != nullptr ? handle : dlopen(name, how);
    if (handle == nullptr) {
      found->missing = "TLS needs OpenSSL, whose libssl.so.3 is not to be found here (apt-get install libssl3)";
      return found;
    }
#define SOK_LOOK_UP(name, result, arguments)                                 \
  found->name = reinterpret_cast<result(*) arguments>(dlsym(handle, #name)); \
  if (found->name == nullptr) found->missing = "OpenSSL here has no " #name;
    SOK_OPENSSL_FUNCTIONS(SOK_LOOK_UP)
#undef SOK_LOOK_UP
    return found;
  }();
  return library;
}

// What OpenSSL has noted of this thread's last error, and forgets then.
std::string Noted() {
  char text[256] = "unknown error";
  while (const unsigned long error = Library().ERR_get_error()) Library().ERR_error_string_n(error, text, sizeof(text));
  const std::string whole = text;  // error:NUMBER:library:function:reason
  return whole.substr(whole.rfind(':') + 1);
}

void Require(bool is_so, const std::string& what) {
  if (!is_so) throw FailedPrecondition("TLS: " + what + ": " + Noted() + ".");
}

bool IsAddress(const std::string& host) {
  in6_addr of_any;
  return inet_pton(AF_INET, host.c_str(), &of_any) == 1 || inet_pton(AF_INET6, host.c_str(), &of_any) == 1;
}

}  // namespace

TlsContext::TlsContext(const TlsOptions& options) : checks_host_(options.checks_host) {
  const OpenSsl& ssl = Library();
  if (!ssl.missing.empty()) throw FailedPrecondition(ssl.missing + ".");
  Noted();  // whoever was here before may have left some
  context_ = ssl.SSL_CTX_new(ssl.TLS_client_method());
  if (context_ == nullptr) throw FailedPrecondition("TLS: OpenSSL cannot begin: " + Noted() + ".");
  try {
    ssl.SSL_CTX_ctrl(context_, kSetMinimumVersion, kTls12, nullptr);
    ssl.SSL_CTX_set_verify(context_, kVerifyPeer, nullptr);
    // Else it would ask whoever sits at the terminal.
    ssl.SSL_CTX_set_default_passwd_cb(context_, [](char*, int, int, void*) { return 0; });
    if (options.ca.empty()) {
      Require(ssl.SSL_CTX_set_default_verify_paths(context_) == 1, "the system's authorities cannot be read");
    } else {
      Require(ssl.SSL_CTX_load_verify_locations(context_, options.ca.c_str(), nullptr) == 1,
              options.ca + " does not hold certificates of authorities, PEM");
    }
    if (!options.cert.empty()) {
      Require(ssl.SSL_CTX_use_certificate_chain_file(context_, options.cert.c_str()) == 1,
              options.cert + " does not hold a certificate, PEM");
      const std::string& key = options.key.empty() ? options.cert : options.key;
      Require(ssl.SSL_CTX_use_PrivateKey_file(context_, key.c_str(), kFileIsPem) == 1,
              key + " does not hold the key of " + options.cert + " without a passphrase, PEM");
    }
  } catch (...) {
    ssl.SSL_CTX_free(context_);
    throw;
  }
}

TlsContext::~TlsContext() { Library().SSL_CTX_free(context_); }

TlsSession::TlsSession(std::shared_ptr<TlsContext> context, const std::string& host) : context_(std::move(context)) {
  const OpenSsl& ssl = Library();
  session_ = ssl.SSL_new(context_->context_);
  received_ = ssl.BIO_new(ssl.BIO_s_mem());
  to_send_ = ssl.BIO_new(ssl.BIO_s_mem());
  if (session_ == nullptr || received_ == nullptr || to_send_ == nullptr) throw std::bad_alloc();
  ssl.SSL_set_bio(session_, received_, to_send_);  // which are its own from here on
  const bool is_address = IsAddress(host);
  if (!is_address) ssl.SSL_ctrl(session_, kSetHostName, 0, const_cast<char*>(host.c_str()));
  if (!context_->checks_host_) return;
  if (is_address) {
    ssl.X509_VERIFY_PARAM_set1_ip_asc(ssl.SSL_get0_param(session_), host.c_str());
  } else {
    ssl.SSL_set1_host(session_, host.c_str());
  }
}

TlsSession::~TlsSession() { Library().SSL_free(session_); }

void TlsSession::Fail() const {
  const std::string noted = Noted();
  const long distrust = Library().SSL_get_verify_result(session_);
  if (distrust != 0) {
    throw NotTrusted(std::string("TLS: the server's certificate is not trusted: ") +
                     Library().X509_verify_cert_error_string(distrust));
  }
  throw ConnectionError("TLS: " + noted);
}

void TlsSession::Shake() {
  if (is_ready_) return;
  Noted();
  const int done = Library().SSL_connect(session_);
  is_ready_ = done == 1;
  if (is_ready_) return;
  const int why = Library().SSL_get_error(session_, done);
  if (why != kErrorWantsRead && why != kErrorWantsWrite) Fail();
}

void TlsSession::Send(std::string* text, std::string* wire) {
  const OpenSsl& ssl = Library();
  Shake();
  constexpr size_t kAtOnce = 1 << 20;
  size_t taken = 0;
  while (is_ready_ && taken < text->size()) {
    const size_t n = text->size() - taken < kAtOnce ? text->size() - taken : kAtOnce;
    Noted();
    const int written = ssl.SSL_write(session_, text->data() + taken, static_cast<int>(n));
    if (written <= 0) {
      const int why = ssl.SSL_get_error(session_, written);
      if (why != kErrorWantsRead && why != kErrorWantsWrite) Fail();
      break;
    }
    taken += static_cast<size_t>(written);
  }
  text->erase(0, taken);
  while (const long pending = ssl.BIO_ctrl(to_send_, kPending, 0, nullptr)) {
    const size_t before = wire->size();
    wire->resize(before + static_cast<size_t>(pending));
    const int got = ssl.BIO_read(to_send_, &(*wire)[before], static_cast<int>(pending));
    wire->resize(before + static_cast<size_t>(got > 0 ? got : 0));
    if (got <= 0) return;
  }
}

void TlsSession::Receive(const char* bytes, size_t n, std::string* text) {
  const OpenSsl& ssl = Library();
  if (ssl.BIO_write(received_, bytes, static_cast<int>(n)) != static_cast<int>(n)) throw std::bad_alloc();
  Shake();
  char buffer[1 << 14];  // what one record holds
  while (is_ready_) {
    Noted();
    const int got = ssl.SSL_read(session_, buffer, sizeof(buffer));
    if (got > 0) {
      text->append(buffer, static_cast<size_t>(got));
      continue;
    }
    const int why = ssl.SSL_get_error(session_, got);
    if (why == kErrorClosed || why == kErrorWantsRead || why == kErrorWantsWrite) return;
    Fail();
  }
}

}  // namespace sok
