// DeviceTable: keys to rows, and rows that appear on the way.
#include <cuda_runtime.h>

#include <algorithm>

#include "detail/copy_row.h"
#include "detail/elect.h"
#include "detail/find_row.h"
#include "detail/launch.h"
#include "detail/slot_set.h"
#include "detail/table_state.h"
#include "detail/table_view.h"
#include "sok/error.h"

namespace sok {
namespace {

// A thread takes a key from its bucket to its row: 128 bytes of index. Its tile then reads the record, once.
// kFreshToo: keys without a row read as their fresh one.
template <bool kFreshToo>
__global__ void LookupKernel(TableView table, const uint64_t* keys, int64_t n,
                             uint32_t* rows,    // [n] or null
                             float* out,        // [n, dim] or null
                             int64_t* row_ids,  // [n] or null
                             uint64_t* bad) {   // has_key, key; or null
  const BucketTile tile;
  ForKeysAtOnce(n, [&](int64_t first, int count) {
    uint64_t key = 0;
    uint32_t row = kNoRow;
    if (tile.lane < count) {
      const int64_t i = first + tile.lane;
      key = keys[i];
      row = Search(table, key);
      if (rows != nullptr) rows[i] = row;
      if (row_ids != nullptr) row_ids[i] = row != kNoRow && row != kBadRow ? RowId(table, row) : -1;
      if (row == kBadRow && bad != nullptr && atomicExch(reinterpret_cast<unsigned long long*>(bad), 1ull) == 0) {
        bad[1] = key;
      }
    }
    if (out != nullptr) WriteRows<kFreshToo>(tile, table, key, row, count, out + first * table.dim);
  });
}

__global__ void FindIllegalKernel(const uint64_t* keys, int64_t n, uint64_t num_legal, uint64_t* illegal) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    if (keys[i] >= num_legal && atomicExch(reinterpret_cast<unsigned long long*>(illegal), 1ull) == 0) {
      illegal[1] = keys[i];
    }
  }
}

// leaders[i] of a key without a row: i for the one thread that put its row in use, another number for the rest.
__global__ void ClaimRowsKernel(uint64_t num_shards, const uint64_t* keys, int64_t n, uint32_t* in_use,
                                int64_t* num_in_use, uint32_t* rows, uint32_t* leaders) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    if (rows[i] != kNoRow) {
      leaders[i] = kNobody;
      continue;
    }
    const uint32_t row = static_cast<uint32_t>(keys[i] / num_shards), bit = 1u << (row & 31);
    const bool is_mine = (atomicOr(&in_use[row >> 5], bit) & bit) == 0;
    if (is_mine) atomicAdd(reinterpret_cast<unsigned long long*>(num_in_use), 1ull);
    rows[i] = row;
    leaders[i] = static_cast<uint32_t>(is_mine ? i : i + 1);
  }
}

// Where a key came new. Its values are a function of the key alone, so no position waits for another's record.
__global__ void FillNewKernel(TableView table, const uint64_t* keys, int64_t n, const uint32_t* rows,
                              const uint32_t* leaders, const float* defaults, int64_t num_defaults,
                              float* out,          // [n, dim] or null
                              int64_t* row_ids) {  // [n] or null
  const BucketTile tile;
  ForKeysAtOnce(n, [&](int64_t first, int count) {
    NewKey mine;
    if (tile.lane < count) {
      const int64_t i = first + tile.lane;
      mine = {keys[i], rows[i], leaders[i] != kNobody, leaders[i] == static_cast<uint32_t>(i)};
      if (mine.is_new && row_ids != nullptr) row_ids[i] = RowId(table, mine.row);
    }
    WriteNew(tile, table, mine, count, defaults, num_defaults, out == nullptr ? nullptr : out + first * table.dim);
  });
}

__global__ void StampNewKernel(const uint32_t* rows, const uint32_t* leaders, int64_t n, uint32_t calls,
                               uint32_t* stamps) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads())
    if (leaders[i] == static_cast<uint32_t>(i)) stamps[rows[i]] = calls;
}

