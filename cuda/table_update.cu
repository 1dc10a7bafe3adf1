// DeviceTable: gradients to rows, and the slots of optimizers.
#include <algorithm>

#include "detail/launch.h"
#include "detail/slot_set.h"
#include "detail/table_state.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int kThreads = 256;

// The row numbers of row ids; -1 where the row was erased since. Numbers that were never given stay, for UpdateRows to report.
__global__ void DropErasedKernel(const int64_t* row_ids, int64_t n, const uint32_t* erasures, int64_t num_erasures,
                                 int64_t* rows) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) {
    const int64_t id = row_ids[i];
    const uint32_t row = static_cast<uint32_t>(id), generation = static_cast<uint32_t>(id >> 32);
    const uint32_t erased = row < num_erasures ? erasures[row] & 0x7FFFFFFFu : 0;
    // More erasures than there were: not an id of this table.
    rows[i] = id < 0 || generation < erased ? -1 : (generation > erased ? INT64_MAX : static_cast<int64_t>(row));
  }
}

// Keeps what UpdateRows found bad, if nothing was kept before: its arrays will be gone when somebody asks.
__global__ void KeepBadKernel(const uint64_t* first_bad, const int64_t* row_ids, const int64_t* rows, int64_t num_rows,
                              DeviceTable::State::Bad* bad) {
  if (*first_bad == kNothingBad || bad->has_gradient != 0) return;
  const int64_t row = rows[*first_bad];
  bad->has_gradient = row < 0 || row >= num_rows ? DeviceTable::State::kUnknownRow : DeviceTable::State::kNotFinite;
  bad->position = *first_bad;
  bad->row_id = static_cast<uint64_t>(row_ids[*first_bad]);
}

__global__ void RowNumbersKernel(const uint32_t* rows, int64_t n, int64_t* row_numbers) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads())
    row_numbers[i] = rows[i] >= kBadRow ? -1 : static_cast<int64_t>(rows[i]);
}

__global__ void FillKernel(float* values, int64_t n, float value) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads()) values[i] = value;
}

}  // namespace

bool DeviceTable::State::HasDecay() const {
  return std::any_of(sets.begin(), sets.end(), [](const auto& set) { return set->decay != nullptr; });
}

DeviceTable::State::SlotSet* DeviceTable::State::FindSet(const std::string& slot_set) {
  for (const auto& set : sets)
    if (set->name == slot_set) return set.get();
  return nullptr;
}

DeviceTable::State::SlotSet& DeviceTable::State::RequireSet(const std::string& slot_set) {
  SlotSet* found = FindSet(slot_set);
  if (found != nullptr) return *found;
  std::string known;
  for (const auto& set : sets) known += (known.empty() ? "'" : ", '") + set->name + "'";
  throw FailedPrecondition(config.Label() + ": no optimizer has used slot set '" + slot_set +
                           "' yet. Known: " + (known.empty() ? "none" : known) + ".");
}

DeviceTable::State::SlotSet* DeviceTable::State::FindOrAttach(const Cuda& cuda, const UpdateRule& rule,
                                                              const std::string& slot_set) {
  if (SlotSet* known = FindSet(slot_set)) {
    if (known->rule.rule != rule.rule) {
      throw InvalidArgument(config.Label() + ": slot set '" + slot_set +
                            "' belongs to another rule. Give each optimizer its own name.");
    }
    known->rule = rule;
    return known;
  }
  auto set = std::make_unique<SlotSet>(&memory);
  set->name = slot_set;
  set->rule = rule;
  if (rule.decays()) {
    set->decay = std::make_unique<DeviceDecay>();
    set->stamps.Grow(cuda, rows.num_rows(), rows.num_rows(), "an optimizer's stamps");
  }
  sets.reserve(sets.size() + 1);
  const int64_t count = rule.num_slots() * config.dim;
  if (count > 0) {
    // What a fresh row's slots hold is one stretch behind the weights; longer, before the records are.
    DeviceBlock<float> longer(&memory);
    longer.Allocate(defaults.size() + count, "what fresh slots hold");
    set->offset = rows.AddFloats(cuda, count, rule.slot_init);
    if (defaults.size() > 0) {
      SOK_CUDA(cudaMemcpyAsync(longer.data(), defaults.data(), static_cast<size_t>(defaults.size()) * sizeof(float),
                               cudaMemcpyDeviceToDevice, cuda.stream));
    }
    Launch(FillKernel, GridFor(count, kThreads), kThreads, 0, cuda, longer.data() + defaults.size(), count,
           rule.slot_init);
    SOK_CUDA(cudaStreamSynchronize(cuda.stream));
    defaults.Swap(&longer);
  }
  sets.push_back(std::move(set));
  return sets.back().get();
}

