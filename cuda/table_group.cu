// DeviceTable: keys of many tables to rows, in as many launches as one table takes.
//
// The keys lie where their callers have them, in pieces; each piece has a stretch of blocks. Positions count through all of
// them, those of a table side by side. A find over all keeps, of keys without a row, the key and its position; everything after it
// (elect.h and hash_table.cu say how keys become rows) ends at once where nobody is missing.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "detail/copy_row.h"
#include "detail/launch.h"
#include "detail/place_key.h"
#include "detail/places.h"
#include "detail/primitives.h"
#include "detail/slot_set.h"
#include "detail/table_state.h"
#include "detail/table_view.h"
#include "detail/upload.h"
#include "detail/work_of_block.h"
#include "sok/device_words.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kTilesPerBlock = kThreads / kBucketLanes;
constexpr int64_t kKeysPerBlock =
    2 * kKeysAtOnce * kTilesPerBlock;  // enough that finding out whose they are costs little
constexpr uint32_t kNobody = 0xFFFFFFFFu;

// A table of the group.
struct GroupTable {
  TableView view;
  DeviceHashCounters* counters;  // of a hashed table
  const uint32_t* free_rows;
  uint32_t* in_use;  // of an identity table
  int64_t* num_in_use;
  const float* defaults;
  int64_t num_defaults;
  TableBad* bad;
  int64_t first, last;  // its positions
};

// Keys of one table that lie together.
struct Piece {
  DeviceKeys keys;   // [n]
  float* out;        // [n, dim] or null
  int64_t* row_ids;  // [n]
  int64_t n, first, first_block;
  int64_t table;
};

struct KeyGroup {
  const GroupTable* tables;
  int64_t num_tables;
  const Piece* pieces;
  int64_t num_pieces, num_blocks;
  int64_t n;
  uint32_t* is_missing;  // [1] whether any key has no row
  // [n], where keys have no row
  uint32_t* rows;  // of every key
  uint64_t* keys;
  uint32_t* leaders;  // first the place of each in `places`
  uint32_t* before;   // [n + 1]
  uint32_t* places;   // [mask + 1]
  uint32_t mask;
  uint64_t seed;  // of `places`
};

// f(piece, table, position) for the keys of this block, a thread each.
template <class F>
__device__ __forceinline__ void ForKeys(const KeyGroup& group, const F& f) {
  for (int64_t block = blockIdx.x; block < group.num_blocks; block += gridDim.x) {
    const Piece& piece = WorkOfBlock(group.pieces, group.num_pieces, block);
    const GroupTable& table = group.tables[piece.table];
    const int64_t begin = (block - piece.first_block) * kKeysPerBlock;
    const int64_t end = begin + kKeysPerBlock < piece.n ? begin + kKeysPerBlock : piece.n;
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) f(piece, table, piece.first + i);
  }
}

// f(piece, table, first, count) for the keys of this block, `count` of them to a tile at once, from `first` of the piece on.
template <class F>
__device__ __forceinline__ void ForSomeKeys(const KeyGroup& group, const F& f) {
  const int64_t tile = threadIdx.x / kBucketLanes;
  for (int64_t block = blockIdx.x; block < group.num_blocks; block += gridDim.x) {
    const Piece& piece = WorkOfBlock(group.pieces, group.num_pieces, block);
    const GroupTable& table = group.tables[piece.table];
    const int64_t begin = (block - piece.first_block) * kKeysPerBlock;
    const int64_t end = begin + kKeysPerBlock < piece.n ? begin + kKeysPerBlock : piece.n;
    for (int64_t i = begin + tile * kKeysAtOnce; i < end; i += kTilesPerBlock * kKeysAtOnce) {
      f(piece, table, i, end - i < kKeysAtOnce ? static_cast<int>(end - i) : kKeysAtOnce);
    }
  }
}

template <bool kFreshToo>
__global__ void FindGroupKernel(KeyGroup group) {
  const BucketTile tile;
  ForSomeKeys(group, [&](const Piece& piece, const GroupTable& table, int64_t first, int count) {
    uint64_t key = 0;
    uint32_t row = kNoRow;
    if (tile.lane < count) {
      const int64_t i = first + tile.lane, position = piece.first + i;
      key = piece.keys.At(i);
      row = Search(table.view, key);
      piece.row_ids[i] = row != kNoRow && row != kBadRow ? RowId(table.view, row) : -1;
      if (row == kBadRow && atomicExch(reinterpret_cast<unsigned long long*>(&table.bad->has_key), 1ull) == 0) {
        table.bad->key = key;
      }
      if (group.rows != nullptr) {
        group.rows[position] = row;
        if (row == kNoRow) {
          group.keys[position] = key;
          if (LoadRelaxed(group.is_missing) == 0) StoreRelaxed(group.is_missing, 1u);
        }
      }
    }
    if (piece.out == nullptr) return;
    WriteRows<kFreshToo>(tile, table.view, key, row, count, piece.out + first * table.view.dim);
  });
}

