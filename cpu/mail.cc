#include "sok/mail.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

#include "sok/error.h"

namespace sok {
namespace {

constexpr size_t kChunk = 64 << 10;
constexpr int kMaxRanks = 4096;
constexpr double kSecondsToSayHello = 5.0;
constexpr size_t kKept = 4 << 20;  // bytes of a buffer that stay for the next message
constexpr int64_t kMaxName = 1 << 16, kMaxWords = int64_t{1} << 34;

// Before the name, which is filled up to whole words, and the words.
struct Frame {
  int64_t name_bytes, num_words;
  size_t bytes() const { return sizeof(Frame) + static_cast<size_t>((name_bytes + 7) / 8 * 8 + num_words * 8); }
};

FailedPrecondition Failure(const std::string& what) { return FailedPrecondition(what + ": " + std::strerror(errno)); }

// Of the abstract namespace: no file, and gone with the socket.
sockaddr_un SocketAddress(const Mail::Address& number, socklen_t* size) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const int length =
      std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "sok-%llx-%llx",
                    static_cast<unsigned long long>(number[0]), static_cast<unsigned long long>(number[1]));
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
  return address;
}

// An IP address and a port. The older kind is written as the newer has it (RFC 4291, 2.5.5.2).
constexpr unsigned char kOfIpv4[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

sockaddr_storage FarAddress(const Mail::Address& address, socklen_t* size) {
  unsigned char ip[16];
  std::memcpy(ip, &address[2], sizeof(ip));
  sockaddr_storage found = {};
  if (std::memcmp(ip, kOfIpv4, sizeof(kOfIpv4)) == 0) {
    auto* const old = reinterpret_cast<sockaddr_in*>(&found);
    old->sin_family = AF_INET;
    old->sin_port = htons(static_cast<uint16_t>(address[4]));
    std::memcpy(&old->sin_addr, ip + sizeof(kOfIpv4), sizeof(old->sin_addr));
    *size = sizeof(*old);
  } else {
    auto* const now = reinterpret_cast<sockaddr_in6*>(&found);
    now->sin6_family = AF_INET6;
    now->sin6_port = htons(static_cast<uint16_t>(address[4]));
    std::memcpy(&now->sin6_addr, ip, sizeof(ip));
    *size = sizeof(*now);
  }
  return found;
}

void SetIp(const std::string& host, Mail::Address* address) {
  unsigned char ip[16];
  std::memcpy(ip, kOfIpv4, sizeof(kOfIpv4));
  if (inet_pton(AF_INET, host.c_str(), ip + sizeof(kOfIpv4)) != 1 && inet_pton(AF_INET6, host.c_str(), ip) != 1) {
    throw FailedPrecondition("'" + host + "' is no IP address.");
  }
  std::memcpy(&(*address)[2], ip, sizeof(ip));
}

void SetSeconds(int fd, int option, double seconds) {
  timeval time = {};
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_usec = static_cast<suseconds_t>((seconds - static_cast<double>(time.tv_sec)) * 1e6);
  setsockopt(fd, SOL_SOCKET, option, &time, sizeof(time));
}

// Messages leave at once; and the kernel asks a silent host whether it is still there.
void SetUpFar(int fd, double lost_after) {
  const auto set = [fd](int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof(value)); };
  const int seconds = std::max(1, static_cast<int>(lost_after));
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 3));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / 6));
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 1000 * seconds);
}

// What a caller says first: its rank, and the number of whom it calls, which strangers do not know.
using Hello = std::array<int64_t, 3>;

// Anybody on the host can see the address.
void CheckIsOurs(int fd) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) {
    throw FailedPrecondition("a process of another user is at the other end of a socket.");
  }
}

struct Socket {
  int fd = -1;
  explicit Socket(int descriptor) : fd(descriptor) {}
  ~Socket() {
    if (fd >= 0) close(fd);
  }
  int Release() { return std::exchange(fd, -1); }
};

}  // namespace

