// What the machine can do: bandwidth, random rows, and a plain kernel for each workload, written only to learn what is
// possible. It serves one job and one thread count, knows one layout, checks nothing, and is built with -march=native.
//
//   limits JOB DIM THREADS STATE      JOB: machine, w1, w2, w3; STATE: floats of optimizer state per weight (w2)
//
// Speaks the protocol of benchmarks/contestant.py on the socket SOK_BENCH_SOCKET; reads the files of
// benchmarks/workloads.py in SOK_BENCH_DATA.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

int threads = 2;

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double CpuSeconds() {
  rusage r;
  getrusage(RUSAGE_SELF, &r);
  return static_cast<double>(r.ru_utime.tv_sec + r.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(r.ru_utime.tv_usec + r.ru_stime.tv_usec);
}

[[noreturn]] void Fail(const std::string& why) {
  std::cerr << why << "\n";
  std::exit(1);
}

// ---- memory, vectors, files

constexpr size_t kHugePage = size_t{2} << 20;

// Zeroed memory in huge pages, touched by all threads.
template <class T>
class Array {
 public:
  explicit Array(size_t count) : size_(count) {
    const size_t bytes = (count * sizeof(T) + kHugePage - 1) / kHugePage * kHugePage;
    void* raw = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) Fail("no memory for " + std::to_string(bytes) + " bytes");
    char* start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw) + kHugePage - 1) & ~(kHugePage - 1));
    madvise(start, bytes, MADV_HUGEPAGE);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t page = 0; page < bytes / 4096; ++page) start[page * 4096] = 0;
    data_ = reinterpret_cast<T*>(start);
  }
  Array(const Array&) = delete;
  T* data() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return size_; }

 private:
  T* data_;
  size_t size_;
};

// 16 floats; the compiler makes one, two or four registers of it.
typedef float Line __attribute__((vector_size(64)));

inline Line Load(const float* p) { return *reinterpret_cast<const Line*>(p); }
inline void Store(float* p, Line v) { *reinterpret_cast<Line*>(p) = v; }

// Past the cache, for output that nobody reads soon.
inline void Stream(float* p, Line v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, reinterpret_cast<__m512>(v));
#else
  Store(p, v);
#endif
}
inline void StreamsDone() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

inline Line Root(Line v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Line>(_mm512_sqrt_ps(reinterpret_cast<__m512>(v)));
#else
  for (int i = 0; i < 16; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

template <class T>
std::vector<T> ReadFile(const std::string& name) {
  const char* folder = std::getenv("SOK_BENCH_DATA");
  const std::string path = std::string(folder ? folder : "build/bench/data") + "/" + name;
  std::ifstream file(path, std::ios::binary);
  if (!file) Fail("cannot read " + path);
  size_t skip = 0;
  if (name.size() > 4 && name.substr(name.size() - 4) == ".npy") {
    unsigned char head[10];
    file.read(reinterpret_cast<char*>(head), 10);
    skip = 10 + head[8] + 256 * size_t{head[9]};
  }
  file.seekg(0, std::ios::end);
  std::vector<T> values((static_cast<size_t>(file.tellg()) - skip) / sizeof(T));
  file.seekg(static_cast<std::streamoff>(skip));
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
  return values;
}

using Step = std::function<void(int)>;
std::map<std::string, Step> steps;
std::vector<std::string> order, once;

void Offer(const std::string& name, Step step, bool repeats = true) {
  order.push_back(name);
  if (!repeats) once.push_back(name);
  steps[name] = std::move(step);
}

uint64_t Mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ull;
  x ^= x >> 32;
  return x * 0x9E3779B97F4A7C15ull;
}

// ---- machine: sequential bandwidth and random rows

void Machine() {
  static Array<float> from(size_t{1} << 27), to(size_t{1} << 27);  // 512 MiB each
  const size_t lines = from.size() / 16;
  static volatile float sink;
  Offer("read", [lines](int) {
#pragma omp parallel num_threads(threads)
    {
      Line a = {}, b = {}, c = {}, d = {};
#pragma omp for schedule(static)
      for (size_t i = 0; i < lines / 4; ++i) {
        const float* p = from.data() + 64 * i;
        a += Load(p), b += Load(p + 16), c += Load(p + 32), d += Load(p + 48);
      }
      sink = ((a + b) + (c + d))[0];
    }
  });
  Offer("copy", [lines](int) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t i = 0; i < lines; ++i) Stream(to.data() + 16 * i, Load(from.data() + 16 * i));
    StreamsDone();
  });
  static std::vector<uint32_t> index((size_t{1} << 22) + 64);
  for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<uint32_t>(Mix(i) >> 32);
  for (int width : {1, 4, 8}) {
    const size_t rows = lines / static_cast<size_t>(width);
    const size_t count = size_t{1} << 20;
    Offer("gather/" + std::to_string(64 * width), [=](int step) {
      const uint32_t* at = index.data() + static_cast<size_t>(step % 4) * count;
#pragma omp parallel num_threads(threads)
      {
        Line sum = {};
#pragma omp for schedule(static)
        for (size_t i = 0; i < count; ++i) {
          const float* ahead = from.data() + ((at[i + 24] * uint64_t{rows}) >> 32) * 16 * static_cast<size_t>(width);
          const float* row = from.data() + ((at[i] * uint64_t{rows}) >> 32) * 16 * static_cast<size_t>(width);
          for (int l = 0; l < width; ++l) __builtin_prefetch(ahead + 16 * l);
          for (int l = 0; l < width; ++l) sum += Load(row + 16 * l);
        }
        sink = sum[0];
      }
    });
  }
}

