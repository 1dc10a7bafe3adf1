// Several threads on one table; the thread sanitizer watches. Rows are written whole, with equal elements, so a torn
// row would show.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "tables.h"

namespace {

constexpr int64_t kDim = 17;

sok::TableConfig ZeroConfig(int64_t capacity) {
  sok::TableConfig config = Config(kDim, capacity);
  config.initializer.kind = sok::InitKind::kConstant;
  config.initializer.a = 0.0f;
  return config;
}

std::vector<uint64_t> Range(uint64_t begin, uint64_t end) {
  std::vector<uint64_t> keys;
  for (uint64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

int64_t Torn(const std::vector<float>& rows) {
  int64_t torn = 0;
  for (size_t i = 0; i < rows.size(); ++i) torn += rows[i] != rows[i - i % kDim];
  return torn;
}

}  // namespace

TEST(ThreadsThatInsertTheSameKeysAgree) {
  Table table(Config(kDim, 4000));
  std::vector<std::vector<int64_t>> ids(4, std::vector<int64_t>(4000));
  RunTogether(4, [&](int t) {
    for (uint64_t part = 0; part < 20; ++part) {  // each thread in an order of its own
      const uint64_t begin = (part * 7 + static_cast<uint64_t>(t) * 5) % 20 * 200;
      const Rows rows = table.Lookup(Range(begin, begin + 200));
      std::copy(rows.ids.begin(), rows.ids.end(), ids[static_cast<size_t>(t)].begin() + static_cast<int64_t>(begin));
    }
  });
  CHECK_EQ(table.native().size(), 4000);
  for (const auto& mine : ids) CHECK(mine == ids[0]);
}

TEST(ReadersNeverSeeHalfAnUpdate) {
  Table table(ZeroConfig(5000), 2);
  const std::vector<uint64_t> keys = Range(0, 100);
  const std::vector<int64_t> ids = table.Lookup(keys).ids;
  const std::vector<float> grads(keys.size() * kDim, -1.0f);
  std::vector<int64_t> splits;
  for (int64_t s = 0; s <= 100; ++s) splits.push_back(s);
  std::atomic<int64_t> torn{0};
  RunTogether(4, [&](int t) {
    for (int step = 0; step < 30; ++step) {
      if (t < 2) {
        table.Apply("sgd", {1.0}, ids, grads);
      } else {
        std::vector<uint64_t> wanted = keys;
        wanted.push_back(static_cast<uint64_t>(1000 * t + step));  // a new one each time
        torn += Torn(table.Lookup(wanted).values);
        torn += Torn(table.LookupCombine(keys, splits, false).values);
      }
    }
  });
  CHECK_EQ(torn.load(), 0);
  for (const float x : table.Lookup(keys).values) CHECK_EQ(x, 60.0f);
}

TEST(EverythingAtOnce) {
  Table table(ZeroConfig(600), 2);
  const std::vector<uint64_t> keys = Range(0, 200);
  table.Lookup(keys);
  std::atomic<int64_t> torn{0};
  RunTogether(6, [&](int t) {
    for (int step = 0; step < 25; ++step) {
      switch (t) {
        case 0:
          table.Assign(keys, static_cast<float>(step));
          break;
        case 1:
          table.Erase(Range(50, 150));
          break;
        case 2: {  // decaying slots: readers replay while rows come, go and change
          const Rows rows = table.Lookup(keys);
          const std::vector<float> grads(keys.size() * kDim, 0.125f);
          table.Apply("adam", {0.01, 0.9, 0.999, 1e-7}, rows.ids, grads, step + 1);
          break;
        }
        case 3:
          torn += Torn(table.Lookup(keys, false).values);
          torn += table.native().size() > 600;
          break;
        case 4:
          torn += Torn(table.Lookup(keys).values);
          table.native().memory_bytes();
          break;
        default:
          torn += static_cast<int64_t>(table.native().Keys().size()) > 600;
          try {
            table.Lookup(Range(1000, 2000));
            torn += 1;  // does not fit
          } catch (const sok::TableFull&) {
          }
      }
    }
  });
  CHECK_EQ(torn.load(), 0);
  CHECK(table.native().size() <= 200 && table.native().size() >= 100);
}

TEST(IdentityTablesTakeThreadsToo) {
  sok::TableConfig config = ZeroConfig(1000);
  config.hashed = false;
  Table table(config, 2);
  RunTogether(4, [&](int t) {
    for (uint64_t i = 0; i < 40; ++i) {
      const uint64_t begin = (i * 3 + static_cast<uint64_t>(t)) % 40 * 25;
      table.Lookup(Range(begin, begin + 25));
      if (t == 0) table.Erase({begin});
    }
  });
  const int64_t size = table.native().size();
  CHECK(size >= 960 && size <= 1000);
  CHECK_EQ(static_cast<int64_t>(table.native().Keys().size()), size);
}

// A lookup finds known keys under the shared lock and adds new ones under the exclusive one. Whoever erases in between
// frees a row number that was just found; the lookup must not give it to a new key and keep it for the old one too.
TEST(RowsErasedInTheMiddleOfALookupAreFoundAgain) {
  class ErasingExecutor final : public sok::Executor {
   public:
    explicit ErasingExecutor(Table* table) : table_(table) {}
    ~ErasingExecutor() override { eraser_.join(); }
    void Run(int64_t n, int64_t /*cost*/, const std::function<void(int64_t, int64_t)>& body) const override {
      body(0, n);
      if (eraser_.joinable()) return;
      // Called under the shared lock: the eraser waits for it, first in line.
      eraser_ = std::thread([this] { table_->Erase({1}); });
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    int num_threads() const override { return 1; }

   private:
    Table* const table_;
    mutable std::thread eraser_;
  };

  for (const bool pooled : {false, true}) {
    Table table(Config(3, 10));
    table.Lookup({1, 2});
    const uint64_t keys[] = {1, 2, 3};
    const int64_t splits[] = {0, 3};
    float rows[9];
    int64_t ids[3];
    {
      const ErasingExecutor executor(&table);
      sok::Scratch scratch;
      if (pooled) {
        LookUpSums({executor}, &scratch, &table.native(), keys, 3, splits, 1, true, rows, ids);
      } else {
        table.native().Lookup({executor}, &scratch, keys, 3, true, nullptr, rows, ids);
      }
    }
    CHECK(ids[0] != ids[2]);
    CHECK_EQ(ids[1] & 0xFFFFFFFF, 1);
  }
}

// A lookup for training settles rows in place in one task while another gathers the rows of keys, some of which are still to be
// made. Those read nothing of the table; row 0 is the first that one would take in their place.
TEST(KeysWithoutARowReadNoneThatAnotherTaskSettles) {
  constexpr uint64_t kNew = 4096;
  sok::TableConfig config = ZeroConfig(100'000);
  config.dim = 16;  // gathered by a loop of its own
  Table table(config, 2);
  const std::vector<int64_t> ids = table.Lookup({7, 8}).ids;
  table.Apply("adam", {0.01, 0.9, 0.999, 1e-7}, ids, std::vector<float>(32, 1.0f));
  for (uint64_t round = 1; round <= 10; ++round) {
    table.Apply("adam", {0.01, 0.9, 0.999, 1e-7}, {ids[1]}, std::vector<float>(16, 1.0f));  // row 0 misses a step
    const std::vector<uint64_t> old = {7}, fresh = Range(round * kNew, (round + 1) * kNew);
    std::vector<float> rows((kNew + 1) * 16, -1.0f);
    std::vector<int64_t> row_ids(kNew + 1);
    sok::EmbeddingTable::Feature features[2];
    features[0].table = features[1].table = &table.native();
    features[0].keys = fresh.data();
    features[0].n = kNew;
    features[0].output = rows.data();
    features[0].row_ids = row_ids.data();
    features[1].keys = old.data();
    features[1].n = 1;
    features[1].output = rows.data() + kNew * 16;
    features[1].row_ids = row_ids.data() + kNew;
    const ThreadExecutor executor(2);
    sok::Scratch scratch;
    sok::EmbeddingTable::LookupGroup({executor}, &scratch, features, 2, true);
    CHECK_EQ(row_ids[kNew], ids[0]);
    CHECK(rows[kNew * 16] < 0.0f && rows[kNew * 16] > -0.1f);
    CHECK(std::all_of(rows.begin(), rows.begin() + kNew * 16, [](float x) { return x == 0.0f; }));
  }
}