struct Mail::Peer {
  int rank, fd;
  bool is_far;
  std::mutex sending;
  std::string outbox;  // of which the socket has not taken yet what is behind `taken`
  size_t taken = 0;
  std::string inbox;  // the beginning of a frame
  bool is_lost = false;
  std::string why_lost;  // with the mutex of the mail; empty while it may send more
  Peer(int number, int descriptor, bool is_on_another_host)
      : rank(number), fd(descriptor), is_far(is_on_another_host) {}
  ~Peer() { CloseSocket(); }
  void CloseSocket() {
    if (fd >= 0) close(std::exchange(fd, -1));
  }
};

struct Mail::Finished {
  Done done;
  std::string error;
  std::vector<Words> received;
};

Mail::Mail(int rank, int size, const std::string& host)
    : rank_(rank), size_(size), is_here_(static_cast<size_t>(std::max(size, 0)), false) {
  if (rank < 0 || rank >= size || size > kMaxRanks) {
    throw FailedPrecondition("there is no mail for rank " + std::to_string(rank) + " of " + std::to_string(size) + ".");
  }
  std::random_device random;
  for (int i : {0, 1}) address_[i] = static_cast<int64_t>((uint64_t{random()} << 32) | random());
  Socket listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t bytes;
  const sockaddr_un address = SocketAddress(address_, &bytes);
  if (listener.fd < 0 || bind(listener.fd, reinterpret_cast<const sockaddr*>(&address), bytes) != 0 ||
      listen(listener.fd, size) != 0) {
    throw Failure("no socket to listen at");
  }
  Socket far(-1);
  if (!host.empty()) {
    SetIp(host, &address_);
    sockaddr_storage at = FarAddress(address_, &bytes);
    far.fd = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (far.fd < 0 || bind(far.fd, reinterpret_cast<const sockaddr*>(&at), bytes) != 0 || listen(far.fd, size) != 0 ||
        getsockname(far.fd, reinterpret_cast<sockaddr*>(&at), &bytes) != 0) {
      throw Failure("no socket to listen at " + host);
    }
    address_[4] = ntohs(at.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in*>(&at)->sin_port
                                                : reinterpret_cast<const sockaddr_in6*>(&at)->sin6_port);
  }
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) throw Failure("no event to wake a thread");
  listener_ = listener.Release();
  far_listener_ = far.Release();
}

Mail::~Mail() {
  Close("the job has ended.");
  if (reader_.joinable()) reader_.join();
  CloseSockets();
}

bool Mail::IsAnyHere() const {
  if (is_closed_) return false;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && IsHere(r)) return true;
  return false;
}