__global__ void ClearPlacesKernel(KeyGroup group) {
  if (*group.is_missing == 0) return;
  for (int64_t i = GlobalThread(); i <= group.mask; i += GlobalThreads()) group.places[i] = kNobody;
}

// Of equal keys of one table without a row, the lowest position stays in `places`. Identity tables need nobody to speak.
__global__ void ElectGroupKernel(KeyGroup group) {
  if (*group.is_missing == 0) return;
  ForKeys(group, [&](const Piece& piece, const GroupTable& table, int64_t position) {
    group.leaders[position] = kNobody;
    if (group.rows[position] != kNoRow || !table.view.hashed) return;
    const uint64_t key = group.keys[position];
    const uint32_t me = static_cast<uint32_t>(position);
    // Tables that have the same keys shall not meet.
    const uint64_t hash = HashKey((key + static_cast<uint64_t>(piece.table) * 0x9E3779B97F4A7C15ull) ^ group.seed);
    for (uint32_t place = static_cast<uint32_t>(hash) & group.mask;; place = (place + 1) & group.mask) {
      if (place == kNobody) continue;  // means that a position takes no part
      uint32_t there = LoadRelaxed(&group.places[place]);
      if (there == kNobody) there = atomicCAS(&group.places[place], kNobody, me);
      if (there != kNobody && (there < table.first || there >= table.last || group.keys[there] != key)) continue;
      if (there != kNobody && there > me) atomicMin(&group.places[place], me);
      group.leaders[position] = place;
      break;
    }
  });
}

// From places to who speaks: leaders[i] = the position that does for i, before[i] = whether that is i. before[n] = 0.
__global__ void LeadersOfGroupKernel(KeyGroup group) {
  const bool is_missing = *group.is_missing != 0;
  for (int64_t i = GlobalThread(); i <= group.n; i += GlobalThreads()) {
    uint32_t leader = kNobody;
    if (is_missing && i < group.n && group.leaders[i] != kNobody) leader = group.places[group.leaders[i]];
    if (is_missing && i < group.n) group.leaders[i] = leader;
    group.before[i] = i < group.n && leader == static_cast<uint32_t>(i);
  }
}

// What the host asks about a table that may have no room.
__global__ void CountsOfGroupKernel(KeyGroup group, DeviceHashCounters* counts) {
  for (int64_t t = GlobalThread(); t < group.num_tables; t += GlobalThreads()) {
    const GroupTable& table = group.tables[t];
    counts[t] = DeviceHashCounters{};
    if (table.counters != nullptr) counts[t] = *table.counters;
    counts[t].num_new = group.before[table.last] - group.before[table.first];
  }
}

// The key of the position that is the first of its table to have no room.
__global__ void KeyWithoutRoomInGroupKernel(KeyGroup group, int64_t first, int64_t last, int64_t room, uint64_t* key) {
  for (int64_t i = first + GlobalThread(); i < last; i += GlobalThreads()) {
    const bool leads = group.before[i + 1] != group.before[i];
    if (leads && group.before[i] - group.before[first] == room) *key = group.keys[i];
  }
}

// New keys get their rows. In an identity table the row is the key's, and the thread that puts it in use leads.
__global__ void PlaceGroupKernel(KeyGroup group) {
  if (*group.is_missing == 0) return;
  ForKeys(group, [&](const Piece&, const GroupTable& table, int64_t position) {
    if (table.view.hashed) {
      if (group.leaders[position] != static_cast<uint32_t>(position)) return;
      const int64_t number = group.before[position] - group.before[table.first];
      const uint32_t row = RowOfNew(*table.counters, table.free_rows, number);
      Place(table.view.index, group.keys[position], row);
      group.rows[position] = row;
    } else if (group.rows[position] == kNoRow) {
      const uint32_t row = static_cast<uint32_t>(group.keys[position] / table.view.shards), bit = 1u << (row & 31);
      const bool is_mine = (atomicOr(&table.in_use[row >> 5], bit) & bit) == 0;
      if (is_mine) atomicAdd(reinterpret_cast<unsigned long long*>(table.num_in_use), 1ull);
      group.rows[position] = row;
      group.leaders[position] = static_cast<uint32_t>(is_mine ? position : position + 1);
    }
  });
}