// ---- W1: keys to rows

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

// ---- W2: 26 tables, forward and training

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

// ---- W3: distinct keys, and the sum of each one's gradients

void Unique() {
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

// ---- protocol

class Connection {
 public:
  Connection() {
    const char* path = std::getenv("SOK_BENCH_SOCKET");
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (!path || std::strlen(path) >= sizeof(address.sun_path)) Fail("SOK_BENCH_SOCKET is not set, or too long");
    std::strcpy(address.sun_path, path);
    fd_ = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) Fail("nobody listens");
  }
  void Say(const std::string& text) {
    const std::string line = text + "\n";
    for (size_t sent = 0; sent < line.size();) {
      const ssize_t n = write(fd_, line.data() + sent, line.size() - sent);
      if (n <= 0) Fail("the driver is gone");
      sent += static_cast<size_t>(n);
    }
  }
  bool Hear(std::string* line) {
    line->clear();
    for (char c; read(fd_, &c, 1) == 1;) {
      if (c == '\n') return true;
      *line += c;
    }
    return false;
  }

 private:
  int fd_;
};

std::string JsonList(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
  return "[" + text + "]";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) Fail("limits machine|w1|w2|w3 DIM THREADS STATE");
  const std::string job = argv[1];
  const int dim = std::atoi(argv[2]), state = std::atoi(argv[4]);
  threads = std::atoi(argv[3]);
  Connection connection;
  connection.Say("{\"rank\": 0}");
  if (job == "machine") Machine();
  if (job == "w1" && dim == 16) Keys<1>();
  if (job == "w1" && dim == 64) Keys<4>();
  if (job == "w1" && dim == 128) Keys<8>();
  if (job == "w2" && state == 0) Tables<0>();
  if (job == "w2" && state == 1) Tables<1>();
  if (job == "w2" && state == 2) Tables<2>();
  if (job == "w3") Unique();
  if (steps.empty()) {
    connection.Say("{\"unsupported\": \"there is no reference kernel for this\"}");
    return 0;
  }
  connection.Say("{\"ready\": " + JsonList(order) + ", \"once\": " + JsonList(once) +
                 ", \"about\": \"plain C++ for this job alone\", \"version\": \"benchmarks/limits/limits.cc\"}");
  for (std::string line; connection.Hear(&line);) {
    std::istringstream words(line);
    std::string verb, name;
    int first = 0, count = 0;
    words >> verb >> name >> first >> count;
    if (verb == "quit" || verb.empty()) break;
    if (verb != "steps" || !steps.count(name)) {
      connection.Say(verb == "inspect" ? "{}" : "{\"error\": \"unknown command or measurement\"}");
      continue;
    }
    std::string seconds;
    const double cpu = CpuSeconds();
    for (int i = first; i < first + count; ++i) {
      const double start = Now();
      steps[name](i);
      seconds += (seconds.empty() ? "" : ", ") + std::to_string(Now() - start);
    }
    connection.Say("{\"seconds\": [" + seconds + "], \"cpu_s\": " + std::to_string(CpuSeconds() - cpu) + "}");
  }
  return 0;
}
