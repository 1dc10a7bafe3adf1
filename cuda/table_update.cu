// DeviceTable: gradients to rows, and the slots of optimizers.
#include <algorithm>
#include <set>
#include <vector>

#include "detail/launch.h"
#include "detail/slot_set.h"
#include "detail/table_state.h"
#include "sok/error.h"

namespace sok {
namespace {

__global__ void RowNumbersKernel(const uint32_t* rows, int64_t n, int64_t* row_numbers) {
  for (int64_t i = GlobalThread(); i < n; i += GlobalThreads())
    row_numbers[i] = rows[i] >= kBadRow ? -1 : static_cast<int64_t>(rows[i]);
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

void DeviceTable::State::CheckRule(const SlotSet& set, const UpdateRule& rule) const {
  if (set.rule.rule == rule.rule) return;
  throw InvalidArgument(config.Label() + ": slot set '" + set.name +
                        "' belongs to another rule. Give each optimizer its own name.");
}

DeviceTable::State::SlotSet* DeviceTable::State::FindOrAttach(const Cuda& cuda, const UpdateRule& rule,
                                                              const std::string& slot_set) {
  if (SlotSet* known = FindSet(slot_set)) {
    CheckRule(*known, rule);
    known->rule = rule;
    return known;
  }
  if (rule.is_named()) {
    throw InvalidArgument(config.Label() + " is on a GPU, where the slots of '" + RuleName(rule.rule) +
                          "' cannot lie. Restore without slots, or make the table under tf.device('CPU:0').");
  }
  auto set = std::make_unique<SlotSet>(&memory);
  set->name = slot_set;
  set->rule = rule;
  if (rule.decays()) {
    set->decay = std::make_unique<DeviceDecay>(&memory);
    set->stamps.Grow(cuda, rows.num_rows(), rows.num_rows(), "an optimizer's stamps");
  }
  sets.reserve(sets.size() + 1);
  const int64_t count = rule.slot_floats(config.dim);
  if (count > 0) {
    // What a fresh row's slots hold is one stretch behind the weights; longer, before the records are.
    DeviceBlock<float> longer(&memory);
    longer.Allocate(cuda, defaults.size() + count, "what fresh slots hold");
    if (defaults.size() > 0) {
      SOK_CUDA(cudaMemcpyAsync(longer.data(), defaults.data(), static_cast<size_t>(defaults.size()) * sizeof(float),
                               cudaMemcpyDeviceToDevice, cuda.stream));
    }
    std::vector<float> fresh(static_cast<size_t>(count));
    rule.FillSlots(config.dim, fresh.data());
    float* const added = longer.data() + defaults.size();
    SOK_CUDA(cudaMemcpyAsync(added, fresh.data(), fresh.size() * sizeof(float), cudaMemcpyHostToDevice, cuda.stream));
    SOK_CUDA(cudaStreamSynchronize(cuda.stream));
    set->offset = rows.AddFloats(cuda, count, added);
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
    if (set->decay == nullptr || set->decay->calls() == 0 || num_rows() == 0) continue;
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
  const Gradients gradients = {this, row_ids, grads, n, num_grads};
  ApplyGroup(cuda, scratch, rule, slot_set, nonfinite, grad_scale, &gradients, 1);
}

void DeviceTable::ApplyGroup(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule,
                             const std::string& slot_set, Nonfinite nonfinite, float grad_scale,
                             const Gradients* gradients, int64_t num_tables) {
  if (num_tables == 0) return;
  std::vector<State*> states;
  std::set<const State*> seen;
  for (int64_t t = 0; t < num_tables; ++t) {
    State* state = gradients[t].table->state();
    state->CheckCount(gradients[t].n);
    if (!seen.insert(state).second)
      throw InvalidArgument(state->config.Label() + ": gradients given twice in one call.");
    states.push_back(state);
  }
  const TableWriting writing(states, cuda);
  const bool is_check = slot_set.empty();
  for (State* state : states) {
    const State::SlotSet* known = state->FindSet(slot_set);
    if (known != nullptr) state->CheckRule(*known, rule);
  }
  std::vector<State::SlotSet*> sets;
  for (State* state : states) sets.push_back(is_check ? nullptr : state->FindOrAttach(cuda, rule, slot_set));
  const size_t m = static_cast<size_t>(num_tables);
  std::vector<DeviceUpdate> updates(m);
  std::vector<DeviceGradients> all(m);
  uint64_t* first_bad = scratch->Get<uint64_t>(num_tables + 1);  // of each table, and of all
  SOK_CUDA(cudaMemsetAsync(first_bad, 0xFF, (m + 1) * sizeof(uint64_t), cuda.stream));
  for (size_t t = 0; t < m; ++t) {
    const State& state = *states[t];
    DeviceUpdate& update = updates[t];
    update.rows = state.rows.view();
    update.num_rows = state.num_rows();
    update.slot_offset = is_check ? 0 : sets[t]->offset;
    update.notes = is_check ? RowNotes{} : state.changes.notes();
    if (rule.decays()) update.decay = sets[t]->decay->Begin(cuda, rule, sets[t]->stamps.data());
    update.erasures = state.erasures.data();
    update.num_erasures = state.erasures.capacity();
    update.bad = state.bad.data();
    const Gradients& g = gradients[t];
    all[t] = {g.row_ids, g.grads, g.n, g.num_grads, state.config.dim, nullptr, static_cast<int64_t>(t), first_bad + t};
  }
  UpdateRows(cuda, scratch, rule, updates.data(), num_tables, all.data(), num_tables, FloatType::kFloat32, grad_scale,
             nonfinite, first_bad + m);
  if (!rule.decays()) return;
  if (nonfinite == Nonfinite::kRaise) {
    // A call that was refused must not count.
    uint64_t bad = kNothingBad;
    SOK_CUDA(cudaMemcpyAsync(&bad, first_bad + m, sizeof(bad), cudaMemcpyDeviceToHost, cuda.stream));
    SOK_CUDA(cudaStreamSynchronize(cuda.stream));
    if (bad != kNothingBad) return;
  }
  for (State::SlotSet* set : sets) set->decay->Append(cuda);
}

void DeviceTable::AssignSlots(const Cuda& cuda, DeviceScratch* scratch, const UpdateRule& rule,
                              const std::string& slot_set, const uint64_t* keys, const float* slots, int64_t n) {
  state_->CheckCount(n);
  const TableWriting writing(state_.get(), cuda);
  const State::SlotSet* set = state_->FindOrAttach(cuda, rule, slot_set);
  state_->Store(cuda, scratch, keys, n, set->offset, rule.slot_floats(state_->config.dim), slots);
}

void DeviceTable::Slots(const Cuda& cuda, DeviceScratch* scratch, const std::string& slot_set, const int64_t* row_ids,
                        int64_t n, float* slots) {
  state_->CheckCount(n);
  const TableWriting writing(state_.get(), cuda);
  const State::SlotSet& set = state_->RequireSet(slot_set);
  uint32_t* found = scratch->Get<uint32_t>(n);
  state_->RowsOfIds(cuda, row_ids, n, found);
  state_->Settle(cuda, scratch, found, n);
  GatherRecords(cuda, state_->rows.view(), found, n, set.offset, set.rule.slot_floats(state_->config.dim), slots);
}

int64_t DeviceTable::SlotFloats(const std::string& slot_set) {
  std::shared_lock<std::shared_mutex> lock(state_->mutex);
  return state_->RequireSet(slot_set).rule.slot_floats(state_->config.dim);
}

}  // namespace sok
