#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/error.h"
#include "sok/partition.h"

TEST(KeysGoToTheirOwnersInOrder) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  for (const int64_t n : {0, 1, 256, 257, 3000}) {
    for (const int world : {1, 2, 3, 7, 300}) {
      for (const bool is_unsigned : {false, true}) {
        for (const int owner :
             {sok::kByHash, sok::kByKey, 0, world - 1, sok::OwnerOfRanks(world / 2, world - world / 2, false),
              sok::OwnerOfRanks(world / 2, world - world / 2, true)}) {
          std::mt19937_64 rng(static_cast<uint64_t>(n + world));
          std::vector<uint64_t> keys;
          for (int64_t i = 0; i < n; ++i) keys.push_back(rng() >> (rng() % 64));
          for (size_t i = 0; i < keys.size(); i += 3) keys[i] = ~keys[i];  // negative ones
          sok::Partition partition;
          partition.world_size = world;
          partition.owner = owner;
          partition.is_unsigned = is_unsigned;
          std::vector<uint32_t> order;
          std::vector<int64_t> expected(static_cast<size_t>(world));
          for (uint32_t i = 0; i < keys.size(); ++i) {
            order.push_back(i);
            ++expected[static_cast<size_t>(partition.OwnerOf(keys[i]))];
          }
          std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            return partition.OwnerOf(keys[a]) < partition.OwnerOf(keys[b]);
          });
          DeviceArray<uint64_t> given(keys), sorted(n);
          DeviceArray<uint32_t> positions(n), places(n);
          DeviceArray<int64_t> counts(world);
          sok::PartitionKeys(cuda, &scratch, partition, given, n, sorted, positions, places, counts);
          CHECK(positions.Get() == order);
          CHECK(counts.Get() == expected);
          const std::vector<uint64_t> moved = sorted.Get();
          const std::vector<uint32_t> place = places.Get();
          for (size_t k = 0; k < order.size(); ++k) {
            CHECK_EQ(moved[k], keys[order[k]]);
            CHECK_EQ(place[order[k]], k);
          }
          scratch.Reset();
        }
      }
    }
  }
}

TEST(WorldsAndOwnersThatMakeNoSenseAreRefused) {
  const sok::Cuda cuda;
  sok::StreamScratch scratch(cuda);
  sok::Partition partition;
  const auto run = [&](int64_t n) {
    sok::PartitionKeys(cuda, &scratch, partition, nullptr, n, nullptr, nullptr, nullptr, nullptr);
  };
  CHECK_THROWS(run(int64_t{1} << 31), sok::InvalidArgument, "2147483648");
  partition.world_size = 0;
  CHECK_THROWS(run(1), sok::InvalidArgument, "world_size must be at least 1");
  partition.world_size = 2;
  partition.owner = 2;
  CHECK_THROWS(run(1), sok::InvalidArgument, "Received: 2");
}
