#include "sok/partition.h"

#include <algorithm>

#include "sok/unique.h"

namespace sok {

Route RouteKeys(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, int world_size, bool is_unsigned,
                int64_t* index) {
  uint64_t* distinct = scratch->Get<uint64_t>(n);
  uint32_t* inverse = scratch->Get<uint32_t>(n);
  Route route;
  route.num_unique = Unique(cpu, scratch, keys, n, distinct, inverse, nullptr);

  // Stable counting sort of the distinct keys by owner.
  int64_t* counts = scratch->Get<int64_t>(world_size);
  int64_t* next = scratch->Get<int64_t>(world_size);
  uint32_t* owners = scratch->Get<uint32_t>(route.num_unique);
  std::fill(counts, counts + world_size, 0);
  for (int64_t u = 0; u < route.num_unique; ++u) {
    owners[u] = static_cast<uint32_t>(Owner(distinct[u], world_size, is_unsigned));
    ++counts[owners[u]];
  }
  int64_t begin = 0;
  for (int r = 0; r < world_size; ++r) {
    next[r] = begin;
    begin += counts[r];
  }
  uint64_t* bucketed = scratch->Get<uint64_t>(route.num_unique);
  int64_t* place = scratch->Get<int64_t>(route.num_unique);
  for (int64_t u = 0; u < route.num_unique; ++u) {
    const int64_t at = next[owners[u]]++;
    bucketed[at] = distinct[u];
    place[u] = at + owners[u] + 1;  // one header row before the answers of each owner
  }
  cpu.executor.For(n, 5, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) index[i] = place[inverse[i]];
  });
  route.keys = bucketed;
  route.counts = counts;
  return route;
}

}  // namespace sok
