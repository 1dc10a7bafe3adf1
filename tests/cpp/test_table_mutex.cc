// Who waits for whom at the lock of a table. What is bounded is how often others go first, never time.
#include "sok/table_mutex.h"

#include <atomic>
#include <future>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "check.h"
#include "tables.h"

namespace {

using Lock = std::unique_lock<sok::TableMutex>;
using SharedLock = std::shared_lock<sok::TableMutex>;

}  // namespace

TEST(ReadersThatComeWhileAWriterWaitsAreNotLetIn) {
  sok::TableMutex mutex;
  std::promise<void> is_in, may_leave;
  std::thread reader([&] {
    const SharedLock lock(mutex);
    is_in.set_value();
    may_leave.get_future().wait();
  });
  is_in.get_future().wait();
  std::atomic<bool> written{false};
  std::thread writer([&] {
    const Lock lock(mutex);
    written.store(true);
  });
  bool let_in = true;
  for (int64_t tried = 0; let_in && tried < 10'000'000; ++tried) {
    let_in = mutex.try_lock_shared();  // true until the writer waits
    if (let_in) mutex.unlock_shared();
    std::this_thread::yield();
  }
  CHECK(!let_in);
  CHECK(!written.load());
  CHECK(!mutex.try_lock());
  may_leave.set_value();
  reader.join();
  writer.join();
  CHECK(written.load());
  CHECK(mutex.try_lock());
  CHECK(!mutex.try_lock_shared());
  mutex.unlock();
}

TEST(WritersInALoopLetReadersIn) {
  constexpr int64_t kReads = 50, kMostWrites = 1'000'000;
  sok::TableMutex mutex;
  std::atomic<int64_t> reads{0}, writes{0};
  RunTogether(3, [&](int t) {
    while (reads.load() < kReads && writes.load() < kMostWrites) {
      if (t == 0) {
        const SharedLock lock(mutex);
        ++reads;
      } else {
        const Lock lock(mutex);
        ++writes;
      }
    }
  });
  CHECK_EQ(reads.load(), kReads);
}

// Readers that look known keys up without a pause always overlap: with a lock that prefers them, an update waits for as long
// as they go on.
TEST(UpdatesComeThroughAmongReaders) {
  constexpr int kReaders = 4, kUpdates = 20;
  constexpr int64_t kReadsAUpdate = 250;  // one or two a reader, and what they manage while the updating thread waits
                                          // for a processor
  const sok::SerialExecutor executor;
  Table table(Config(8, 20000));
  std::vector<uint64_t> keys(20000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 7919;
  std::vector<int64_t> ids = table.Lookup(keys).ids;
  ids.resize(100);
  const std::vector<float> grads(ids.size() * 8, 1.0f);
  std::atomic<int64_t> reads{0}, updates{0};
  RunTogether(kReaders + 1, [&](int t) {
    Rows rows{std::vector<float>(keys.size() * 8), std::vector<int64_t>(keys.size())};
    sok::Scratch scratch;
    while (updates.load() < kUpdates && reads.load() < kUpdates * kReadsAUpdate) {
      if (t == 0) {
        while (reads.load() < kReaders) std::this_thread::yield();  // all are at it
        table.Apply("sgd", {0.5}, ids, grads);
        ++updates;
      } else {  // nothing outside of the lock that would let it go
        table.native().Lookup({executor}, &scratch, keys.data(), static_cast<int64_t>(keys.size()), false, nullptr,
                              rows.values.data(), rows.ids.data());
        scratch.Reset();
        ++reads;
      }
    }
  });
  CHECK_EQ(updates.load(), kUpdates);
}