// Where a key came new: its record, once, and what the lookup gives. Its values are a function of the key alone, so no
// position waits for another's record. The first block counts what is new, which nobody asks for meanwhile.
__global__ void FillGroupKernel(KeyGroup group) {
  if (*group.is_missing == 0) return;
  for (int64_t t = blockIdx.x == 0 ? threadIdx.x : group.num_tables; t < group.num_tables; t += blockDim.x) {
    const GroupTable& table = group.tables[t];
    if (table.counters != nullptr) CountInserted(group.before[table.last] - group.before[table.first], table.counters);
  }
  const BucketTile tile;
  ForSomeKeys(group, [&](const Piece& piece, const GroupTable& table, int64_t first, int count) {
    NewKey mine;
    if (tile.lane < count) {
      const int64_t i = first + tile.lane, position = piece.first + i;
      const uint32_t leader = group.leaders[position];
      if (leader != kNobody) {
        const uint32_t row = group.rows[table.view.hashed ? leader : static_cast<uint32_t>(position)];
        mine = {group.keys[position], row, true, leader == static_cast<uint32_t>(position)};
        piece.row_ids[i] = RowId(table.view, row);
      }
    }
    float* out = piece.out == nullptr ? nullptr : piece.out + first * table.view.dim;
    WriteNew(tile, table.view, mine, count, table.defaults, table.num_defaults, out);
  });
}

__global__ void StampNewOfGroupKernel(KeyGroup group, int64_t first, int64_t last, uint32_t calls, uint32_t* stamps) {
  if (*group.is_missing == 0) return;
  for (int64_t i = first + GlobalThread(); i < last; i += GlobalThreads())
    if (group.leaders[i] == static_cast<uint32_t>(i)) stamps[group.rows[i]] = calls;
}

// One call.
class GroupLookup {
 public:
  GroupLookup(const DeviceTable::Asked* asked, int64_t num_asked) {
    for (int64_t k = 0; k < num_asked; ++k) {
      DeviceTable::State* state = asked[k].table->state();
      state->CheckCount(asked[k].n);
      table_of_.push_back(std::find(states_.begin(), states_.end(), state) - states_.begin());
      if (table_of_.back() == static_cast<int64_t>(states_.size())) states_.push_back(state);
    }
    tables_.resize(states_.size());
    for (size_t t = 0; t < states_.size(); ++t) {
      tables_[t].first = n_;
      for (int64_t k = 0; k < num_asked; ++k) {
        const DeviceTable::Asked& a = asked[k];
        if (table_of_[static_cast<size_t>(k)] != static_cast<int64_t>(t) || a.n == 0) continue;
        pieces_.push_back({a.keys, a.rows, a.row_ids, a.n, n_, num_blocks_, static_cast<int64_t>(t)});
        num_blocks_ += (a.n + kKeysPerBlock - 1) / kKeysPerBlock;
        n_ += a.n;
        states_[0]->CheckCount(n_);
      }
      tables_[t].last = n_;
    }
  }

  const std::vector<DeviceTable::State*>& states() const { return states_; }
  bool empty() const { return n_ == 0; }
  bool HasDecay() const {
    return std::any_of(states_.begin(), states_.end(), [](const auto* state) { return state->HasDecay(); });
  }

