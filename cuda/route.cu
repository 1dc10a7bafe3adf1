// Keys to those who own them, each once, in a few launches for all tables. Of the positions that hold the same key of the same
// table the first speaks, as in elect.h; those who speak are sorted by (rank, table), a stable sort of few bits.
#include <algorithm>
#include <string>
#include <vector>

#include "detail/launch.h"
#include "detail/places.h"
#include "detail/sort_positions.h"
#include "detail/upload.h"
#include "detail/vector4.h"
#include "detail/work_of_block.h"
#include "sok/device_keys.h"
#include "sok/device_words.h"
#include "sok/error.h"
#include "sok/exchange.h"
#include "sok/hash_key.h"

namespace sok {
namespace {

constexpr int64_t kKeysPerBlock = 4 * kThreads;
constexpr uint32_t kNobody = 0xFFFFFFFFu;
constexpr uint32_t kFirst = 0x80000000u;  // of an index: no position before has that place

struct KeysOfFeature {
  DeviceKeys keys;  // [n]
  int32_t* index;   // [n]
  int64_t n, first, first_block;
  Partition partition;
  uint64_t num_legal;
  uint32_t table, number;
};

// f(feature, i) for the keys of this block, a thread each.
template <class F>
__device__ __forceinline__ void ForKeys(const KeysOfFeature* features, int64_t num_features, int64_t num_blocks,
                                        const F& f) {
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const KeysOfFeature& feature = WorkOfBlock(features, num_features, block);
    const int64_t begin = (block - feature.first_block) * kKeysPerBlock;
    const int64_t end = begin + kKeysPerBlock < feature.n ? begin + kKeysPerBlock : feature.n;
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) f(feature, i);
  }
}

__global__ void CellsKernel(const KeysOfFeature* features, int64_t num_features, int64_t num_blocks,
                            uint32_t num_tables, uint64_t* keys, uint32_t* cells, uint64_t* first_bad) {
  ForKeys(features, num_features, num_blocks, [&](const KeysOfFeature& feature, int64_t i) {
    const uint64_t key = feature.keys.At(i);
    if (feature.num_legal != 0 && key >= feature.num_legal) {
      ReportBad(first_bad, static_cast<int64_t>(uint64_t{feature.number} << 32 | static_cast<uint64_t>(i)));
    }
    keys[feature.first + i] = key;
    cells[feature.first + i] = static_cast<uint32_t>(feature.partition.OwnerOf(key)) * num_tables + feature.table;
  });
}

// Of equal keys of one cell, and so of one table, the lowest position stays in `places`.
__global__ void ElectInCellsKernel(const uint64_t* keys, const uint32_t* cells, int64_t n, uint32_t* places,
                                   uint32_t mask, uint64_t seed, uint32_t* place_of) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    const uint64_t key = keys[i];
    const uint32_t cell = cells[i], me = static_cast<uint32_t>(i);
    const uint64_t hash = HashKey((key + uint64_t{cell} * 0x9E3779B97F4A7C15ull) ^ seed);
    uint32_t place = static_cast<uint32_t>(hash) & mask;
    while (true) {
      uint32_t there = LoadRelaxed(&places[place]);
      if (there == kNobody) there = atomicCAS(&places[place], kNobody, me);
      if (there == kNobody) break;
      if (keys[there] == key && cells[there] == cell) {
        if (me < there) atomicMin(&places[place], me);
        break;
      }
      place = (place + 1) & mask;
    }
    place_of[i] = place;
  }
}

// leaders[i]: from the place of a key to who speaks for it. cell_of_first: the cell of those who do, else num_cells.
__global__ void FirstsOfCellsKernel(const uint32_t* places, const uint32_t* cells, int64_t n, uint32_t num_cells,
                                    uint32_t* leaders, uint32_t* cell_of_first) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    const uint32_t leader = places[leaders[i]];
    leaders[i] = leader;
    cell_of_first[i] = leader == static_cast<uint32_t>(i) ? cells[i] : num_cells;
  }
}

