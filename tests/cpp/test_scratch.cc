#include "sok/scratch.h"

#include <cstdint>
#include <vector>

#include "check.h"
#include "sok/error.h"

TEST(WhatOneUseNeededIsNotKeptForEver) {
  sok::Scratch scratch;
  auto use = [&](int64_t bytes) {
    scratch.Get<char>(bytes);
    scratch.Reset();
  };
  use(50 << 20);
  for (int i = 0; i < 60; ++i) use(1000);
  CHECK(scratch.memory_bytes() >= 50 << 20);  // it may come again
  for (int i = 0; i < 200; ++i) use(1000);
  CHECK(scratch.memory_bytes() <= 1 << 20);
  for (int i = 0; i < 1000; ++i) use(i % 50 == 0 ? 50 << 20 : 1000);
  char* const block = scratch.Get<char>(50 << 20);
  scratch.Reset();
  for (int i = 0; i < 90; ++i) use(1000);
  CHECK(scratch.Get<char>(50 << 20) == block);  // what comes now and then stays
}

TEST(SizesThatWrapAroundAreRefused) {
  sok::Scratch scratch;
  for (const int64_t n : {int64_t{1} << 60, int64_t{1} << 61, INT64_MAX})
    CHECK_THROWS(scratch.Get<int64_t>(n), sok::OutOfMemory, "no memory holds");
}

TEST(PiecesDoNotOverlapAndAreAligned) {
  sok::Scratch scratch;
  for (int round = 0; round < 3; ++round) {
    scratch.Reset();
    std::vector<std::pair<uint8_t*, int64_t>> pieces;
    for (const int64_t n : {0, 1, 63, 64, 65, 100000, 3, 5000000, 7}) {
      uint8_t* p = scratch.Get<uint8_t>(n);
      CHECK_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0u);
      for (int64_t i = 0; i < n; ++i) p[i] = static_cast<uint8_t>(pieces.size());
      pieces.emplace_back(p, n);
    }
    for (size_t k = 0; k < pieces.size(); ++k) {
      int64_t wrong = 0;
      for (int64_t i = 0; i < pieces[k].second; ++i) wrong += pieces[k].first[i] != k;
      CHECK_EQ(wrong, 0);
    }
  }
}

TEST(ASteadyUseAllocatesNothingNew) {
  sok::Scratch scratch;
  std::vector<char*> first;
  for (int round = 0; round < 4; ++round) {
    scratch.Reset();
    std::vector<char*> now;
    for (const int64_t n : {1000, 200000, 30}) now.push_back(scratch.Get<char>(n));
    if (round == 1) first = now;
    if (round > 1) CHECK(now == first);
  }
}
