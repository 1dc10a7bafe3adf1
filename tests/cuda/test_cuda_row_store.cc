#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "device_memory.h"
#include "sok/error.h"
#include "sok/hash_table.h"
#include "sok/row_store.h"

namespace {

constexpr uint32_t kNoRow = sok::HashTable::kNoRow;
const sok::Cuda cuda{};

std::vector<float> Numbered(int64_t n, float from) {
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = from + static_cast<float>(i);
  return values;
}

std::vector<float> Gathered(const sok::DeviceRowStore& store, const std::vector<uint32_t>& rows, int64_t first,
                            int64_t count) {
  DeviceArray<uint32_t> device_rows(rows);
  DeviceArray<float> out(device_rows.size() * count);
  sok::GatherRecords(cuda, store.view(), device_rows, device_rows.size(), first, count, out);
  return out.Get();
}

}  // namespace

TEST(RecordsOfAnyWidthComeBackAsTheyWereStored) {
  for (const int64_t dim : {1, 2, 3, 4, 5, 7, 64, 65, 130}) {
    sok::DeviceMemory memory("table 't'");
    sok::DeviceRowStore store(dim, 100000, &memory);
    store.Reserve(cuda, 40000);
    CHECK(store.num_rows() >= 40000 && store.num_rows() <= 100000 + 65536);
    const std::vector<uint32_t> rows = {0, 1, 39999, 17, 32768, 8191, 8192};
    DeviceArray<uint32_t> device_rows(rows);
    const std::vector<float> values = Numbered(7 * dim, 1.0f);
    DeviceArray<float> device_values(values);
    sok::ScatterRecords(cuda, store.view(), device_rows, 7, 0, dim, device_values);
    CHECK(Gathered(store, rows, 0, dim) == values);
    const std::vector<float> with_gap = Gathered(store, {1, kNoRow, 0}, 0, dim);
    for (int64_t j = 0; j < dim; ++j) {
      CHECK_EQ(with_gap[static_cast<size_t>(j)], values[static_cast<size_t>(dim + j)]);
      CHECK_EQ(with_gap[static_cast<size_t>(dim + j)], 0.0f);
      CHECK_EQ(with_gap[static_cast<size_t>(2 * dim + j)], values[static_cast<size_t>(j)]);
    }
  }
}

TEST(WideningKeepsRowsAndFillsSlots) {
  sok::DeviceMemory memory("table 't'");
  sok::DeviceRowStore store(5, 5000, &memory);
  store.Reserve(cuda, 5000);
  const std::vector<uint32_t> rows = {0, 4999, 2500};
  DeviceArray<uint32_t> device_rows(rows);
  const std::vector<float> values = Numbered(15, 0.0f);
  DeviceArray<float> device_values(values);
  sok::ScatterRecords(cuda, store.view(), device_rows, 3, 0, 5, device_values);
  const std::vector<float> fresh = Numbered(10, 0.5f);
  DeviceArray<float> device_fresh(fresh);
  CHECK_EQ(store.AddFloats(cuda, 10, device_fresh), 5);
  CHECK_EQ(store.floats(), 15);
  CHECK(Gathered(store, rows, 0, 5) == values);
  for (const uint32_t row : rows) CHECK(Gathered(store, {row}, 5, 10) == fresh);
}

TEST(RowsPastTheBudgetAreRefusedByName) {
  sok::DeviceMemory memory("table 't'", 5 << 20);
  sok::DeviceRowStore store(64, 1 << 20, &memory);
  store.Reserve(cuda, 8192);
  const int64_t before = memory.in_use();
  CHECK_THROWS(store.Reserve(cuda, 1 << 20), sok::OutOfMemory, "table 't': no device memory for embedding rows");
  CHECK_THROWS(store.AddFloats(cuda, 64, nullptr), sok::OutOfMemory, "of a budget of 5242880");
  CHECK_EQ(store.floats(), 64);
  CHECK(memory.in_use() >= before && memory.in_use() <= 5 << 20);
}

