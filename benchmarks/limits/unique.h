// W3: distinct keys, and the sum of each one's gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <omp.h>

#include "common.h"

inline void Unique() {
  static const std::vector<int64_t> keys = ReadFile<int64_t>("w3_keys.npy");
  const size_t n = 1000000, dim = 64;
  static Array<float> grads(n * dim);
  {
    const std::vector<float> values = ReadFile<float>("w3_grads.npy");
    std::copy(values.begin(), values.end(), grads.data());
  }
  struct Entry {
    int64_t key;
    uint32_t number, stamp;
  };
  struct Item {
    int64_t key;
    uint32_t position, place;
  };
  constexpr int kBits = 20;
  // Keys are dealt to threads by hash, so nobody shares an entry; positions of a key stay in order.
  struct Owner {
    Array<Entry> table{size_t{1} << kBits};
    Array<float> sums{n * dim};
    std::vector<int64_t> distinct;
    std::vector<std::vector<Item>> inbox;
  };
  static std::vector<Owner*> owners;
  for (int i = 0; i < threads; ++i) {
    owners.push_back(new Owner);
    owners.back()->distinct.reserve(n);
    owners.back()->inbox.resize(static_cast<size_t>(threads));
    for (auto& box : owners.back()->inbox) box.reserve(n);
  }
  static std::vector<uint32_t> inverse(n);
  static uint32_t stamp = 0;
  auto run = [=](int step, bool sums) {
    const int64_t* batch = keys.data() + static_cast<size_t>(step) % (keys.size() / n) * n;
    ++stamp;
#pragma omp parallel num_threads(threads)
    {
      const size_t me = static_cast<size_t>(omp_get_thread_num()), all = static_cast<size_t>(threads);
      for (Owner* owner : owners) owner->inbox[me].clear();
      for (size_t i = n * me / all; i < n * (me + 1) / all; ++i) {
        const uint64_t hash = Mix(static_cast<uint64_t>(batch[i]));
        Owner* owner = owners[((hash & 0xFFFFFFFF) * all) >> 32];
        owner->inbox[me].push_back({batch[i], static_cast<uint32_t>(i), static_cast<uint32_t>(hash >> (64 - kBits))});
      }
#pragma omp barrier
      Owner& mine = *owners[me];
      mine.distinct.clear();
      constexpr size_t kBlock = 32;
      uint32_t numbers[kBlock];
      bool is_new[kBlock];
      for (const auto& box : mine.inbox) {
        for (size_t first = 0; first < box.size(); first += kBlock) {
          const size_t m = std::min(kBlock, box.size() - first);
          for (size_t i = first + kBlock; i < std::min(box.size(), first + 2 * kBlock); ++i) {
            __builtin_prefetch(&mine.table[box[i].place]);
          }
          for (size_t i = 0; i < m; ++i) {
            const Item& item = box[first + i];
            uint32_t place = item.place;
            while (mine.table[place].stamp == stamp && mine.table[place].key != item.key) {
              place = (place + 1) & ((1u << kBits) - 1);
            }
            Entry& entry = mine.table[place];
            is_new[i] = entry.stamp != stamp;
            if (is_new[i]) {
              entry = {item.key, static_cast<uint32_t>(mine.distinct.size()), stamp};
              mine.distinct.push_back(item.key);
            }
            numbers[i] = inverse[item.position] = entry.number;
            if (sums && !is_new[i]) {
              for (size_t d = 0; d < dim; d += 16) __builtin_prefetch(mine.sums.data() + numbers[i] * dim + d, 1);
            }
          }
          if (!sums) continue;
          for (size_t i = 0; i < m; ++i) {
            const float* from = grads.data() + box[first + i].position * dim;
            float* to = mine.sums.data() + numbers[i] * dim;
            for (size_t d = 0; d < dim; d += 16) {
              Store(to + d, is_new[i] ? Load(from + d) : Load(to + d) + Load(from + d));
            }
          }
        }
      }
    }
  };
  Offer("unique", [=](int step) { run(step, false); });
  Offer("sum", [=](int step) { run(step, true); });
}