__global__ void RowsOfIdsKernel(const int64_t* row_ids, int64_t n, const uint32_t* erasures, int64_t num_erasures,
                                int64_t num_rows, uint32_t* rows) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    const uint32_t row = static_cast<uint32_t>(row_ids[i]);
    const uint32_t erased = row < num_erasures ? erasures[row] & 0x7FFFFFFFu : 0;
    const bool is_there = row_ids[i] >= 0 && row < num_rows && static_cast<uint32_t>(row_ids[i] >> 32) == erased;
    rows[i] = is_there ? row : kNoRow;
  }
}

__global__ void EraseIdentityKernel(TableView table, const uint64_t* keys, int64_t n, uint32_t* in_use,
                                    int64_t* num_in_use, uint32_t* erased) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    erased[i] = kNoRow;
    if (keys[i] >= table.num_legal || table.partition.OwnerOf(keys[i]) != table.rank) continue;
    const uint32_t row = static_cast<uint32_t>(keys[i] / table.shards), bit = 1u << (row & 31);
    if ((atomicAnd(&in_use[row >> 5], ~bit) & bit) == 0) continue;
    erased[i] = row;
    atomicAdd(reinterpret_cast<unsigned long long*>(num_in_use), ~0ull);
  }
}

__global__ void CountErasuresKernel(const uint32_t* erased, int64_t n, uint32_t* erasures) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads())
    if (erased[i] != kNoRow) atomicAdd(&erasures[erased[i]], 1u);
}

__global__ void RowIdsKernel(TableView table, const uint32_t* rows, int64_t n, int64_t* row_ids) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) row_ids[i] = RowId(table, rows[i]);
}

// Leaves out what this call does not write, keys that are not ours and all but the last of equal keys; notes the rest.
__global__ void KeepLastKernel(const uint32_t* leaders, int64_t n, RowNotes notes, uint32_t* rows) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    if (rows[i] == kBadRow || leaders[i] != static_cast<uint32_t>(i)) {
      rows[i] = kNoRow;
    } else {
      notes.Note(rows[i]);
    }
  }
}

__global__ void NoteKernel(const uint32_t* rows, int64_t n, RowNotes notes) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads())
    if (rows[i] != kNoRow) notes.Note(rows[i]);
}

}  // namespace

// ---- the state

DeviceTable::State::State(TableConfig c, int64_t budget_bytes, DeviceAllocator* owner)
    : config([&c] {
        c.Check();
        return std::move(c);
      }()),
      memory(config.Label(), budget_bytes, owner),
      rows(config.dim, config.capacity, &memory),
      in_use(&memory),
      num_in_use(&memory),
      erasures(&memory),
      changes(&memory),
      initializer(sok::ViewOf(config.initializer)),
      bank(&memory),
      defaults(&memory),
      bad(&memory) {
  const Cuda cuda{};
  bad.Allocate(cuda, 1, "its status");
  SOK_CUDA(cudaMemsetAsync(bad.data(), 0, sizeof(Bad), cuda.stream));
  if (config.initializer.kind == InitKind::kOwn) {
    throw InvalidArgument(config.Label() + ": an initializer of your own runs on the CPU alone. Keep the table there.");
  }
  const std::vector<float>& values = config.initializer.bank;
  if (!values.empty()) {
    bank.Allocate(cuda, static_cast<int64_t>(values.size()), "the initializer's bank");
    SOK_CUDA(cudaMemcpyAsync(bank.data(), values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice,
                             cuda.stream));
    initializer.bank = bank.data();
  }
  if (config.hashed) {
    index = std::make_unique<DeviceHashTable>(config.Label(), config.capacity, &memory);
  } else {
    num_in_use.Allocate(cuda, 1, "its count");
    SOK_CUDA(cudaMemsetAsync(num_in_use.data(), 0, sizeof(int64_t), cuda.stream));
    in_use.Grow(cuda, (config.capacity + 31) / 32, 0, "which rows are in use");
  }
  rows.Reserve(cuda, config.hashed ? 0 : config.capacity);
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
}

