#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "detail/check.h"
#include "detail/growing_array.h"
#include "detail/home_device.h"
#include "detail/upload.h"
#include "sok/device_update.h"
#include "sok/error.h"

namespace sok {

struct DeviceDecay::Memory {
  explicit Memory(DeviceMemory* budget)
      : ready(budget != nullptr ? budget : &own),
        powers(budget != nullptr ? budget : &own),
        runs(budget != nullptr ? budget : &own) {}

  template <class T>
  static void MakeRoom(const Cuda& cuda, int64_t n, GrowingArray<T>* array) {
    array->Grow(cuda, n, 2 * n, "an optimizer's history of its calls");
  }

  // to[begin .. n) = from[begin .. n), in stream order; what lies before `begin` stays. `from` is read at once.
  template <class T>
  static void Write(const Cuda& cuda, const T* from, int64_t begin, int64_t n, GrowingArray<T>* to) {
    MakeRoom(cuda, n, to);
    if (begin < n) UploadTo(cuda, from + begin, n - begin, to->data() + begin);
  }

  HomeDevice home;
  DeviceMemory own{"an optimizer's history"};
  GrowingArray<Decay> ready;
  GrowingArray<DecayTerms> powers;
  GrowingArray<AlphaRun> runs;
  int64_t num_runs = 0;  // of those already there
  bool has_powers = false;
};

DeviceDecay::DeviceDecay(DeviceMemory* memory) : memory_(std::make_unique<Memory>(memory)) {}

DeviceDecay::~DeviceDecay() {
  if (memory_ == nullptr) return;
  const HomeDevice::Visit visit(memory_->home);
  Ignore(cudaDeviceSynchronize());
  memory_.reset();
}

void DeviceDecay::MoveTo(DeviceMemory* memory) {
  memory_->ready.MoveTo(memory);
  memory_->powers.MoveTo(memory);
  memory_->runs.MoveTo(memory);
}

bool DeviceDecay::SetRule(const UpdateRule& rule, bool anew) {
  if (!rule.decays()) throw InvalidArgument("rule '" + std::string(RuleName(rule.rule)) + "' does not decay.");
  const bool same_model = has_rule_ && rule.model() == rule_.model();
  rule_ = rule;
  has_rule_ = true;
  if (same_model && !anew) return false;
  sums_.reset();
  memory_->has_powers = false;
  if (DecaySums::Fits(rule)) {
    sums_ = std::make_unique<DecaySums>(rule);
    const int64_t first = std::max<int64_t>(0, history_.calls() - sums_->length()) + 1;
    AlphaCursor cursor(history_.view(), first);
    for (int64_t call = first; call <= history_.calls(); ++call) sums_->Append(cursor.Next());
  }
  return true;
}

DecayArgs DeviceDecay::Begin(const Cuda& cuda, const UpdateRule& rule, uint32_t* stamps) {
  if (SetRule(rule, /*anew=*/false)) Upload(cuda);
  // What Append will write: when rows have changed, nothing may fail any more.
  Memory::MakeRoom(cuda, memory_->num_runs + 1, &memory_->runs);
  if (sums_) {
    const DecayView view = sums_->view(history_);
    Memory::MakeRoom(cuda, view.num_ready + 1, &memory_->ready);
    Memory::MakeRoom(cuda, view.length + 1, &memory_->powers);
  }
  return args(stamps);
}

void DeviceDecay::Append(const Cuda& cuda, const UpdateRule& rule, const std::vector<AlphaHistory::Run>& runs,
                         int64_t calls) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const int64_t end = i + 1 < runs.size() ? runs[i + 1].first_call : calls + 1;
    history_.Append(runs[i].missed(), end - runs[i].first_call);
  }
  SetRule(rule, /*anew=*/true);
  Upload(cuda);
}

void DeviceDecay::Append(const Cuda& cuda) {
  history_.Append(rule_.missed);
  if (sums_) sums_->Append(rule_.missed);
  Upload(cuda);
}

void DeviceDecay::Upload(const Cuda& cuda) {
  const AlphaView alphas = history_.view();
  Memory::Write(cuda, alphas.runs, memory_->num_runs, alphas.num_runs, &memory_->runs);
  memory_->num_runs = alphas.num_runs;
  if (!sums_) return;
  const DecayView view = sums_->view(history_);
  Memory::Write(cuda, view.ready, 0, view.num_ready, &memory_->ready);
  Memory::Write(cuda, view.powers, memory_->has_powers ? view.length + 1 : 0, view.length + 1, &memory_->powers);
  memory_->has_powers = true;
}

DecayArgs DeviceDecay::args(uint32_t* stamps) const {
  DecayArgs args;
  args.stamps = stamps;
  args.calls = history_.calls();
  args.max_alpha = history_.max_alpha();
  args.is_closed_form = sums_ != nullptr;
  if (sums_) args.view = sums_->view(history_);
  args.view.model = rule_.model();
  args.view.ready = memory_->ready.data();
  args.view.powers = memory_->powers.data();
  args.view.alphas = {memory_->runs.data(), memory_->num_runs};
  return args;
}

}  // namespace sok