// begin[c] = how many of the ascending cells are below c.
__global__ void BeginsOfCellsKernel(const uint32_t* cells, int64_t n, int64_t num_begins, int64_t* begin) {
  for (int64_t c = GlobalThread(); c < num_begins; c += GlobalThreads()) {
    int64_t low = 0, high = n;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (cells[middle] < c) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    begin[c] = low;
  }
}

struct Cell {
  int64_t begin, place, dim;
};

__global__ void PlacesOfKeysKernel(const Cell* all, const uint64_t* keys, const uint32_t* cells,
                                   const uint32_t* positions, int64_t num_keys, uint64_t* distinct,
                                   uint32_t* place_of) {
  for (int64_t k = GlobalThread(); k < num_keys; k += GlobalThreads()) {
    const uint32_t position = positions[k];
    const Cell& cell = all[cells[k]];
    distinct[k] = keys[position];
    place_of[position] = static_cast<uint32_t>(cell.place + (k - cell.begin) * cell.dim);
  }
}

__global__ void WriteIndexKernel(const KeysOfFeature* features, int64_t num_features, int64_t num_blocks,
                                 const uint32_t* leaders, const uint32_t* place_of) {
  ForKeys(features, num_features, num_blocks, [&](const KeysOfFeature& feature, int64_t i) {
    const uint32_t position = static_cast<uint32_t>(feature.first + i), leader = leaders[position];
    feature.index[i] = static_cast<int32_t>(place_of[leader] | (leader == position ? kFirst : 0));
  });
}

// The features that have keys, in the order of their positions.
struct Work {
  Work(const RouteTable* tables, const RouteFeature* features, int num_features, int world) {
    for (const bool has_splits : {false, true}) {
      for (int f = 0; f < num_features; ++f) {
        const RouteFeature& feature = features[f];
        if ((feature.row_splits != nullptr) != has_splits || feature.n == 0) continue;
        const RouteTable& table = tables[feature.table];
        const Partition partition = {world, table.owner, table.is_unsigned};
        const DeviceKeys keys = feature.is_wide
                                    ? DeviceKeys(static_cast<const uint64_t*>(feature.keys))
                                    : DeviceKeys(static_cast<const uint32_t*>(feature.keys), table.is_unsigned);
        all.push_back({keys, feature.index, feature.n, n, num_blocks, partition, table.num_legal,
                       static_cast<uint32_t>(feature.table), static_cast<uint32_t>(f)});
        num_blocks += (feature.n + kKeysPerBlock - 1) / kKeysPerBlock;
        n += feature.n;
      }
    }
  }
  int64_t size() const { return static_cast<int64_t>(all.size()); }

  std::vector<KeysOfFeature> all;
  int64_t n = 0, num_blocks = 0;
};

}  // namespace