DeviceTable::State::~State() { Ignore(cudaDeviceSynchronize()); }

int64_t DeviceTable::State::num_rows() const { return index ? index->rows_bound() : config.capacity; }

void DeviceTable::State::CheckCount(int64_t n) const {
  if (n < 0 || n >= INT64_C(0x7FFFFFFF)) {
    throw InvalidArgument(config.Label() +
                          ": takes fewer than 2^31 - 1 keys at a time. Received: " + std::to_string(n) + ".");
  }
}

void DeviceTable::State::FindRows(const Cuda& cuda, const uint64_t* keys, int64_t n, bool keep_bad, bool fresh_too,
                                  uint32_t* found, float* out, int64_t* row_ids) {
  Launch(fresh_too ? LookupKernel<true> : LookupKernel<false>, GridOfTiles((n + kKeysAtOnce - 1) / kKeysAtOnce),
         kThreads, 0, cuda, ViewOf(*this), keys, n, found, out, row_ids, keep_bad ? &bad.data()->has_key : nullptr);
}

void DeviceTable::State::InsertRows(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n,
                                    uint32_t* found, float* out, int64_t* row_ids, bool notes) {
  uint32_t* leaders = scratch->Get<uint32_t>(n);
  if (index) {
    index->InsertMissing(
        cuda, scratch, keys, n, found, leaders, room(), [&](int64_t bound) { MakeRoom(cuda, bound); },
        [&](uint64_t key) { config.ThrowFull(key); });
  } else {
    MakeRoom(cuda, config.capacity);
    Launch(ClaimRowsKernel, GridOf(n), kThreads, 0, cuda, static_cast<uint64_t>(config.partition().num_shards()), keys,
           n, in_use.data(), num_in_use.data(), found, leaders);
  }
  TableView view = ViewOf(*this);
  if (!notes) view.notes = {};
  Launch(FillNewKernel, GridOfTiles((n + kKeysAtOnce - 1) / kKeysAtOnce), kThreads, 0, cuda, view, keys, n, found,
         leaders, defaults.data(), defaults.size(), out, row_ids);
  for (const auto& set : sets) {
    if (set->decay == nullptr) continue;
    Launch(StampNewKernel, GridOf(n), kThreads, 0, cuda, found, leaders, n, static_cast<uint32_t>(set->decay->calls()),
           set->stamps.data());
  }
}

int64_t DeviceTable::State::room() const {
  int64_t room = rows.num_rows();
  for (const auto& set : sets) {
    if (set->decay != nullptr) room = std::min(room, set->stamps.capacity());
  }
  return changes.is_on() ? std::min(room, changes.capacity()) : room;
}

void DeviceTable::State::MakeRoom(const Cuda& cuda, int64_t bound) {
  rows.Reserve(cuda, bound);
  for (const auto& set : sets) {
    if (set->decay != nullptr) set->stamps.Grow(cuda, rows.num_rows(), rows.num_rows(), "an optimizer's stamps");
  }
  changes.MakeRoom(cuda, rows.num_rows());
  if (!holds_copies) return;
  erasures.Grow(cuda, rows.num_rows(), rows.num_rows(), "the counts of erasures");
  index->MakeFreeRoom(cuda, rows.num_rows());
}

void DeviceTable::State::RowsOfIds(const Cuda& cuda, const int64_t* row_ids, int64_t n, uint32_t* found) const {
  Launch(RowsOfIdsKernel, GridOf(n), kThreads, 0, cuda, row_ids, n, erasures.data(), erasures.capacity(), num_rows(),
         found);
}

