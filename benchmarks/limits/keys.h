// W1: keys to rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>

#include "common.h"

struct Slot {
  int64_t key;
  uint32_t row;
  uint32_t used;
};

class KeyIndex {
 public:
  explicit KeyIndex(int bits) : slots_(size_t{1} << bits), shift_(64 - bits), mask_((uint64_t{1} << bits) - 1) {}
  uint64_t Home(int64_t key) const { return Mix(static_cast<uint64_t>(key)) >> shift_; }
  void Prefetch(uint64_t home) const { __builtin_prefetch(&slots_[home]); }
  // Row of key, or -1.
  int64_t Find(int64_t key, uint64_t home) const {
    for (uint64_t i = home;; i = (i + 1) & mask_) {
      const Slot& s = slots_[i];
      if (s.used && s.key == key) return s.row;
      if (!s.used) return -1;
    }
  }
  uint32_t FindOrInsert(int64_t key, uint64_t home, uint32_t row) {
    for (uint64_t i = home;; i = (i + 1) & mask_) {
      Slot& s = slots_[i];
      if (!s.used) s = {key, row, 1};
      if (s.key == key) return s.row;
    }
  }

 private:
  Array<Slot> slots_;
  int shift_;
  uint64_t mask_;
};

// Three stages, a block of keys apart: home slots on their way, row numbers found and rows on their way, rows copied.
template <int kLines>
void FindRows(const KeyIndex& index, const float* rows, const int64_t* keys, size_t n, float* out,
              std::vector<uint32_t>* missing, uint32_t base) {
  constexpr size_t kBlock = kLines >= 4 ? 16 : 32;
  constexpr size_t kDim = 16 * kLines;
  uint64_t homes[2][kBlock];
  int64_t found[2][kBlock];
  const size_t blocks = (n + kBlock - 1) / kBlock;
  auto length = [&](size_t b) { return std::min(kBlock, n - b * kBlock); };
  auto start = [&](size_t b) {
    if (b >= blocks) return;
    for (size_t i = 0, m = length(b); i < m; ++i) index.Prefetch(homes[b & 1][i] = index.Home(keys[b * kBlock + i]));
  };
  auto find = [&](size_t b) {
    if (b >= blocks) return;
    for (size_t i = 0, m = length(b); i < m; ++i) {
      const int64_t row = found[b & 1][i] = index.Find(keys[b * kBlock + i], homes[b & 1][i]);
      if (row >= 0)
        for (int l = 0; l < kLines; ++l) __builtin_prefetch(rows + static_cast<size_t>(row) * kDim + 16 * l);
    }
  };
  start(0);
  start(1);
  find(0);
  for (size_t b = 0; b < blocks; ++b) {
    start(b + 2);
    find(b + 1);
    for (size_t i = 0, m = length(b); i < m; ++i) {
      const int64_t row = found[b & 1][i];
      float* to = out + (b * kBlock + i) * kDim;
      if (row >= 0) {
        for (int l = 0; l < kLines; ++l) Stream(to + 16 * l, Load(rows + static_cast<size_t>(row) * kDim + 16 * l));
      } else if (missing) {
        missing->push_back(base + static_cast<uint32_t>(b * kBlock + i));
      }
    }
  }
  StreamsDone();
}

template <int kLines>
void Keys() {
  constexpr size_t kDim = 16 * kLines;
  static const std::vector<int64_t> keys = ReadFile<int64_t>("keys.npy");
  const size_t lookups = 1000000;
  static KeyIndex index(24);
  static Array<float> rows((keys.size() + 3000000) * kDim), out(lookups * kDim);
  static uint32_t next = 0;
  for (size_t i = 0; i < keys.size(); i += 32) {
    const size_t end = std::min(keys.size(), i + 32);
    for (size_t j = i; j < end; ++j) index.Prefetch(index.Home(keys[j]));
    for (size_t j = i; j < end; ++j) index.FindOrInsert(keys[j], index.Home(keys[j]), next++);
  }
  for (const std::string distribution : {"zipf", "uniform"}) {
    auto batches = std::make_shared<std::vector<int64_t>>(ReadFile<int64_t>("w1_" + distribution + ".npy"));
    auto fresh = std::make_shared<std::vector<int64_t>>(ReadFile<int64_t>("w1_new_" + distribution + ".npy"));
    Offer("find/" + distribution, [=](int step) {
      const int64_t* batch = batches->data() + static_cast<size_t>(step) % (batches->size() / lookups) * lookups;
#pragma omp parallel num_threads(threads)
      {
        const size_t me = static_cast<size_t>(omp_get_thread_num()), all = static_cast<size_t>(threads);
        const size_t first = lookups * me / all, last = lookups * (me + 1) / all;
        FindRows<kLines>(index, rows.data(), batch + first, last - first, out.data() + first * kDim, nullptr, 0);
      }
    });
    Offer(
        "insert/" + distribution,
        [=](int step) {
          const int64_t* batch = fresh->data() + static_cast<size_t>(step) * lookups;
          std::vector<std::vector<uint32_t>> missing(static_cast<size_t>(threads));
#pragma omp parallel num_threads(threads)
          {
            const size_t me = static_cast<size_t>(omp_get_thread_num()), all = static_cast<size_t>(threads);
            const size_t first = lookups * me / all, last = lookups * (me + 1) / all;
            missing[me].reserve(lookups / 8);
            FindRows<kLines>(index, rows.data(), batch + first, last - first, out.data() + first * kDim, &missing[me],
                             static_cast<uint32_t>(first));
          }
          // One thread inserts; new rows are a cheap function of their number.
          for (const auto& places : missing) {
            for (size_t i = 0; i < places.size(); i += 32) {
              const size_t end = std::min(places.size(), i + 32);
              for (size_t j = i; j < end; ++j) index.Prefetch(index.Home(batch[places[j]]));
              for (size_t j = i; j < end; ++j) {
                const int64_t key = batch[places[j]];
                const uint32_t row = index.FindOrInsert(key, index.Home(key), next);
                float* to = rows.data() + row * kDim;
                if (row == next) {
                  ++next;
                  uint32_t word = row * 0x9E3779B9u;
                  for (size_t d = 0; d < kDim; ++d, word = word * 1664525u + 1013904223u) {
                    to[d] = static_cast<float>(static_cast<int32_t>(word)) * (0.05f / 2147483648.0f);
                  }
                }
                for (int l = 0; l < kLines; ++l) Stream(out.data() + places[j] * kDim + 16 * l, Load(to + 16 * l));
              }
            }
          }
          StreamsDone();
        },
        false);
  }
}