void DeviceTable::State::Settle(const Cuda& cuda, DeviceScratch* scratch, const uint32_t* found, int64_t n) {
  if (!HasDecay()) return;
  int64_t* row_numbers = scratch->Get<int64_t>(n);
  Launch(RowNumbersKernel, GridFor(n, kThreads), kThreads, 0, cuda, found, n, row_numbers);
  for (const auto& set : sets) {
    if (set->decay == nullptr || set->decay->calls() == 0) continue;
    DeviceUpdate update;
    update.rows = rows.view();
    update.num_rows = num_rows();
    update.slot_offset = set->offset;
    update.decay = set->decay->args(set->stamps.data());
    SettleRows(cuda, set->rule, update, row_numbers, n, config.dim);
  }
}

void DeviceTable::Apply(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule, const std::string& slot_set,
                        Nonfinite nonfinite, float grad_scale, const int64_t* row_ids, const float* grads, int64_t n,
                        const int64_t* num_grads) {
  State& state = *state_;
  state.CheckCount(n);
  const TableWriting writing(state_.get(), cuda);
  State::SlotSet* set = state.FindOrAttach(cuda, rule, slot_set);
  int64_t* rows = scratch->Get<int64_t>(n);
  Launch(DropErasedKernel, GridFor(n, kThreads), kThreads, 0, cuda, row_ids, n, state.erasures.data(),
         state.erasures.capacity(), rows);
  DeviceUpdate update;
  update.rows = state.rows.view();
  update.num_rows = state.num_rows();
  update.slot_offset = set->offset;
  update.notes = state.changes.notes();
  if (set->decay != nullptr) update.decay = set->decay->Begin(cuda, rule, set->stamps.data());
  uint64_t* first_bad = scratch->Get<uint64_t>(1);
  SOK_CUDA(cudaMemsetAsync(first_bad, 0xFF, sizeof(uint64_t), cuda.stream));
  UpdateRows(cuda, scratch, rule, &update, 1, nullptr, rows, grads, FloatType::kFloat32, n, num_grads, state.config.dim,
             grad_scale, nonfinite, first_bad);
  bool counts = true;
  if (set->decay != nullptr && nonfinite == Nonfinite::kRaise) {
    // A call that was refused must not count.
    uint64_t bad = kNothingBad;
    SOK_CUDA(cudaMemcpyAsync(&bad, first_bad, sizeof(bad), cudaMemcpyDeviceToHost, cuda.stream));
    SOK_CUDA(cudaStreamSynchronize(cuda.stream));
    counts = bad == kNothingBad;
  }
  if (set->decay != nullptr && counts) set->decay->Append(cuda);
  Launch(KeepBadKernel, 1, 1, 0, cuda, first_bad, row_ids, rows, update.num_rows, state.bad.data());
}

void DeviceTable::AssignSlots(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule,
                              const std::string& slot_set, const uint64_t* keys, const float* slots, int64_t n) {
  state_->CheckCount(n);
  const TableWriting writing(state_.get(), cuda);
  const State::SlotSet* set = state_->FindOrAttach(cuda, rule, slot_set);
  state_->Store(cuda, scratch, keys, n, set->offset, rule.num_slots() * state_->config.dim, slots);
}

void DeviceTable::Slots(const Cuda& cuda, DeviceScratch* scratch, const std::string& slot_set, const int64_t* row_ids,
                        int64_t n, float* slots) {
  state_->CheckCount(n);
  const TableWriting writing(state_.get(), cuda);
  const State::SlotSet& set = state_->RequireSet(slot_set);
  uint32_t* found = scratch->Get<uint32_t>(n);
  state_->RowsOfIds(cuda, row_ids, n, found);
  state_->Settle(cuda, scratch, found, n);
  GatherRecords(cuda, state_->rows.view(), found, n, set.offset, set.rule.num_slots() * state_->config.dim, slots);
}

int64_t DeviceTable::SlotFloats(const std::string& slot_set) {
  std::shared_lock<std::shared_mutex> lock(state_->mutex);
  return state_->RequireSet(slot_set).rule.num_slots() * state_->config.dim;
}

}  // namespace sok