// Gives so much and no more, and counts.
class Owner final : public sok::DeviceAllocator {
 public:
  void* Allocate(int64_t bytes) override {
    void* p = nullptr;
    if (bytes > left) return nullptr;
    SOK_CUDA(cudaMalloc(&p, static_cast<size_t>(bytes)));
    left -= bytes;
    bytes_of[p] = bytes;
    return p;
  }
  void Free(void* p) override {
    SOK_CUDA(cudaDeviceSynchronize());
    static_cast<void>(cudaFree(p));
    left += bytes_of.at(p);
    bytes_of.erase(p);
  }
  sok::Cuda stream() const override { return cuda; }
  std::string Room() const override { return "its owner has " + std::to_string(left) + " left"; }

  int64_t left = 0;
  std::map<void*, int64_t> bytes_of;
};

// Slabs of 256 rows of 64 floats: what an emulated device moves is slow.
constexpr int64_t kSlab = int64_t{64} << 10, kRows = 1024;

TEST(WideningTakesTwoSlabsMoreAndNotAllRowsTwice) {
  for (const int64_t budget : {10 * kSlab + 32768, 10 * kSlab - 32768}) {  // four of twice the width, two of one
    sok::DeviceMemory memory("table 't'", budget);
    sok::DeviceRowStore store(64, kRows, &memory, kSlab);
    store.Reserve(cuda, kRows);
    DeviceArray<float> fresh(Numbered(64, 0.0f));
    if (budget > 10 * kSlab) {
      CHECK_EQ(store.AddFloats(cuda, 64, fresh), 64);
    } else {
      CHECK_THROWS(store.AddFloats(cuda, 64, fresh), sok::OutOfMemory, "two slabs are there twice");
      CHECK_EQ(store.floats(), 64);
    }
  }
}

TEST(AWideningThatIsGivenUpChangesNoRow) {
  const std::vector<uint32_t> rows = {0, 255, 256, 640, 1023};
  DeviceArray<uint32_t> device_rows(rows);
  const std::vector<float> values = Numbered(5 * 64, 1.0f);
  DeviceArray<float> device_values(values), fresh(Numbered(64, 0.5f));
  for (const int64_t wide : {0, 1, 2, 3}) {  // slabs of twice the width that there is memory for
    Owner owner;
    owner.left = int64_t{1} << 40;
    {
      sok::DeviceMemory memory("table 't'", 0, &owner);
      sok::DeviceRowStore store(64, kRows, &memory, kSlab);
      store.Reserve(cuda, kRows);
      sok::ScatterRecords(cuda, store.view(), device_rows, 5, 0, 64, device_values);
      const int64_t in_use = memory.in_use();
      owner.left = wide == 0 ? 0 : (wide + 2) * kSlab - 1;
      CHECK_THROWS(store.AddFloats(cuda, 64, fresh), sok::OutOfMemory, "its owner has");
      CHECK_EQ(store.floats(), 64);
      CHECK(Gathered(store, rows, 0, 64) == values);
      CHECK(memory.in_use() >= in_use);
      owner.left = int64_t{1} << 40;
      CHECK_EQ(store.AddFloats(cuda, 64, fresh), 64);
      CHECK(Gathered(store, rows, 0, 64) == values);
      CHECK(Gathered(store, {640}, 64, 64) == Numbered(64, 0.5f));
      SOK_CUDA(cudaDeviceSynchronize());
    }
    CHECK_EQ(owner.bytes_of.size(), size_t{0});
  }
}

