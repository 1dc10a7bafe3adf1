#include "sok/mail.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "threads.h"

namespace {

using sok::Mail;
using Received = std::vector<Mail::Words>;

constexpr double kSeconds = 30.0, kLostAfter = 60.0;
constexpr size_t kLargeWords = size_t{3} << (kFewer > 1 ? 19 : 20);  // sockets hold 10 MiB at most, sent and received

// All ranks of a job in this process, connected: as on one host, or as on hosts of two ranks each.
std::vector<std::unique_ptr<Mail>> Job(int size, bool is_far) {
  std::vector<std::unique_ptr<Mail>> ranks;
  std::vector<Mail::Address> addresses;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(std::make_unique<Mail>(r, size, is_far ? "127.0.0.1" : ""));
    addresses.push_back(ranks.back()->address());
  }
  RunTogether(size, [&](int r) {
    std::vector<bool> is_here(static_cast<size_t>(size), true);
    for (int other = 0; is_far && other < size; ++other) is_here[static_cast<size_t>(other)] = other % 2 == r % 2;
    ranks[static_cast<size_t>(r)]->Connect(addresses, is_here, kSeconds, kLostAfter);
  });
  return ranks;
}

#define ON_ONE_HOST_AND_BETWEEN(name)      \
  void name(bool is_far);                  \
  TEST(name##OnOneHost) { name(false); }   \
  TEST(name##BetweenHosts) { name(true); } \
  void name([[maybe_unused]] bool is_far)

// What will come, or why nothing does.
class Answer {
 public:
  Answer(Mail* rank, const std::string& name, std::vector<Mail::Words> sent) {
    auto promise = std::make_shared<std::promise<std::pair<std::string, Received>>>();
    future_ = promise->get_future();
    rank->AllToAll(name, std::move(sent), [promise](const std::string& error, const Received& received) {
      promise->set_value({error, received});
    });
  }
  Received get() {
    const auto [error, received] = future_.get();
    if (!error.empty()) throw sok::FailedPrecondition(error);
    return received;
  }

 private:
  std::future<std::pair<std::string, Received>> future_;
};

Answer Exchange(Mail* rank, const std::string& name, std::vector<Mail::Words> sent) {
  return Answer(rank, name, std::move(sent));
}

ON_ONE_HOST_AND_BETWEEN(EveryRankGetsWhatTheOthersSend) {
  for (const int size : {1, 2, 4}) {
    auto job = Job(size, is_far);
    std::vector<Answer> futures;
    for (int from = 0; from < size; ++from) {
      std::vector<Mail::Words> sent;
      for (int to = 0; to < size; ++to) sent.push_back(Mail::Words(static_cast<size_t>(to), 10 * from + to));
      futures.push_back(Exchange(job[static_cast<size_t>(from)].get(), "keys", sent));
    }
    for (int to = 0; to < size; ++to) {
      const Received received = futures[static_cast<size_t>(to)].get();
      for (int from = 0; from < size; ++from) {
        CHECK(received[static_cast<size_t>(from)] == Mail::Words(static_cast<size_t>(to), 10 * from + to));
      }
    }
  }
}

ON_ONE_HOST_AND_BETWEEN(NamesMeetInAnyOrderAndCallsOfANameInTheirOwn) {
  auto job = Job(2, is_far);
  std::vector<Answer> here, there;
  for (int64_t i = 0; i < 300; ++i) {
    here.push_back(Exchange(job[0].get(), "name" + std::to_string(i % 7), {{}, {i}}));
  }
  for (int64_t name = 6; name >= 0; --name) {
    for (int64_t i = name; i < 300; i += 7) {
      there.push_back(Exchange(job[1].get(), "name" + std::to_string(name), {{1000 + i}, {}}));
    }
  }
  for (int64_t i = 0; i < 300; ++i) CHECK_EQ(here[static_cast<size_t>(i)].get()[1][0], 1000 + i);
  size_t at = 0;
  for (int64_t name = 6; name >= 0; --name)
    for (int64_t i = name; i < 300; i += 7) CHECK_EQ(there[at++].get()[0][0], i);
}

ON_ONE_HOST_AND_BETWEEN(MoreThanASocketTakesAtOnceArrivesWhole) {
  auto job = Job(2, is_far);
  Mail::Words large(kLargeWords);
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<int64_t>(i * i);
  auto first = Exchange(job[0].get(), "large", {{}, large});
  auto second = Exchange(job[1].get(), "large", {large, {}});
  CHECK(first.get()[1] == large);
  CHECK(second.get()[0] == large);
}

ON_ONE_HOST_AND_BETWEEN(ManyThreadsMaySend) {
  auto job = Job(3, is_far);
  RunTogether(12, [&](int t) {
    for (int64_t i = 0; i < 50; ++i) {
      Mail* const rank = job[static_cast<size_t>(t % 3)].get();
      const Received received = Exchange(rank, "thread" + std::to_string(t / 3), {{i}, {i}, {i}}).get();
      for (const auto& words : received) CHECK_EQ(words.at(0), i);
    }
  });
}

ON_ONE_HOST_AND_BETWEEN(WhoWaitsForARankThatHasEndedIsTold) {
  auto job = Job(3, is_far);
  auto waits = Exchange(job[0].get(), "keys", {{}, {}, {}});
  auto complete = Exchange(job[0].get(), "before", {{}, {}, {}});
  for (size_t r = 1; r < 3; ++r) (void)Exchange(job[r].get(), "before", {{}, {}, {}});
  CHECK_EQ(complete.get().size(), size_t{3});
  job[2].reset();
  CHECK_THROWS(waits.get(), sok::FailedPrecondition, "rank 2 has left the job");
  auto later = Exchange(job[1].get(), "keys", {{}, {}, {}});
  CHECK_THROWS(later.get(), sok::FailedPrecondition, "rank 2 has left the job");
}

ON_ONE_HOST_AND_BETWEEN(WhatARankSentBeforeItEndedArrives) {
  auto job = Job(2, is_far);
  (void)Exchange(job[1].get(), "keys", {{7}, {}});
  job[1].reset();
  CHECK_EQ(Exchange(job[0].get(), "keys", {{}, {}}).get()[1][0], 7);
  CHECK_THROWS(Exchange(job[0].get(), "keys", {{}, {}}).get(), sok::FailedPrecondition, "has left the job");
}

ON_ONE_HOST_AND_BETWEEN(ARankMayLeaveBeforeAnotherHasSent) {
  auto job = Job(3, is_far);
  auto waits = Exchange(job[0].get(), "keys", {{}, {}, {}});
  (void)Exchange(job[1].get(), "keys", {{7}, {}, {}});
  auto lost = Exchange(job[0].get(), "rows", {{}, {}, {}});
  job[1].reset();
  CHECK_THROWS(lost.get(), sok::FailedPrecondition, "rank 1 has left the job");  // so rank 0 knows
  (void)Exchange(job[2].get(), "keys", {{8}, {}, {}});
  const Received received = waits.get();
  CHECK_EQ(received[1][0], 7);
  CHECK_EQ(received[2][0], 8);
}

ON_ONE_HOST_AND_BETWEEN(WhoLeavesSendsWhatASocketDidNotTake) {
  auto job = Job(2, is_far);
  const Mail::Words large(kLargeWords, 5);
  (void)Exchange(job[1].get(), "keys", {large, {}});
  job[1]->Leave(30.0);
  CHECK(Exchange(job[0].get(), "keys", {{}, {}}).get()[1] == large);
  auto after = Exchange(job[1].get(), "keys", {{}, {}});
  CHECK_THROWS(after.get(), sok::FailedPrecondition, "the job has ended");
}

ON_ONE_HOST_AND_BETWEEN(ClosingTellsAll) {
  // Often: its reader must not find the closed socket before it knows the reason.
  for (int i = 0; i < 100; ++i) {
    auto job = Job(2, is_far);
    auto own = Exchange(job[0].get(), "keys", {{}, {}});
    auto other = Exchange(job[1].get(), "rows", {{}, {}});
    job[0]->Close("too late.");
    CHECK_THROWS(own.get(), sok::FailedPrecondition, "too late");
    CHECK_THROWS(other.get(), sok::FailedPrecondition, "rank 0 has left the job");
  }
}

int OpenFiles() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) != -1;
  return count;
}