void DeviceTable::State::ThrowIfIllegalToHost(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys,
                                              int64_t n) const {
  uint64_t* illegal = scratch->Get<uint64_t>(2);
  uint64_t on_host[2];
  SOK_CUDA(cudaMemsetAsync(illegal, 0, sizeof(on_host), cuda.stream));
  Launch(FindIllegalKernel, GridOf(n), kThreads, 0, cuda, keys, n, config.num_legal(), illegal);
  SOK_CUDA(cudaMemcpyAsync(on_host, illegal, sizeof(on_host), cudaMemcpyDeviceToHost, cuda.stream));
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  if (on_host[0] != 0) config.CheckKey(on_host[1]);
}

// ---- the table

DeviceTable::DeviceTable(TableConfig config, int64_t budget_bytes, DeviceAllocator* owner)
    : state_(std::make_unique<State>(std::move(config), budget_bytes, owner)) {}
DeviceTable::~DeviceTable() {
  if (state_ == nullptr) return;
  const HomeDevice::Visit visit(state_->home);
  state_.reset();
}

const TableConfig& DeviceTable::config() const { return state_->config; }
std::string DeviceTable::Label() const { return state_->config.Label(); }

void DeviceTable::Lookup(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, bool insert,
                         float* rows, int64_t* row_ids) {
  state_->CheckCount(n);
  if (!insert && !state_->HasDecay()) {
    const TableReading reading(state_.get(), cuda);
    return state_->FindRows(cuda, keys, n, true, true, nullptr, rows, row_ids);
  }
  const TableWriting writing(state_.get(), cuda);
  uint32_t* found = scratch->Get<uint32_t>(n);
  if (state_->HasDecay()) {  // what is read is settled first, once
    state_->FindRows(cuda, keys, n, false, false, found, nullptr, nullptr);
    state_->Settle(cuda, scratch, found, n);
  }
  state_->FindRows(cuda, keys, n, true, !insert, found, rows, row_ids);
  if (insert) state_->InsertRows(cuda, scratch, keys, n, found, rows, row_ids);
}

DeviceTable::Reading DeviceTable::Read(const Cuda& cuda) {
  auto lock = std::make_shared<TableReading>(state_.get(), cuda);
  return state_->ReadUnder(lock);
}

std::vector<DeviceTable::Reading> DeviceTable::ReadGroup(const Cuda& cuda, const std::vector<DeviceTable*>& tables) {
  std::vector<State*> states;
  for (DeviceTable* table : tables) states.push_back(table->state());
  auto lock = std::make_shared<TableReading>(states, cuda);
  std::vector<Reading> readings;
  for (const State* state : states) readings.push_back(state->ReadUnder(lock));
  return readings;
}

DeviceTable::Reading DeviceTable::State::ReadUnder(std::shared_ptr<void> lock) const {
  const uint64_t num_legal = config.hashed ? 0 : config.num_legal();
  const FreshRows fresh = {DeviceKeys(), initializer, config.partition(), config.rank, num_legal};
  return {rows.view(), num_rows(), fresh, std::move(lock)};
}

void DeviceTable::Assign(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, const float* rows, int64_t n) {
  state_->CheckCount(n);
  const TableWriting writing(state_.get(), cuda);
  state_->Store(cuda, scratch, keys, n, 0, state_->config.dim, rows);
}

void DeviceTable::State::Store(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n, int64_t first,
                               int64_t count, const float* values) {
  uint32_t* found = scratch->Get<uint32_t>(n);
  Place(cuda, scratch, keys, n, found);
  ScatterRecords(cuda, rows.view(), found, n, first, count, values);
}

void DeviceTable::State::Place(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n,
                               uint32_t* found, bool notes) {
  FindRows(cuda, keys, n, false, false, found, nullptr, nullptr);
  if (!config.hashed) ThrowIfIllegalToHost(cuda, scratch, keys, n);
  // Missed decay belongs to the old values: settled afterwards, it would move the new ones.
  Settle(cuda, scratch, found, n);
  InsertRows(cuda, scratch, keys, n, found, nullptr, nullptr, notes);
  const uint32_t* last = Elect<Speaker::kLast>(cuda, scratch, keys, n, nullptr, false, nullptr).leaders;
  Launch(KeepLastKernel, GridOf(n), kThreads, 0, cuda, last, n, notes ? changes.notes() : RowNotes(), found);
}

