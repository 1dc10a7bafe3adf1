// What all kernels use: memory in huge pages, vectors of 16 floats, input files, and the list of what is offered.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

inline int threads = 2;

[[noreturn]] inline void Fail(const std::string& why) {
  std::cerr << why << "\n";
  std::exit(1);
}

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
inline std::map<std::string, Step> steps;
inline std::vector<std::string> order, once;

inline void Offer(const std::string& name, Step step, bool repeats = true) {
  order.push_back(name);
  if (!repeats) once.push_back(name);
  steps[name] = std::move(step);
}

inline uint64_t Mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93ull;
  x ^= x >> 32;
  return x * 0x9E3779B97F4A7C15ull;
}