void Mail::Connect(const std::vector<Address>& addresses, const std::vector<bool>& is_here, double seconds,
                   double lost_after) {
  if (reader_.joinable()) throw FailedPrecondition("this process has connected already.");
  if (static_cast<int>(addresses.size()) != size_ || is_here.size() != addresses.size()) {
    throw FailedPrecondition("there must be " + std::to_string(size_) + " addresses.");
  }
  std::copy(is_here.begin(), is_here.end(), is_here_.begin());
  peers_.clear();
  peers_.resize(static_cast<size_t>(size_));
  // Lower ranks are called, higher ones call.
  for (int r = 0; r < rank_; ++r) {
    const Address& number = addresses[static_cast<size_t>(r)];
    socklen_t bytes = 0;
    const sockaddr_un here = SocketAddress(number, &bytes);
    const auto* address = reinterpret_cast<const sockaddr*>(&here);
    sockaddr_storage far;
    if (!IsHere(r)) {
      if (number[4] <= 0 || number[4] > UINT16_MAX) {
        throw FailedPrecondition("rank " + std::to_string(r) + " is on another host, and cannot be called.");
      }
      far = FarAddress(number, &bytes);
      address = reinterpret_cast<const sockaddr*>(&far);
    }
    Socket to(socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (to.fd >= 0) SetSeconds(to.fd, SO_SNDTIMEO, seconds);
    if (to.fd < 0 || connect(to.fd, address, bytes) != 0) {
      throw Failure("rank " + std::to_string(r) + " cannot be reached by a socket");
    }
    if (IsHere(r)) {
      CheckIsOurs(to.fd);
    } else {
      SetUpFar(to.fd, lost_after);
    }
    const Hello hello = {rank_, number[0], number[1]};
    if (send(to.fd, hello.data(), sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) throw Failure("nothing can be sent");
    peers_[static_cast<size_t>(r)] = std::make_unique<Peer>(r, to.Release(), !IsHere(r));
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const auto has_called = [this](int r) { return peers_[static_cast<size_t>(r)] != nullptr; };
  for (;;) {
    int left = 0;
    for (int r = rank_ + 1; r < size_; ++r) left += !has_called(r);
    if (left == 0) break;
    pollfd waiting[2] = {{listener_, POLLIN, 0}, {far_listener_, POLLIN, 0}};  // poll passes over what is below 0
    const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (rest.count() <= 0 || poll(waiting, 2, static_cast<int>(rest.count())) <= 0) {
      throw FailedPrecondition(std::to_string(left) + " ranks have not called within " + std::to_string(seconds) +
                               " s.");
    }
    for (const pollfd& one : waiting)
      if (one.revents != 0) Accept(one.fd, seconds, lost_after);
  }
  for (int* fd : {&listener_, &far_listener_})
    if (*fd >= 0) close(std::exchange(*fd, -1));
  reader_ = std::thread([this] { Read(); });
}

// Takes a call.
void Mail::Accept(int listener, double seconds, double lost_after) {
  Socket from(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (from.fd < 0 && (errno == ECONNABORTED || errno == EINTR)) return;
  if (from.fd < 0) throw Failure("no caller");
  const bool is_far = listener == far_listener_;
  SetSeconds(from.fd, SO_RCVTIMEO, std::min(seconds, kSecondsToSayHello));
  Hello hello = {};
  const bool is_whole = recv(from.fd, hello.data(), sizeof(hello), MSG_WAITALL) == sizeof(hello);
  // Whoever finds a port of ours may call there: that is no reason to end a job.
  if (!is_whole || hello[1] != address_[0] || hello[2] != address_[1]) return;
  const int64_t rank = hello[0];
  if (rank <= rank_ || rank >= size_ || peers_[static_cast<size_t>(rank)] != nullptr || IsHere(rank) == is_far) {
    throw FailedPrecondition("somebody calls who is no rank of this job.");
  }
  if (is_far) {
    SetUpFar(from.fd, lost_after);
  } else {
    CheckIsOurs(from.fd);
  }
  peers_[static_cast<size_t>(rank)] = std::make_unique<Peer>(static_cast<int>(rank), from.Release(), is_far);
}

void Mail::AllToAll(const std::string& name, std::vector<Words> sent, Done done) {
  if (!reader_.joinable()) return done("this process has not connected with its peers.", {});
  if (static_cast<int>(sent.size()) != size_) return done("there must be one message per rank.", {});
  const Frame frame_of_name = {static_cast<int64_t>(name.size()), 0};
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    const Words& words = sent[static_cast<size_t>(peer->rank)];
    Frame frame = frame_of_name;
    frame.num_words = static_cast<int64_t>(words.size());
    std::string bytes(frame.bytes(), '\0');
    std::memcpy(&bytes[0], &frame, sizeof(frame));
    std::memcpy(&bytes[sizeof(frame)], name.data(), name.size());
    if (!words.empty()) std::memcpy(&bytes[bytes.size() - words.size() * 8], words.data(), words.size() * 8);
    Send(peer.get(), std::move(bytes));
  }
  std::vector<Words> own(static_cast<size_t>(size_));
  own[static_cast<size_t>(rank_)] = std::move(sent[static_cast<size_t>(rank_)]);
  std::vector<Finished> finished;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Call& call = calls_[name];
    call.received.resize(static_cast<size_t>(size_));
    call.waiting.emplace_back(std::move(own), std::move(done));
    Match(name, &finished);
  }
  for (Finished& one : finished) one.done(one.error, one.received);
}

// Takes out the calls of a name for which all has come, and those for which something cannot come any more. What a peer
// sent before it left counts, also while another is late: who is early may have left the job in good order.
void Mail::Match(const std::string& name, std::vector<Finished>* finished) {
  const auto at = calls_.find(name);
  if (at == calls_.end()) return;
  Call& call = at->second;
  while (!call.waiting.empty()) {
    bool is_complete = true;
    std::string error;
    for (const auto& peer : peers_) {
      if (peer == nullptr || !call.received[static_cast<size_t>(peer->rank)].empty()) continue;
      is_complete = false;
      if (error.empty()) error = peer->why_lost;
    }
    if (!is_complete && error.empty()) break;
    auto& [words, done] = call.waiting.front();
    finished->push_back({std::move(done), error, std::move(words)});
    call.waiting.pop_front();
    if (!is_complete) continue;
    for (const auto& peer : peers_) {
      if (peer == nullptr) continue;
      auto& from = call.received[static_cast<size_t>(peer->rank)];
      finished->back().received[static_cast<size_t>(peer->rank)] = std::move(from.front());
      from.pop_front();
    }
  }
  const auto is_empty = [](const std::deque<Words>& from) { return from.empty(); };
  if (call.waiting.empty() && std::all_of(call.received.begin(), call.received.end(), is_empty)) calls_.erase(at);
}

void Mail::Leave(double seconds) {
  Drain(seconds);
  Close("the job has ended.");
}

void Mail::Drain(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  // The reader goes on meanwhile: the other side may be leaving, too.
  auto has_more = [](Peer* peer) {
    const std::lock_guard<std::mutex> lock(peer->sending);
    if (!peer->is_lost) Flush(peer);
    if (peer->is_lost || !peer->outbox.empty()) return !peer->is_lost;
    // TCP drops what is on its way when a socket is closed that has something to read.
    int queued = 0;
    return peer->is_far && ioctl(peer->fd, SIOCOUTQ, &queued) == 0 && queued > 0;
  };
  for (const auto& peer : peers_) {
    while (peer != nullptr && has_more(peer.get()) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

void Mail::Close(const std::string& why) {
  if (is_closed_.exchange(true)) return;
  for (const auto& peer : peers_)
    if (peer != nullptr) Lose(peer.get(), why);
  if (!reader_.joinable()) return CloseSockets();  // else the reader does, once it has seen that
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t one = 1;
  if (wake_ >= 0 && write(wake_, &one, sizeof(one)) < 0) return;  // full: it wakes anyway
}

// After this nobody sends, and nothing comes. A process that is in many jobs, one after the other, would have no file left.
void Mail::CloseSockets() {
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    const std::lock_guard<std::mutex> sending(peer->sending);
    peer->is_lost = true;
    peer->CloseSocket();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int* fd : {&listener_, &far_listener_, &wake_}) {
    if (*fd >= 0) close(std::exchange(*fd, -1));
  }
}

// The peer sends no more. What waits for it, or will, gets `why`.
void Mail::Lose(Peer* peer, const std::string& why) {
  std::vector<Finished> finished;
  {
    // The reason first: the reader, which sees the closed socket, would find another.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (peer->why_lost.empty()) peer->why_lost = why;
    std::vector<std::string> names;
    for (const auto& call : calls_) names.push_back(call.first);
    for (const std::string& name : names) Match(name, &finished);
  }
  {
    const std::lock_guard<std::mutex> sending(peer->sending);
    peer->is_lost = true;
    peer->outbox.clear();
    peer->taken = 0;
    shutdown(peer->fd, SHUT_RDWR);
  }
  for (Finished& one : finished) one.done(one.error, one.received);
}

void Mail::Send(Peer* peer, std::string&& bytes) {
  const std::lock_guard<std::mutex> lock(peer->sending);
  if (peer->is_lost) return;
  if (peer->outbox.empty()) {
    peer->outbox = std::move(bytes);
    Flush(peer);
  } else {
    peer->outbox += bytes;
  }
  const uint64_t one = 1;
  // The reader sends the rest, once the socket takes it.
  if (!peer->outbox.empty() && write(wake_, &one, sizeof(one)) < 0) return;
}

// With peer->sending. An error shows when the reader reads.
void Mail::Flush(Peer* peer) {
  std::string& outbox = peer->outbox;
  while (peer->taken < outbox.size()) {
    const ssize_t n =
        send(peer->fd, outbox.data() + peer->taken, outbox.size() - peer->taken, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    peer->taken += static_cast<size_t>(n);
  }
  if (peer->taken == outbox.size()) {
    outbox.clear();
    if (outbox.capacity() > kKept) std::string().swap(outbox);
  } else if (peer->taken < outbox.size() / 2 || peer->taken < kKept) {
    return;  // to move the rest each time takes longer than to send it
  } else {
    outbox.erase(0, peer->taken);
  }
  peer->taken = 0;
}

void Mail::Read() {
  std::vector<pollfd> files;
  std::vector<Peer*> readers;
  while (!is_closed_) {
    files.assign(1, {wake_, POLLIN, 0});
    readers.assign(1, nullptr);
    for (const auto& peer : peers_) {
      if (peer == nullptr) continue;
      const std::lock_guard<std::mutex> lock(peer->sending);
      if (peer->is_lost) continue;
      files.push_back({peer->fd, static_cast<int16_t>(peer->outbox.empty() ? POLLIN : POLLIN | POLLOUT), 0});
      readers.push_back(peer.get());
    }
    if (poll(files.data(), files.size(), -1) < 0) continue;
    uint64_t woken;
    if (files[0].revents != 0 && read(wake_, &woken, sizeof(woken)) < 0) continue;
    for (size_t i = 1; i < files.size(); ++i) {
      if ((files[i].revents & POLLOUT) != 0) {
        const std::lock_guard<std::mutex> lock(readers[i]->sending);
        Flush(readers[i]);
      }
      if ((files[i].revents & ~POLLOUT) != 0 && !ReadFrom(readers[i])) {
        Lose(readers[i], "connection closed by peer: rank " + std::to_string(readers[i]->rank) + " has left the job.");
      }
    }
  }
  CloseSockets();
}

// Whether the peer may send more.
bool Mail::ReadFrom(Peer* peer) {
  const size_t before = peer->inbox.size();
  peer->inbox.resize(before + kChunk);
  const ssize_t n = recv(peer->fd, &peer->inbox[before], kChunk, MSG_DONTWAIT);
  peer->inbox.resize(before + static_cast<size_t>(std::max<ssize_t>(n, 0)));
  if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR);
  std::vector<Finished> finished;
  size_t at = 0;
  bool is_right = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (peer->inbox.size() - at >= sizeof(Frame)) {
      Frame frame;
      std::memcpy(&frame, peer->inbox.data() + at, sizeof(frame));
      is_right =
          frame.name_bytes >= 0 && frame.name_bytes <= kMaxName && frame.num_words >= 0 && frame.num_words <= kMaxWords;
      if (!is_right || peer->inbox.size() - at < frame.bytes()) break;
      const std::string name = peer->inbox.substr(at + sizeof(frame), static_cast<size_t>(frame.name_bytes));
      Words words(static_cast<size_t>(frame.num_words));
      at += frame.bytes();
      if (!words.empty()) std::memcpy(words.data(), peer->inbox.data() + at - words.size() * 8, words.size() * 8);
      Call& call = calls_[name];
      call.received.resize(static_cast<size_t>(size_));
      call.received[static_cast<size_t>(peer->rank)].push_back(std::move(words));
      Match(name, &finished);
    }
  }
  peer->inbox.erase(0, at);
  if (peer->inbox.empty() && peer->inbox.capacity() > kKept) std::string().swap(peer->inbox);
  for (Finished& one : finished) one.done(one.error, one.received);
  return is_right;
}

}  // namespace sok