ON_ONE_HOST_AND_BETWEEN(WhoHasLeftHoldsNoFile) {
  const int before = OpenFiles();
  auto job = Job(3, is_far);
  job.push_back(std::make_unique<Mail>(0, 2));  // one that nobody has called
  CHECK(OpenFiles() > before);
  for (const auto& rank : job) rank->Leave(30.0);
  for (int i = 0; i < 3000 && OpenFiles() != before; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK_EQ(OpenFiles(), before);
  CHECK_THROWS(Exchange(job[0].get(), "keys", {{}, {}, {}}).get(), sok::FailedPrecondition, "the job has ended");
  job[1]->Close("again.");
}

TEST(NobodyWaitsForMailThatCannotCome) {
  const std::vector<bool> here(2, true), far = {true, false};
  Mail alone(0, 2);
  CHECK_THROWS(Exchange(&alone, "keys", {{}, {}}).get(), sok::FailedPrecondition, "not connected");
  const Mail::Address nobody = {1, 2};
  CHECK_THROWS(alone.Connect({alone.address(), nobody}, here, 0.01, 1), sok::FailedPrecondition, "have not called");
  Mail caller(1, 2);
  CHECK_THROWS(caller.Connect({nobody, caller.address()}, here, 0.01, 1), sok::FailedPrecondition,
               "rank 0 cannot be reached");
  CHECK_THROWS(caller.Connect({nobody, caller.address()}, {false, true}, 0.01, 1), sok::FailedPrecondition,
               "rank 0 is on another host, and cannot be called");
  auto job = Job(2, false);
  CHECK_THROWS(Exchange(job[0].get(), "keys", {{}}).get(), sok::FailedPrecondition, "one message per rank");
  CHECK_THROWS(job[0]->Connect({nobody, nobody}, here, 1.0, 1), sok::FailedPrecondition, "connected already");
  CHECK_THROWS(alone.Connect({alone.address()}, here, 1.0, 1), sok::FailedPrecondition, "2 addresses");
  CHECK_THROWS(Mail(2, 2), sok::FailedPrecondition, "rank 2 of 2");
  CHECK_THROWS(Mail(0, 2, "localhost"), sok::FailedPrecondition, "'localhost' is no IP address");
  CHECK_THROWS(Mail(0, 2, "192.0.2.1"), sok::FailedPrecondition, "no socket to listen at 192.0.2.1");
}

TEST(StrangersWhoCallAreLeftAlone) {
  Mail mail(0, 2, "127.0.0.1"), other(1, 2, "127.0.0.1");
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(mail.address()[4]));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> strangers;
  for (const size_t words : {0, 1, 3}) {  // one that ends, one that says too little, one that does not know the number
    const int stranger = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(connect(stranger, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    const int64_t hello[3] = {1, mail.address()[0], mail.address()[1] + 1};
    CHECK_EQ(send(stranger, hello, words * sizeof(int64_t), 0), static_cast<ssize_t>(words * sizeof(int64_t)));
    shutdown(stranger, SHUT_WR);
    strangers.push_back(stranger);
  }
  RunTogether(2, [&](int r) {
    (r == 0 ? mail : other).Connect({mail.address(), other.address()}, {r == 0, r == 1}, kSeconds, kLostAfter);
  });
  auto sent = Exchange(&mail, "keys", {{}, {5}});
  CHECK_EQ(Exchange(&other, "keys", {{6}, {}}).get()[0][0], 5);
  CHECK_EQ(sent.get()[1][0], 6);
  for (const int stranger : strangers) close(stranger);
}

TEST(HostsAreCalledByTheNewerKindOfAddressToo) {
  std::vector<std::unique_ptr<Mail>> job;
  try {
    for (int r : {0, 1}) job.push_back(std::make_unique<Mail>(r, 2, "::1"));
  } catch (const sok::FailedPrecondition&) {
    return;  // this machine has none
  }
  RunTogether(2, [&](int r) {
    job[static_cast<size_t>(r)]->Connect({job[0]->address(), job[1]->address()}, {r == 0, r == 1}, kSeconds,
                                         kLostAfter);
  });
  auto sent = Exchange(job[0].get(), "keys", {{}, {5}});
  CHECK_EQ(Exchange(job[1].get(), "keys", {{6}, {}}).get()[0][0], 5);
  CHECK_EQ(sent.get()[1][0], 6);
}

}  // namespace