DeviceRoute RouteKeysToHost(const Cuda& cuda, DeviceScratch* scratch, const RouteTable* tables, int num_tables,
                            const RouteFeature* features, int num_features, int world) {
  const Work work(tables, features, num_features, world);
  const int64_t n = work.n, num_cells = int64_t{world} * num_tables;
  if (n >= INT64_C(0x7FFFFFFF)) {
    throw InvalidArgument("at most 2^31 - 2 keys in one call. Received: " + std::to_string(n) + ".");
  }
  DeviceRoute route;
  route.begin.assign(static_cast<size_t>(num_cells) + 1, 0);
  if (n == 0) return route;
  auto* keys = scratch->Get<uint64_t>(n);
  auto* cells = scratch->Get<uint32_t>(n);
  auto* leaders = scratch->Get<uint32_t>(n);
  auto* cell_of_first = scratch->Get<uint32_t>(n);
  const int64_t num_places = PlacesFor(n);
  auto* places = scratch->Get<uint32_t>(num_places);
  auto* told = scratch->Get<int64_t>(num_cells + 2);  // begins, and the first key that is not legal
  auto* first_bad = reinterpret_cast<uint64_t*>(told + num_cells + 1);
  SetOnDevice(cuda, first_bad, 0xFF, sizeof(*first_bad));
  SetOnDevice(cuda, places, 0xFF, num_places * int64_t{sizeof(uint32_t)});
  const KeysOfFeature* on_device = Upload(cuda, scratch, work.all.data(), work.size());
  const int64_t grid = GridFor(work.num_blocks, 1), grid_of_keys = GridFor(n, kThreads);
  Launch(CellsKernel, grid, kThreads, 0, cuda, on_device, work.size(), work.num_blocks,
         static_cast<uint32_t>(num_tables), keys, cells, first_bad);
  Launch(ElectInCellsKernel, grid_of_keys, kThreads, 0, cuda, keys, cells, n, places,
         static_cast<uint32_t>(num_places - 1), HashSeed(), leaders);
  Launch(FirstsOfCellsKernel, grid_of_keys, kThreads, 0, cuda, places, cells, n, static_cast<uint32_t>(num_cells),
         leaders, cell_of_first);
  SortPositions(cuda, scratch, cell_of_first, n, static_cast<uint32_t>(num_cells), &route.cells, &route.positions);
  Launch(BeginsOfCellsKernel, GridFor(num_cells + 1, kThreads), kThreads, 0, cuda, route.cells, n, num_cells + 1, told);
  std::vector<int64_t> on_host(static_cast<size_t>(num_cells) + 2);
  CopyToHost(cuda, on_host.data(), told, (num_cells + 2) * int64_t{sizeof(int64_t)});
  std::copy(on_host.begin(), on_host.end() - 1, route.begin.begin());
  route.keys = keys;
  route.leaders = leaders;
  const auto bad = static_cast<uint64_t>(on_host.back());
  if (bad == kNothingBad) return route;
  route.is_legal = false;
  route.bad_feature = static_cast<int>(bad >> 32);
  const auto it = std::find_if(work.all.begin(), work.all.end(), [&](const KeysOfFeature& feature) {
    return feature.number == static_cast<uint32_t>(bad >> 32);
  });
  CopyToHost(cuda, &route.bad_key, keys + it->first + static_cast<int64_t>(bad & 0xFFFFFFFFu), sizeof(route.bad_key));
  return route;
}

void WriteRouteToHost(const Cuda& cuda, DeviceScratch* scratch, const DeviceRoute& route, const RouteTable* tables,
                      int num_tables, const RouteFeature* features, int num_features, const int64_t* places,
                      uint64_t* keys) {
  const int64_t num_keys = route.begin.back(), num_cells = static_cast<int64_t>(route.begin.size()) - 1;
  if (num_keys == 0) return;
  const Work work(tables, features, num_features, 1);
  std::vector<Cell> cells;
  for (int64_t c = 0; c < num_cells; ++c)
    cells.push_back({route.begin[static_cast<size_t>(c)], places[c], tables[c % num_tables].dim});
  Parcel parcel;
  const auto cells_at = parcel.Add(cells.data(), num_cells);
  const auto work_at = parcel.Add(work.all.data(), work.size());
  parcel.Send(cuda, scratch);
  auto* distinct = scratch->Get<uint64_t>(num_keys);
  auto* place_of = scratch->Get<uint32_t>(work.n);
  Launch(PlacesOfKeysKernel, GridFor(num_keys, kThreads), kThreads, 0, cuda, parcel.On(cells_at), route.keys,
         route.cells, route.positions, num_keys, distinct, place_of);
  Launch(WriteIndexKernel, GridFor(work.num_blocks, 1), kThreads, 0, cuda, parcel.On(work_at), work.size(),
         work.num_blocks, route.leaders, place_of);
  CopyToHost(cuda, keys, distinct, num_keys * int64_t{sizeof(uint64_t)});
}

}  // namespace sok
