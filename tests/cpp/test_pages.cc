#include "sok/pages.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "sok/error.h"

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

bool IsZero(const char* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 509)
    if (p[i] != 0) return false;
  return p[n - 1] == 0;
}

}  // namespace

TEST(PagesAreAlignedZeroedAndWritable) {
  for (const bool huge : {false, true}) {
    for (const int64_t bytes :
         {int64_t{1}, int64_t{4095}, int64_t{4096}, 2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 1, 5 * kMiB}) {
      std::vector<char*> all;
      for (int i = 0; i < 4; ++i) all.push_back(static_cast<char*>(sok::AllocatePages(bytes, huge, "a test")));
      for (size_t i = 0; i < all.size(); ++i) {
        CHECK_EQ(reinterpret_cast<uintptr_t>(all[i]) % static_cast<uintptr_t>(bytes >= 2 * kMiB ? 2 * kMiB : 64),
                 uintptr_t{0});
        CHECK(IsZero(all[i], bytes));
        std::memset(all[i], static_cast<int>(i) + 1, static_cast<size_t>(bytes));
      }
      // One that goes takes nothing of its neighbours with it.
      sok::FreePages(all[1], bytes);
      sok::FreePages(all[3], bytes);
      for (const size_t i : {size_t{0}, size_t{2}}) {
        CHECK(all[i][0] == static_cast<char>(i + 1) && all[i][bytes - 1] == static_cast<char>(i + 1));
        sok::FreePages(all[i], bytes);
      }
    }
  }
  sok::FreePages(nullptr, 4096);
}

TEST(ContentsStayWhenPagesBecomeHuge) {
  const int64_t bytes = 6 * kMiB;
  char* p = static_cast<char*>(sok::AllocatePages(bytes, false, "a test"));
  for (int64_t i = 0; i < bytes; ++i) p[i] = static_cast<char>(i * 7 + i / 4096);
  sok::MakeHuge(p, bytes);
  int64_t wrong = 0;
  for (int64_t i = 0; i < bytes; ++i) wrong += p[i] != static_cast<char>(i * 7 + i / 4096);
  CHECK_EQ(wrong, 0);
  sok::FreePages(p, bytes);
}

TEST(MoreThanThereIsIsRefusedByName) {
  CHECK_THROWS(sok::AllocatePages(int64_t{1} << 55, true, "an elephant"), sok::OutOfMemory, "an elephant");
}