void DeviceTable::Erase(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n) {
  state_->CheckCount(n);
  const TableWriting writing(state_.get(), cuda);
  state_->Erase(cuda, scratch, keys, n);
}

void DeviceTable::State::Erase(const Cuda& cuda, DeviceScratch* scratch, const uint64_t* keys, int64_t n) {
  erasures.Grow(cuda, num_rows(), rows.num_rows(), "the counts of erasures");
  uint32_t* erased = scratch->Get<uint32_t>(n);
  if (index) {
    index->Erase(cuda, scratch, keys, n, erased);
  } else {
    Launch(EraseIdentityKernel, GridOf(n), kThreads, 0, cuda, ViewOf(*this), keys, n, in_use.data(), num_in_use.data(),
           erased);
  }
  Launch(CountErasuresKernel, GridOf(n), kThreads, 0, cuda, erased, n, erasures.data());
  changes.NoteErased(cuda, keys, erased, n);
}

int64_t DeviceTable::SizeToHost(const Cuda& cuda) {
  const TableWriting writing(state_.get(), cuda);
  return state_->index ? state_->index->SizeToHost(cuda) : state_->CountToHost(cuda);
}

void DeviceTable::Export(const Cuda& cuda, DeviceScratch* scratch, uint64_t* keys, int64_t* row_ids, int64_t n) {
  const TableReading reading(state_.get(), cuda);
  uint32_t* found = scratch->Get<uint32_t>(state_->num_rows());
  state_->List(cuda, scratch, 0, state_->num_rows(), keys, found);
  Launch(RowIdsKernel, GridOf(n), kThreads, 0, cuda, ViewOf(*state_), found, n, row_ids);
}

void DeviceTable::Weights(const Cuda& cuda, DeviceScratch* scratch, const int64_t* row_ids, int64_t n, float* rows) {
  state_->CheckCount(n);
  const TableWriting writing(state_.get(), cuda);
  uint32_t* found = scratch->Get<uint32_t>(n);
  state_->RowsOfIds(cuda, row_ids, n, found);
  state_->Settle(cuda, scratch, found, n);
  GatherRecords(cuda, state_->rows.view(), found, n, 0, state_->config.dim, rows);
}

void DeviceTable::SetWeights(const Cuda& cuda, DeviceScratch* scratch, const int64_t* row_ids, int64_t n,
                             const float* rows) {
  state_->CheckCount(n);
  const TableWriting writing(state_.get(), cuda);
  uint32_t* found = scratch->Get<uint32_t>(n);
  state_->RowsOfIds(cuda, row_ids, n, found);
  state_->Settle(cuda, scratch, found, n);  // missed decay belongs to the old values
  Launch(NoteKernel, GridOf(n), kThreads, 0, cuda, found, n, state_->changes.notes());
  ScatterRecords(cuda, state_->rows.view(), found, n, 0, state_->config.dim, rows);
}

void DeviceTable::Reserve(const Cuda& cuda, int64_t n, bool rows) {
  State& state = *state_;
  if (n < 0 || n > state.config.capacity) {
    throw InvalidArgument(Label() + ": can reserve 0 to " + std::to_string(state.config.capacity) +
                          " rows (its capacity). Received: " + std::to_string(n) + ".");
  }
  const TableWriting writing(state_.get(), cuda);
  if (state.index) state.index->Reserve(cuda, n);
  if (rows) state.MakeRoom(cuda, n);
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
}

int64_t DeviceTable::memory_bytes() const {
  std::shared_lock<std::shared_mutex> lock(state_->mutex);
  return state_->memory.in_use();
}

}  // namespace sok
