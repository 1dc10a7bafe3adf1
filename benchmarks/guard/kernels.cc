// The three kernels whose instructions benchmarks/guard counts: find keys, pool rows, update rows. One thread.
//
//   kernels find|pool|update
//
// The inputs are fixed, so that a count depends on the code, the compiler and SOK_ISA alone. What is counted is what runs
// inside Counted, which the counting tool finds by its name.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "sok/embedding_table.h"

namespace {

constexpr int64_t kRows = 1 << 16, kDim = 16, kKeys = 1 << 15, kSegments = 1 << 13;

uint64_t Scattered(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ull;
  i = (i ^ (i >> 30)) * 0xBF58476D1CE4E5B9ull;
  i = (i ^ (i >> 27)) * 0x94D049BB133111EBull;
  return i ^ (i >> 31);
}

sok::TableConfig Config(bool hashed) {
  sok::TableConfig config;
  config.name = "guard";
  config.dim = kDim;
  config.capacity = kRows;
  config.hashed = hashed;
  return config;
}

}  // namespace

// The kernel has run once before: what only a first call does is not in the count.
extern "C" __attribute__((noinline)) void Counted(const std::function<void()>& kernel) {
  kernel();
  asm volatile("" ::: "memory");
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const char* name = argv[1];
  const bool hashed = std::strcmp(name, "find") == 0;

  const sok::SerialExecutor executor;
  const sok::Cpu cpu{executor};
  sok::Scratch scratch;
  sok::EmbeddingTable table(Config(hashed));

  std::vector<uint64_t> all(kRows), keys(kKeys);
  for (int64_t i = 0; i < kRows; ++i) all[i] = hashed ? Scattered(i) : static_cast<uint64_t>(i);
  // Squares of even draws: some rows come more often than others.
  for (int64_t i = 0; i < kKeys; ++i) {
    const uint64_t draw = Scattered(1000000 + i) >> 48;
    keys[i] = all[draw * draw >> 16];
  }
  std::vector<int64_t> splits(kSegments + 1), row_ids(kRows);
  for (int64_t s = 0; s <= kSegments; ++s) splits[s] = s * (kKeys / kSegments);
  std::vector<float> rows(kRows * kDim), pooled(kSegments * kDim);
  table.Lookup(cpu, &scratch, all.data(), kRows, true, nullptr, rows.data(), row_ids.data());
  scratch.Reset();
  // The rows of `keys`, for the update.
  table.Lookup(cpu, &scratch, keys.data(), kKeys, false, nullptr, rows.data(), row_ids.data());
  scratch.Reset();
  const double hyper[] = {0.01, 0.1, 1e-7};
  const sok::UpdateRule rule = sok::MakeUpdateRule("adagrad", hyper, 3, 1);

  std::function<void()> kernel;
  if (std::strcmp(name, "find") == 0) {
    kernel = [&] { table.Lookup(cpu, &scratch, keys.data(), kKeys, false, nullptr, rows.data(), row_ids.data()); };
  } else if (std::strcmp(name, "pool") == 0) {
    kernel = [&] {
      table.LookupCombine(cpu, &scratch, keys.data(), kKeys, splits.data(), nullptr, kSegments, sok::Combiner::kSum,
                          false, pooled.data(), row_ids.data());
    };
  } else if (std::strcmp(name, "update") == 0) {
    kernel = [&] {
      table.Apply(cpu, &scratch, rule, "guard", sok::Nonfinite::kAllow, row_ids.data(), rows.data(), kKeys);
    };
  } else {
    return 2;
  }
  kernel();
  scratch.Reset();
  Counted(kernel);
  std::printf("%s: %lld keys\n", name, static_cast<long long>(kKeys));
  return 0;
}
