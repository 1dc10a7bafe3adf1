#include "sok/row_store.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <vector>

#include "check.h"

using sok::RowStore;

namespace {

// A process may have 65,530 by default.
int64_t Mappings() {
  std::ifstream maps("/proc/self/maps");
  return std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
}

// What sanitizers map for what we map: the heap of one, the shadows of the other.
#if defined(__SANITIZE_THREAD__)
constexpr int64_t kOfSanitizers = 6000;
#else
constexpr int64_t kOfSanitizers = 100;
#endif

}  // namespace

TEST(NewRowsReadAsZeroAndKeepWhatIsWritten) {
  for (const int64_t dim : {1, 3, 5, 7, 16, 17, 64, 1000}) {
    RowStore store(dim, 1 << 20);
    const int64_t rows[] = {0, 1, store.rows_per_slab() - 1, store.rows_per_slab(), (1 << 20) - 1};
    for (const int64_t row : rows) {
      store.Touch(row);
      CHECK(store.Has(row));
      for (int64_t j = 0; j < dim; ++j) CHECK_EQ(store.Record(row)[j], 0.0f);
    }
    for (const int64_t row : rows)
      for (int64_t j = 0; j < dim; ++j) store.Record(row)[j] = static_cast<float>(row * 10 + j);
    for (const int64_t row : rows)
      for (int64_t j = 0; j < dim; ++j) CHECK_EQ(store.Record(row)[j], static_cast<float>(row * 10 + j));
  }
}

TEST(OnlySlabsOfTouchedRowsAreAllocated) {
  RowStore store(16, int64_t{1} << 31);
  const int64_t empty = store.memory_bytes();
  CHECK(!store.Has(0));
  store.Touch(store.rows_per_slab() * 3);
  CHECK(!store.Has(0) && store.Has(store.rows_per_slab() * 3 + 1));
  const int64_t one = store.memory_bytes() - empty;
  CHECK(one > 0 && one <= int64_t{4} << 20);
  store.Touch(store.rows_per_slab() * 3 + 5);
  CHECK_EQ(store.memory_bytes() - empty, one);
}

TEST(WideRecordsStartOnSixteenBytes) {
  for (const int64_t dim : {4, 5, 17, 64}) {
    RowStore store(dim, 1000);
    store.Touch(0);
    for (int64_t row = 0; row < 60; ++row) CHECK_EQ(reinterpret_cast<uintptr_t>(store.Record(row)) % 16, 0u);
  }
}

TEST(WideningKeepsRowsAndFillsTheNewFloats) {
  for (const int64_t dim : {1, 3, 5, 7, 16, 17, 64}) {
    RowStore store(dim, 1 << 21);
    const int64_t far = store.rows_per_slab() + 7;
    const int64_t rows[] = {0, 63, far};
    for (const int64_t row : rows) {
      store.Touch(row);
      for (int64_t j = 0; j < dim; ++j) store.Record(row)[j] = static_cast<float>(row + j);
    }
    CHECK_EQ(store.AddFloats(std::vector<float>(static_cast<size_t>(dim), 0.1f)), dim);
    CHECK_EQ(store.AddFloats(std::vector<float>(static_cast<size_t>(2 * dim))), 2 * dim);
    CHECK_EQ(store.floats(), 4 * dim);
    for (const int64_t row : rows) {
      const float* record = store.Record(row);
      for (int64_t j = 0; j < dim; ++j) {
        CHECK_EQ(record[j], static_cast<float>(row + j));
        CHECK_EQ(record[dim + j], 0.1f);
        CHECK_EQ(record[2 * dim + j], 0.0f);
        CHECK_EQ(record[3 * dim + j], 0.0f);
      }
    }
    CHECK(store.Has(1) == true && store.Has(2 * store.rows_per_slab()) == false);
  }
}

TEST(SlabsShareMappings) {
  const int64_t before = Mappings();
  {
    constexpr int64_t kSlabs = 70'000;  // 147 GB that nobody touches
    const int64_t rows_per_slab = RowStore(64, 1).rows_per_slab();
    RowStore store(64, kSlabs * rows_per_slab);
    for (int64_t i = 0; i < kSlabs; ++i) store.Touch(i * 3 % kSlabs * rows_per_slab);  // in no order
    CHECK(Mappings() - before <= kSlabs / 50 + kOfSanitizers);
    CHECK_EQ(store.MissingSlabs(kSlabs * rows_per_slab), 0);
    store.Record(kSlabs * rows_per_slab - 1)[63] = 1.0f;
  }
  CHECK(Mappings() - before <= kOfSanitizers);
}

TEST(SlabsOfAnArenaAreApart) {
  for (const int64_t dim : {3, 17, 64, 5000}) {
    RowStore store(dim, 200 * RowStore(dim, 1).rows_per_slab());
    const int64_t rows = store.rows_per_slab();
    for (const int64_t slab : {150, 0, 7, 1, 199, 2, 63, 64, 65, 3}) {
      CHECK(!store.Has(slab * rows));
      store.Touch(slab * rows);
      for (const int64_t row : {slab * rows, slab * rows + rows - 1}) {
        CHECK_EQ(store.Record(row)[0], 0.0f);
        CHECK_EQ(store.Record(row)[dim - 1], 0.0f);
        store.Record(row)[0] = store.Record(row)[dim - 1] = static_cast<float>(row + 1);
      }
    }
    CHECK_EQ(store.MissingSlabs(200 * rows), 190);
    CHECK_EQ(store.MissingSlabs(3 * rows + 1), 0);
    CHECK_EQ(store.AddFloats(std::vector<float>(static_cast<size_t>(dim), 2.0f)), dim);
    for (const int64_t slab : {150, 0, 7, 1, 199, 2, 63, 64, 65, 3}) {
      for (const int64_t row : {slab * rows, slab * rows + rows - 1}) {
        CHECK_EQ(store.Record(row)[dim - 1], static_cast<float>(row + 1));
        CHECK_EQ(store.Record(row)[2 * dim - 1], 2.0f);
      }
    }
  }
}
