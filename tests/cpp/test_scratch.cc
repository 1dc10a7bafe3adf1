#include "sok/scratch.h"

#include <cstdint>
#include <vector>

#include "check.h"

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