  void Find(const Cuda& cuda, DeviceScratch* scratch, bool insert) {
    for (DeviceTable::State* state : states_)
      if (insert && state->index) state->index->MakeCounters(cuda);
    Send(cuda, scratch, insert);
    const bool wants_rows =
        std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& p) { return p.out != nullptr; });
    Launch(wants_rows && !insert ? FindGroupKernel<true> : FindGroupKernel<false>, GridFor(num_blocks_, 1), kThreads, 0,
           cuda, group_);
  }

  void Insert(const Cuda& cuda, DeviceScratch* scratch) {
    const int64_t grid = GridFor(num_blocks_, 1), positions = GridFor(n_ + 1, kThreads);
    Launch(ClearPlacesKernel, GridFor(int64_t{group_.mask} + 1, kThreads), kThreads, 0, cuda, group_);
    Launch(ElectGroupKernel, grid, kThreads, 0, cuda, group_);
    Launch(LeadersOfGroupKernel, positions, kThreads, 0, cuda, group_);
    ExclusiveSum(cuda, scratch, group_.before, group_.before, n_ + 1);
    MakeRoom(cuda, scratch);
    Launch(PlaceGroupKernel, grid, kThreads, 0, cuda, group_);
    Launch(FillGroupKernel, grid, kThreads, 0, cuda, group_);
    for (size_t t = 0; t < states_.size(); ++t) {
      for (const auto& set : states_[t]->sets) {
        if (set->decay == nullptr) continue;
        Launch(StampNewOfGroupKernel, GridFor(tables_[t].last - tables_[t].first, kThreads), kThreads, 0, cuda, group_,
               tables_[t].first, tables_[t].last, static_cast<uint32_t>(set->decay->calls()), set->stamps.data());
      }
    }
  }

 private:
  // What the tables are now; on the first call also the memory of the search.
  void Send(const Cuda& cuda, DeviceScratch* scratch, bool insert) {
    for (size_t t = 0; t < states_.size(); ++t) {
      const DeviceTable::State& state = *states_[t];
      GroupTable& table = tables_[t];
      table.view = ViewOf(state);
      table.counters = state.index ? state.index->counters() : nullptr;
      table.free_rows = state.index ? state.index->free_rows() : nullptr;
      table.in_use = state.in_use.data();
      table.num_in_use = state.num_in_use.data();
      table.defaults = state.defaults.data();
      table.num_defaults = state.defaults.size();
      table.bad = state.bad.data();
    }
    const uint32_t nobody_is_missing = 0;
    Parcel parcel;
    const auto tables_at = parcel.Add(tables_.data(), static_cast<int64_t>(tables_.size()));
    const auto pieces_at = parcel.Add(pieces_.data(), static_cast<int64_t>(pieces_.size()));
    const auto missing_at = parcel.Add(&nobody_is_missing, 1);
    parcel.Send(cuda, scratch);
    group_.tables = parcel.On(tables_at);
    group_.pieces = parcel.On(pieces_at);
    if (group_.num_tables > 0) return;
    group_.num_tables = static_cast<int64_t>(tables_.size());
    group_.num_pieces = static_cast<int64_t>(pieces_.size());
    group_.num_blocks = num_blocks_;
    group_.n = n_;
    group_.is_missing = parcel.On(missing_at);
    if (!insert) return;
    const int64_t places = PlacesFor(n_);
    group_.mask = static_cast<uint32_t>(places - 1);
    group_.seed = HashSeed();
    group_.places = scratch->Get<uint32_t>(places);
    group_.rows = scratch->Get<uint32_t>(n_);
    group_.keys = scratch->Get<uint64_t>(n_);
    group_.leaders = scratch->Get<uint32_t>(n_);
    group_.before = scratch->Get<uint32_t>(n_ + 1);
  }

  // Room for the new keys of all tables, or nothing is stored in any. Waits, once, if one of them may have no room.
  void MakeRoom(const Cuda& cuda, DeviceScratch* scratch) {
    const size_t m = states_.size();
    std::vector<int64_t> num_new(m);
    bool may_not_fit = false;
    for (size_t t = 0; t < m; ++t) {
      num_new[t] = tables_[t].last - tables_[t].first;
      if (!states_[t]->index) continue;
      may_not_fit = may_not_fit || states_[t]->index->MayNotFit(num_new[t], states_[t]->room());
    }
    if (may_not_fit) LearnCounts(cuda, scratch, &num_new);
    bool has_moved = false;
    for (size_t t = 0; t < m; ++t) {
      DeviceTable::State& state = *states_[t];
      if (tables_[t].first == tables_[t].last) continue;
      state.MakeRoom(cuda, state.index ? state.index->RowsAfter(num_new[t]) : state.config.capacity);
      if (state.index) state.index->MakeKeyRoom(cuda, num_new[t]);
    }
    for (size_t t = 0; t < m; ++t) {
      DeviceTable::State& state = *states_[t];
      if (tables_[t].first == tables_[t].last) continue;
      if (state.index && may_not_fit) {  // after all have what they need
        try {
          state.MakeRoom(cuda, state.index->SpareRows(num_new[t], tables_[t].last - tables_[t].first));
        } catch (const OutOfMemory&) {
        }
      }
      has_moved = has_moved || (state.index && state.index->view().buckets != tables_[t].view.index.buckets) ||
                  state.rows.view().slabs != tables_[t].view.rows.slabs ||
                  state.changes.notes().marks != tables_[t].view.notes.marks;
    }
    if (has_moved) Send(cuda, scratch, true);
    for (size_t t = 0; t < m; ++t)
      if (states_[t]->index) states_[t]->index->AddToBounds(num_new[t]);
  }

  void LearnCounts(const Cuda& cuda, DeviceScratch* scratch, std::vector<int64_t>* num_new) {
    const size_t m = states_.size();
    auto* counts = scratch->Get<DeviceHashCounters>(static_cast<int64_t>(m));
    std::vector<DeviceHashCounters> on_host(m);
    Launch(CountsOfGroupKernel, GridFor(group_.num_tables, kThreads), kThreads, 0, cuda, group_, counts);
    SOK_CUDA(
        cudaMemcpyAsync(on_host.data(), counts, m * sizeof(DeviceHashCounters), cudaMemcpyDeviceToHost, cuda.stream));
    SOK_CUDA(cudaStreamSynchronize(cuda.stream));
    for (size_t t = 0; t < m; ++t) {
      if (!states_[t]->index) continue;
      states_[t]->index->Learn(on_host[t]);
      (*num_new)[t] = on_host[t].num_new;
    }
    for (size_t t = 0; t < m; ++t) {
      DeviceTable::State& state = *states_[t];
      if (!state.index || state.index->HasRowsFor((*num_new)[t])) continue;
      uint64_t* key = scratch->Get<uint64_t>(1);
      uint64_t key_on_host = 0;
      const int64_t first = tables_[t].first, last = tables_[t].last;
      Launch(KeyWithoutRoomInGroupKernel, GridFor(last - first, kThreads), kThreads, 0, cuda, group_, first, last,
             state.index->rows_left(), key);
      SOK_CUDA(cudaMemcpyAsync(&key_on_host, key, sizeof(key_on_host), cudaMemcpyDeviceToHost, cuda.stream));
      SOK_CUDA(cudaStreamSynchronize(cuda.stream));
      state.config.ThrowFull(key_on_host);
    }
  }

  std::vector<DeviceTable::State*> states_;
  std::vector<int64_t> table_of_;  // of each piece that was asked for
  std::vector<GroupTable> tables_;
  std::vector<Piece> pieces_;
  int64_t n_ = 0, num_blocks_ = 0;
  KeyGroup group_ = {};
};