TEST(WhatAnOwnerGivesIsUsedAfterItsOwnWork) {
  // The owner's stream fills memory and gives it back; another stream's table takes the same memory.
  struct OneBlock final : sok::DeviceAllocator {
    void* Allocate(int64_t) override { return block; }
    void Free(void*) override {}
    sok::Cuda stream() const override { return owners; }
    std::string Room() const override { return ""; }
    sok::Cuda owners;
    float* block = nullptr;
  } owner;
  constexpr int64_t kFloats = 1 << 22;
  SOK_CUDA(cudaStreamCreateWithFlags(&owner.owners.stream, cudaStreamNonBlocking));
  sok::Cuda other;
  SOK_CUDA(cudaStreamCreateWithFlags(&other.stream, cudaStreamNonBlocking));
  {
    DeviceArray<float> block(kFloats);
    owner.block = block;
    sok::DeviceMemory memory("table 't'", 0, &owner);
    for (int round = 0; round < 20; ++round) {
      SOK_CUDA(cudaMemsetAsync(block, 1, kFloats * sizeof(float), owner.owners.stream));
      void* p = memory.Allocate(other, kFloats * int64_t{sizeof(float)}, "a test");
      SOK_CUDA(cudaMemsetAsync(p, 2, kFloats * sizeof(float), other.stream));
      memory.Free(other, p, kFloats * int64_t{sizeof(float)});
      SOK_CUDA(cudaMemsetAsync(block + kFloats - 1, 3, sizeof(float), owner.owners.stream));
      SOK_CUDA(cudaDeviceSynchronize());
      uint32_t first, last;
      SOK_CUDA(cudaMemcpy(&first, block, 4, cudaMemcpyDeviceToHost));
      SOK_CUDA(cudaMemcpy(&last, block + kFloats - 1, 4, cudaMemcpyDeviceToHost));
      CHECK_EQ(first, 0x02020202u);
      CHECK_EQ(last, 0x03030303u);
    }
    CHECK_EQ(memory.in_use(), 0);
  }
  SOK_CUDA(cudaStreamDestroy(owner.owners.stream));
  SOK_CUDA(cudaStreamDestroy(other.stream));
}

TEST(AddressesAreWiderThan32Bits) {
  // Arithmetic only: no such memory is touched. 2^32 - 2 rows of 130 floats are 2.3 terabytes.
  sok::DeviceRows rows;
  std::vector<float*> slabs(1024, nullptr);
  float base[4];
  for (float*& slab : slabs) slab = base;
  rows.slabs = slabs.data();
  rows.shift = 22;
  rows.mask = (int64_t{1} << 22) - 1;
  rows.stride = 132;
  const int64_t row = (int64_t{1} << 32) - 3;
  const int64_t offset = ((row & rows.mask) * 132) * 4;
  CHECK(offset > int64_t{1} << 31);
  CHECK_EQ(reinterpret_cast<intptr_t>(rows.At(row)) - reinterpret_cast<intptr_t>(base), offset);
  sok::DeviceRows matrix;
  matrix.matrix = base;
  matrix.stride = 130;
  CHECK_EQ(reinterpret_cast<intptr_t>(matrix.At(row)) - reinterpret_cast<intptr_t>(base), row * 520);
}

TEST(ATableOfManyRowsHasFewSlabs) {
  sok::DeviceMemory memory("table 't'");
  sok::DeviceRowStore store(64, (int64_t{1} << 32) - 2, &memory);
  CHECK((((int64_t{1} << 32) - 2) >> store.view().shift) <= 1024);
  sok::DeviceRowStore small(64, 10, &memory);
  small.Reserve(cuda, 10);
  CHECK_EQ(small.num_rows(), 10);
}

TEST(TheLastSlabEndsWithTheRows) {
  for (const int64_t rows : {3, 1000, 1025}) {  // slabs of 1024 at most
    sok::DeviceMemory memory("table 't'");
    sok::DeviceRowStore store(4, rows, &memory, 1024 * 16);
    store.Reserve(cuda, rows);
    CHECK_EQ(store.num_rows(), rows);
    const int64_t lists = memory.in_use() - rows * 16;
    CHECK(lists >= 8 && lists <= 16);
    DeviceArray<float> fresh(std::vector<float>{1.0f, 2.0f, 3.0f, 4.0f});
    store.AddFloats(cuda, 4, fresh);
    SOK_CUDA(cudaDeviceSynchronize());
    CHECK_EQ(memory.in_use() - lists, rows * 32);
  }
}
