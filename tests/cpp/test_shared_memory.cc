#include "sok/shared_memory.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "threads.h"

namespace {

TEST(WhatIsWrittenIsRead) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  const sok::SharedPool::Lease lease = pool.Take("keys", 300, 1);
  CHECK_EQ(reinterpret_cast<uintptr_t>(lease.data) % 64, uintptr_t{0});
  for (int i = 0; i < 300; ++i) lease.data[i] = static_cast<char>(i);
  char got[100];
  reader.Read(lease.region, 200, 100, got);
  for (int i = 0; i < 100; ++i) CHECK_EQ(got[i], static_cast<char>(200 + i));
}

TEST(ARegionIsUsedAgainWhenAllHaveReadIt) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  char byte;
  const sok::SharedPool::Lease first = pool.Take("keys", 5000, 2);
  reader.Read(first.region, 0, 1, &byte);
  CHECK(pool.Take("keys", 5000, 1).region.id != first.region.id);
  reader.Read(first.region, 0, 1, &byte);
  CHECK_EQ(pool.Take("keys", 6000, 1).region.id, first.region.id);
  CHECK_EQ(pool.num_regions(), 2);
}

TEST(SizesThatComeInTurnFindTheirRegions) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  char byte;
  int64_t first[3] = {0, 0, 0};
  for (int step = 0; step < 20; ++step) {
    for (int i = 0; i < 3; ++i) {
      const sok::SharedPool::Lease lease = pool.Take("keys", int64_t{100000} << 4 * i, 1);
      if (step == 0) first[i] = lease.region.id;
      CHECK_EQ(lease.region.id, first[i]);
      reader.Read(lease.region, 0, 1, &byte);
    }
  }
}

TEST(RegionsThatAreNotUsedMakePlace) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  char byte = 0;
  sok::SharedRegion smallest;
  for (int64_t bytes = int64_t{1} << 20; bytes <= int64_t{100} << 20; bytes += bytes / 2) {
    const sok::SharedPool::Lease lease = pool.Take("keys", bytes, 1);
    if (smallest.id == 0) smallest = lease.region;
    lease.data[bytes - 1] = 7;
    reader.Read(lease.region, bytes - 1, 1, &byte);
    CHECK_EQ(byte, 7);
    CHECK(pool.bytes() <= 3 * bytes);  // a region has up to half more than it was made for
  }
  CHECK_THROWS(reader.Read(smallest, 0, 1, &byte), sok::FailedPrecondition, "shared memory of process");
}

TEST(ManyCollectivesMayBeUnderWayAtOnce) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  std::vector<sok::SharedPool::Lease> leases;
  for (int i = 0; i < 300; ++i) {
    leases.push_back(pool.Take("keys of layer " + std::to_string(i), 10, 1));
    leases.back().data[0] = static_cast<char>(i);
  }
  for (int i = 0; i < 300; ++i) {
    char byte;
    reader.Read(leases[static_cast<size_t>(i)].region, 0, 1, &byte);
    CHECK_EQ(byte, static_cast<char>(i));
  }
}

TEST(WhatAFailedCallLeftUnreadIsGivenUp) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  char byte = 0;
  const sok::SharedPool::Lease failed = pool.Take("keys", 10, 1);
  const sok::SharedPool::Lease next = pool.Take("keys", 10, 1);
  // A slow reader may still be at it: of the call before the last nobody knows yet.
  reader.Read(failed.region, 0, 1, &byte);
  const sok::SharedPool::Lease other = pool.Take("rows", 10, 1);
  for (int i = 0; i < 200; ++i) pool.Take("keys", 10, 1);
  CHECK(pool.num_regions() < 6);
  CHECK_THROWS(reader.Read(next.region, 0, 1, &byte), sok::FailedPrecondition, "shared memory of process");
  reader.Read(other.region, 0, 1, &byte);
}

TEST(WhatAnOwnerWroteIsSentWhereItLies) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  std::shared_ptr<char> owner = pool.Allocate(3000);
  CHECK_EQ(reinterpret_cast<uintptr_t>(owner.get()) % 64, uintptr_t{0});
  for (int i = 0; i < 3000; ++i) owner.get()[i] = static_cast<char>(i);
  CHECK(pool.Allocate(3000).get() != owner.get());  // it has an owner
  sok::SharedPool::Lease lease;
  CHECK(!pool.Lend("rows", owner.get() + 64, 1, &lease));
  CHECK(pool.Lend("rows", owner.get(), 2, &lease) && lease.data == owner.get());
  CHECK(!pool.Lend("other rows", owner.get(), 1, &lease));  // not all have read it: who sends must copy
  char got[3];
  for (int rank = 0; rank < 2; ++rank) {
    reader.Read(lease.region, 1000, 3, got);
    CHECK(got[0] == static_cast<char>(1000) && got[2] == static_cast<char>(1002));
  }
  CHECK(pool.Lend("other rows", owner.get(), 1, &lease));
  reader.Read(lease.region, 0, 1, got);
  owner.reset();
  CHECK_EQ(pool.Allocate(3000).get(), lease.data);
  CHECK_EQ(pool.num_regions(), 2);
}

