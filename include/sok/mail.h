// Messages between the processes of a job: on one host over sockets of its kernel, between hosts over TCP.
//
// Every process listens at an address of its own, and learns those of the others by other means. From then on one thread
// reads what comes in, and calls back whoever waits for it. Messages of one name meet in the order in which each process
// sends them. A process that ends is noticed at once, since the kernel closes its sockets; a host that is gone, by the
// kernel's asking.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace sok {

class Mail {
 public:
  using Words = std::vector<int64_t>;
  // What each rank sent; or, if `error` is not empty, why it will not come. Called once, by any thread.
  using Done = std::function<void(const std::string& error, const std::vector<Words>& received)>;

  // Listens; for other hosts, too, at `host`, an IP address of this one, unless that is empty. Throws FailedPrecondition if
  // the kernel has no such sockets.
  Mail(int rank, int size, const std::string& host = "");
  ~Mail();
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  // Where this process listens: what the others must be given. A number of 128 bits that nobody can guess, an IP address of
  // as many, and a port: 0 where only this host can call.
  using Address = std::array<int64_t, 5>;
  const Address& address() const { return address_; }

  int64_t size() const { return size_; }

  // Connects with all others, which do the same within `seconds`. Throws FailedPrecondition where one cannot be reached.
  //   is_here      of each rank whether it is on this host, on which both sides agree
  //   lost_after   seconds of no answer after which another host is taken for gone
  void Connect(const std::vector<Address>& addresses, const std::vector<bool>& is_here, double seconds,
               double lost_after);

  // Whether a rank is on this host; and whether any but this one is.
  bool IsHere(int64_t rank) const { return is_here_[static_cast<size_t>(rank)] != 0; }
  bool IsAnyHere() const;

  // Sends `sent[r]` to rank r, and calls `done` when all ranks have sent theirs under this name.
  void AllToAll(const std::string& name, std::vector<Words> sent, Done done);

  // Returns once what this process has sent is on the other side, or after `seconds`. A process that ends before loses it.
  void Drain(double seconds);

  // Ends it in good order: drains it first.
  void Leave(double seconds);

  // Ends it at once: those who wait, here and elsewhere, are called with `why`.
  void Close(const std::string& why);

 private:
  struct Peer;
  struct Call {
    std::deque<std::pair<std::vector<Words>, Done>> waiting;  // with what this rank sent to itself
    std::vector<std::deque<Words>> received;                  // by rank
  };
  struct Finished;

  void Read();
  bool ReadFrom(Peer* peer);
  void Send(Peer* peer, std::string&& bytes);
  static void Flush(Peer* peer);
  void Lose(Peer* peer, const std::string& why);
  void Match(const std::string& name, std::vector<Finished>* finished);
  void CloseSockets();
  void Accept(int listener, double seconds, double lost_after);

  const int rank_, size_;
  Address address_{};
  int listener_ = -1, far_listener_ = -1, wake_ = -1;
  std::vector<char> is_here_;                 // of each rank
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; none of its own
  std::mutex mutex_;                          // of all below
  std::unordered_map<std::string, Call> calls_;
  std::atomic<bool> is_closed_{false};
  std::thread reader_;
};

}  // namespace sok
