// DeviceTable: whole tables, in and out.
#include <cuda_runtime.h>

#include <mutex>
#include <utility>

#include "detail/launch.h"
#include "detail/primitives.h"
#include "detail/slot_set.h"
#include "detail/table_state.h"
#include "sok/error.h"

namespace sok {
namespace {

__global__ void UsedKernel(const uint32_t* in_use, int64_t first, int64_t count, RowFilter filter, uint32_t* is_used) {
  for (int64_t i = GlobalThread(); i <= count; i += GlobalThreads()) {
    const bool is_listed = i < count && filter.Has(first + i);
    is_used[i] = is_listed ? (in_use[(first + i) >> 5] >> ((first + i) & 31)) & 1 : 0;
  }
}

__global__ void PackIdentityKernel(const uint32_t* is_used, const uint32_t* before, int64_t first, int64_t count,
                                   uint64_t shards, uint64_t first_key, uint64_t* keys, uint32_t* rows) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    if (is_used[i] == 0) continue;
    keys[before[i]] = static_cast<uint64_t>(first + i) * shards + first_key;
    rows[before[i]] = static_cast<uint32_t>(first + i);
  }
}

__global__ void AddOneKernel(uint32_t* counts, int64_t n) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) ++counts[i];
}

// Whether nobody was ever given a row id of this table.
bool IsUntouched(const Cuda& cuda, const DeviceTable::State& state) {
  if (state.erasures.capacity() > 0) return false;
  return state.index ? state.num_rows() == 0 : state.CountToHost(cuda) == 0;
}

}  // namespace

int64_t DeviceTable::State::CountToHost(const Cuda& cuda) const {
  if (index) return index->CountToHost(cuda);
  int64_t size = 0;
  SOK_CUDA(cudaMemcpyAsync(&size, num_in_use.data(), sizeof(size), cudaMemcpyDeviceToHost, cuda.stream));
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  return size;
}

const uint32_t* DeviceTable::State::List(const Cuda& cuda, DeviceScratch* scratch, int64_t first, int64_t count,
                                         uint64_t* keys, uint32_t* found, const RowFilter& filter) const {
  if (index) return index->Export(cuda, scratch, first, count, keys, found, filter);
  const uint64_t shards = static_cast<uint64_t>(config.partition().num_shards());
  uint32_t* is_used = scratch->Get<uint32_t>(count + 1);  // and a last one that is not
  uint32_t* before = scratch->Get<uint32_t>(count + 1);
  Launch(UsedKernel, GridFor(count + 1, kThreads), kThreads, 0, cuda, in_use.data(), first, count, filter, is_used);
  ExclusiveSum(cuda, scratch, is_used, before, count + 1);
  Launch(PackIdentityKernel, GridFor(count, kThreads), kThreads, 0, cuda, is_used, before, first, count, shards,
         shards > 1 ? static_cast<uint64_t>(config.rank) : 0, keys, found);
  return before + count;
}

void DeviceTable::State::CheckRules(const std::vector<TableStore::SlotSetInfo>& infos) {
  for (const TableStore::SlotSetInfo& info : infos) {
    const SlotSet* known = FindSet(info.name);
    if (known == nullptr || known->rule.rule == info.rule.rule) continue;
    throw InvalidArgument(config.Label() + ": slot set '" + info.name + "' belongs to rule '" +
                          RuleName(known->rule.rule) + "' here, and to '" + RuleName(info.rule.rule) +
                          "' in what is restored.");
  }
}

void DeviceTable::State::SkipCalls(const Cuda& cuda, const std::string& save,
                                   const std::vector<TableStore::SlotSetInfo>& infos) {
  constexpr int64_t kMaxCalls = UINT32_MAX - 2;  // what a stamp can hold
  CheckRules(infos);
  for (const TableStore::SlotSetInfo& info : infos) {
    SlotSet* set = FindSet(info.name);
    if (set == nullptr) set = FindOrAttach(cuda, info.rule, info.name);
    if (!info.rule.decays()) continue;
    // Ranks may number their calls from different beginnings: what counts is how many there were, and their alphas.
    std::vector<AlphaRun> runs{{info.num_missed(), 0.0f}};
    for (const AlphaRun& run : info.missed)
      runs.push_back({run.first_call - info.missed[0].first_call, run.alpha, run.extra});
    if (set->skipped_save == save && !save.empty()) {
      if (set->skipped == runs) continue;
      throw InvalidArgument(config.Label() + ": two files of the save " + save + " disagree about the steps of '" +
                            info.name + "'.");
    }
    if (info.num_missed() > kMaxCalls - set->decay->calls()) {
      throw InvalidArgument(config.Label() + ": " + std::to_string(info.num_missed()) + " more calls of '" + info.name +
                            "' are more than can be counted.");
    }
    set->rule = info.rule;
    set->decay->Append(cuda, info.rule, info.missed, info.calls);
    set->skipped_save = save;
    set->skipped = std::move(runs);
  }
}

void DeviceTable::Swap(const Cuda& cuda, DeviceTable* other) {
  if (other == this) return;
  const TableConfig &a = config(), &b = other->config();
  if (a.dim != b.dim || a.capacity != b.capacity || a.hashed != b.hashed || a.is_unsigned != b.is_unsigned ||
      a.world_size != b.world_size || a.rank != b.rank || a.owner != b.owner || a.num_keys != b.num_keys) {
    throw InvalidArgument(Label() + " and " + other->Label() + " are configured differently: they cannot swap rows.");
  }
  // In one order for all threads.
  State* states[2] = {state_.get(), other->state_.get()};
  if (states[1] < states[0]) std::swap(states[0], states[1]);
  State &mine = *states[0], &theirs = *states[1];
  const TableWriting first(&mine, cuda), second(&theirs, cuda);
  for (const State* state : states) {
    if (!state->has_snapshot) continue;
    throw FailedPrecondition(state->config.Label() + ": an asynchronous save is under way. Wait for its result first.");
  }
  for (State* state : states) {
    // Counts of erasures stay with the table and go up for every row: ids given so far then mean rows that are gone.
    if (!IsUntouched(cuda, *state)) {
      state->erasures.Grow(cuda, state->num_rows(), state->rows.num_rows(), "the counts of erasures");
    }
  }
  for (State* state : states) {
    const int64_t n = state->erasures.capacity();
    Launch(AddOneKernel, GridFor(n, kThreads), kThreads, 0, cuda, state->erasures.data(), n);
  }
  SOK_CUDA(cudaStreamSynchronize(cuda.stream));
  for (State* state : states) state->changes.TurnOff();
  auto stays = [](const State& state) {
    return state.bank.bytes() + state.bad.bytes() + state.erasures.capacity() * static_cast<int64_t>(sizeof(uint32_t));
  };
  mine.memory.Swap(&theirs.memory, stays(mine), stays(theirs));
  mine.rows.Swap(&theirs.rows);
  if (mine.index) mine.index->Swap(theirs.index.get());
  mine.in_use.Swap(&theirs.in_use);
  mine.num_in_use.Swap(&theirs.num_in_use);
  mine.defaults.Swap(&theirs.defaults);
  mine.sets.swap(theirs.sets);
  for (State* state : states)
    for (const auto& set : state->sets) set->MoveTo(&state->memory);
}

}  // namespace sok
