// W2: 26 tables, forward and training.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>

#include "common.h"

struct Batch {
  std::vector<int64_t> offsets, ids;
  std::vector<size_t> base;
};

constexpr size_t kTables = 26, kRows = 1000000, kSamples = 4096, kDim = 16;

std::vector<Batch> ReadBatches(const std::string& distribution) {
  std::vector<Batch> batches(8);
  for (size_t b = 0; b < batches.size(); ++b) {
    const std::string name = "w2_" + distribution + "_" + std::to_string(b);
    batches[b].offsets = ReadFile<int64_t>(name + ".offsets.bin");
    batches[b].ids = ReadFile<int64_t>(name + ".ids.bin");
    batches[b].base.assign(kTables + 1, 0);
    for (size_t t = 0; t < kTables; ++t) {
      batches[b].base[t + 1] =
          batches[b].base[t] + static_cast<size_t>(batches[b].offsets[t * (kSamples + 1) + kSamples]);
    }
  }
  return batches;
}

// A record is [weights | state], kStride floats.
template <size_t kStride>
void Pool(const Batch& batch, size_t t, const float* table, bool mean, float* out) {
  const int64_t* offsets = batch.offsets.data() + t * (kSamples + 1);
  const int64_t* ids = batch.ids.data() + batch.base[t];
  const int64_t last = offsets[kSamples] - 1;
  for (size_t s = 0; s < kSamples; ++s) {
    Line sum = {};
    for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
      __builtin_prefetch(table + static_cast<size_t>(ids[std::min(i + 24, last)]) * kStride);
      sum += Load(table + static_cast<size_t>(ids[i]) * kStride);
    }
    if (mean) sum *= 1.0f / static_cast<float>(offsets[s + 1] - offsets[s]);
    Store(out + (s * kTables + t) * kDim, sum);
  }
}

// Sums the gradients of equal ids, then changes each distinct row once. All memory is the thread's own.
template <size_t kStride>
class Updater {
 public:
  Updater() : ids_(kPlaces), numbers_(kPlaces), sums_((size_t{48} << 10) * kDim) {}

  void Run(const Batch& batch, size_t t, const float* upstream, float* table) {
    const int64_t* offsets = batch.offsets.data() + t * (kSamples + 1);
    const int64_t* ids = batch.ids.data() + batch.base[t];
    std::fill(ids_.begin(), ids_.end(), kFree);
    distinct_.clear();
    for (size_t s = 0; s < kSamples; ++s) {
      const Line g = Load(upstream + (s * kTables + t) * kDim);
      for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
        const uint32_t id = static_cast<uint32_t>(ids[i]);
        uint32_t place = id * 0x9E3779B1u >> (32 - kPlaceBits);
        while (ids_[place] != id && ids_[place] != kFree) place = (place + 1) & (kPlaces - 1);
        if (ids_[place] == id) {
          float* sum = sums_.data() + numbers_[place] * kDim;
          Store(sum, Load(sum) + g);
        } else {
          ids_[place] = id;
          numbers_[place] = static_cast<uint32_t>(distinct_.size());
          Store(sums_.data() + distinct_.size() * kDim, g);
          distinct_.push_back(id);
        }
      }
    }
    for (size_t u = 0; u < distinct_.size(); ++u) {
      const float* ahead = table + distinct_[std::min(u + 16, distinct_.size() - 1)] * kStride;
      for (size_t l = 0; l < kStride; l += 16) __builtin_prefetch(ahead + l, 1);
      float* w = table + distinct_[u] * kStride;
      const Line g = Load(sums_.data() + u * kDim);
      if (kStride == 2 * kDim) {  // Adagrad
        const Line a = Load(w + 16) + g * g;
        Store(w + 16, a);
        Store(w, Load(w) - 0.01f * g / (Root(a) + 1e-7f));
      } else {  // Adam on the rows of the batch
        const Line m = Load(w + 16) + 0.1f * (g - Load(w + 16));
        const Line v = Load(w + 32) + 0.001f * (g * g - Load(w + 32));
        Store(w + 16, m);
        Store(w + 32, v);
        Store(w, Load(w) - 0.01f * m / (Root(v) + 1e-7f));
      }
    }
  }

 private:
  static constexpr int kPlaceBits = 16;
  static constexpr uint32_t kPlaces = 1u << kPlaceBits, kFree = ~0u;
  std::vector<uint32_t> ids_, numbers_, distinct_;
  Array<float> sums_;
};

template <size_t kState>
void Tables() {
  constexpr size_t kStride = (1 + kState) * kDim;
  static Array<float> tables(kTables * kRows * kStride);
  std::fill(tables.data(), tables.data() + tables.size(), 0.1f);
  static Array<float> out(kSamples * kTables * kDim), upstream(kSamples * kTables * kDim);
  std::fill(upstream.data(), upstream.data() + upstream.size(), 0.001f);
  static std::vector<Updater<kStride>*> updaters;
  for (int i = 0; i < threads; ++i) updaters.push_back(new Updater<kStride>);
  for (const std::string distribution : {"zipf", "uniform"}) {
    auto batches = std::make_shared<std::vector<Batch>>(ReadBatches(distribution));
    for (bool mean : {false, true}) {
      auto forward = [=](int step) {
        const Batch& batch = (*batches)[static_cast<size_t>(step) % batches->size()];
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (size_t t = 0; t < kTables; ++t) {
          Pool<kStride>(batch, t, tables.data() + t * kRows * kStride, mean, out.data());
        }
      };
      if (kState == 0) {
        Offer((mean ? "mean/" : "sum/") + distribution, forward);
      } else if (!mean) {
        Offer("train/" + distribution, [=](int step) {
          const Batch& batch = (*batches)[static_cast<size_t>(step) % batches->size()];
          // A model would stand between the two loops.
          forward(step);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
          for (size_t t = 0; t < kTables; ++t) {
            updaters[static_cast<size_t>(omp_get_thread_num())]->Run(batch, t, upstream.data(),
                                                                     tables.data() + t * kRows * kStride);
          }
        });
      }
    }
  }
}