// What is read is settled first, once.
void Settle(const Cuda& cuda, DeviceScratch* scratch, const DeviceTable::Asked* asked, int64_t num_asked) {
  for (int64_t k = 0; k < num_asked; ++k) {
    DeviceTable::State& state = *asked[k].table->state();
    if (!state.HasDecay()) continue;
    uint32_t* found = scratch->Get<uint32_t>(asked[k].n);
    const uint64_t* keys = asked[k].keys.wide();
    if (asked[k].keys.is_narrow) {
      auto* widened = scratch->Get<uint64_t>(asked[k].n);
      WidenKeys(cuda, static_cast<const uint32_t*>(asked[k].keys.words), asked[k].keys.is_unsigned, asked[k].n,
                widened);
      keys = widened;
    }
    state.FindRows(cuda, keys, asked[k].n, false, false, found, nullptr, nullptr);
    state.Settle(cuda, scratch, found, asked[k].n);
  }
}

}  // namespace

void DeviceTable::LookupGroup(const Cuda& cuda, DeviceScratch* scratch, const Asked* asked, int64_t num_asked,
                              bool insert) {
  if (num_asked == 1 && !asked->keys.is_narrow) {
    return asked->table->Lookup(cuda, scratch, asked->keys.wide(), asked->n, insert, asked->rows, asked->row_ids);
  }
  GroupLookup lookup(asked, num_asked);
  if (lookup.empty()) return;
  const std::vector<State*>& states = lookup.states();
  if (!insert) {
    const TableReading reading(states, cuda);
    if (!lookup.HasDecay()) return lookup.Find(cuda, scratch, false);
  }
  const TableWriting writing(states, cuda);
  Settle(cuda, scratch, asked, num_asked);
  lookup.Find(cuda, scratch, insert);
  if (insert) lookup.Insert(cuda, scratch);
}

std::vector<DeviceTable::Reading> DeviceTable::FindGroup(const Cuda& cuda, DeviceScratch* scratch, const Asked* asked,
                                                         int64_t num_asked) {
  std::vector<Asked> ids_alone(asked, asked + num_asked);
  for (Asked& one : ids_alone) one.rows = nullptr;
  GroupLookup lookup(ids_alone.data(), num_asked);
  std::shared_ptr<void> lock;
  if (lookup.HasDecay()) {
    lock = std::make_shared<TableWriting>(lookup.states(), cuda);
    Settle(cuda, scratch, asked, num_asked);
  } else {
    lock = std::make_shared<TableReading>(lookup.states(), cuda);
  }
  if (!lookup.empty()) lookup.Find(cuda, scratch, false);
  std::vector<Reading> readings;
  for (int64_t k = 0; k < num_asked; ++k) {
    readings.push_back(asked[k].table->state()->ReadUnder(lock));
    readings.back().fresh.keys = asked[k].keys;
  }
  return readings;
}

}  // namespace sok