TEST(MemoryThatPeersHaveNotReadIsNotUsedAgain) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  std::shared_ptr<char> owner = pool.Allocate(100);
  sok::SharedPool::Lease lease;
  CHECK(pool.Lend("rows", owner.get(), 1, &lease));
  owner.reset();
  CHECK(pool.Allocate(100).get() != lease.data);
  char byte;
  reader.Read(lease.region, 0, 1, &byte);
  CHECK_EQ(pool.Allocate(100).get(), lease.data);
}

TEST(MemoryThatIsGivenUpStaysForItsOwner) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  char byte;
  const std::shared_ptr<char> owner = pool.Allocate(100);
  sok::SharedPool::Lease failed;
  CHECK(pool.Lend("rows", owner.get(), 1, &failed));  // and nobody reads it
  for (int i = 0; i < 3; ++i) {
    const sok::SharedPool::Lease lease = pool.Take("rows", 100, 1);
    reader.Read(lease.region, 0, 1, &byte);
  }
  CHECK(!pool.Lend("rows", owner.get(), 1, &failed));
  std::memset(owner.get(), 1, 100);
  // An eager program may keep many answers: memory that waits for its owner alone is not given up.
  const std::shared_ptr<char> kept = pool.Allocate(100);
  CHECK(pool.Lend("kept", kept.get(), 1, &failed));
  reader.Read(failed.region, 0, 1, &byte);
  for (int i = 0; i < 5; ++i) pool.Take("kept", 10, 1);
  CHECK(pool.Lend("kept", kept.get(), 1, &failed));
}

TEST(WhatARegionDoesNotHoldIsNotRead) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  char byte;
  const sok::SharedPool::Lease lease = pool.Take("keys", 10, 1);
  CHECK_THROWS(reader.Read(lease.region, int64_t{1} << 30, 1, &byte), sok::FailedPrecondition, "does not hold");
  CHECK_THROWS(reader.Read(lease.region, -1, 1, &byte), sok::FailedPrecondition, "does not hold");
  CHECK_THROWS(reader.Read(lease.region, INT64_MAX - 4, 8, &byte), sok::FailedPrecondition, "does not hold");
  CHECK_THROWS(reader.Read(lease.region, 8, INT64_MAX - 4, &byte), sok::FailedPrecondition, "does not hold");
  CHECK_THROWS(reader.Read({getpid(), 0, 5}, 0, 1, &byte), sok::FailedPrecondition, "shared memory of process");
  CHECK_THROWS(reader.Read({getpid(), 12345, 5}, 0, 1, &byte), sok::FailedPrecondition, "cannot be opened");
}

// Somebody names a file of this process that is no region, and has put into it what a region begins with.
TEST(AFileThatIsNoRegionIsNotMapped) {
  sok::SharedReader reader;
  char name[] = "/tmp/sok_no_region_XXXXXX";
  const int file = mkstemp(name);
  unlink(name);
  std::vector<int64_t> words(2048, 0);
  words[0] = 5;  // the id
  const auto bytes = static_cast<ssize_t>(words.size() * sizeof(words[0]));
  CHECK_EQ(write(file, words.data(), static_cast<size_t>(bytes)), bytes);
  char byte;
  CHECK_THROWS(reader.Read({getpid(), file, 5}, 0, 1, &byte), sok::FailedPrecondition, "cannot be opened");
  close(file);
}

TEST(AnotherProcessReads) {
  sok::SharedPool pool;
  std::vector<sok::SharedPool::Lease> leases;
  for (int i = 0; i < 3; ++i) {
    leases.push_back(pool.Take(std::to_string(i), 1 << 20, 1));
    std::memset(leases.back().data, 'a' + i, 1 << 20);
  }
  const pid_t child = fork();
  if (child == 0) {
    // Not by inheritance: opened anew, as a stranger would.
    sok::SharedReader reader;
    std::vector<char> got(1 << 20);
    int wrong = 0;
    for (int i = 0; i < 3; ++i) {
      reader.Read(leases[static_cast<size_t>(i)].region, 0, 1 << 20, got.data());
      for (const char c : got) wrong += c != 'a' + i;
    }
    _exit(wrong == 0 ? 0 : 1);
  }
  int status = 1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  for (int i = 0; i < 3; ++i) pool.Take(std::to_string(i), 1 << 20, 1);
  CHECK_EQ(pool.num_regions(), 3);  // all were free again
}

// ThreadSanitizer takes the two addresses of one region for two places and does not see what orders them.
#ifndef __SANITIZE_THREAD__
TEST(ManyThreadsSendAndRead) {
  sok::SharedPool pool;
  sok::SharedReader reader;
  std::atomic<int> wrong{0};
  RunTogether(4, [&](int thread) {
    for (int i = 0; i < 200; ++i) {
      const int64_t bytes = 1000 + 7777 * ((i * 7 + thread) % 300);
      const sok::SharedPool::Lease lease = pool.Take(std::to_string(thread), bytes, 1);
      std::memset(lease.data, thread * 50 + i % 50, static_cast<size_t>(bytes));
      std::vector<char> got(static_cast<size_t>(bytes));
      reader.Read(lease.region, 0, bytes, got.data());
      for (const char c : got) wrong += c != static_cast<char>(thread * 50 + i % 50);
    }
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK(pool.bytes() <= 2 * 4 * (int64_t{3} << 20));  // twice what four threads may use at once
}
#endif

}  // namespace
