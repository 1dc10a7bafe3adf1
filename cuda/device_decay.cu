#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "detail/check.h"
#include "detail/home_device.h"
#include "detail/upload.h"
#include "sok/device_update.h"
#include "sok/error.h"

namespace sok {
struct DeviceDecay::Memory {
  // An array that grows, and is written, in stream order.
  template <class T>
  class Array {
   public:
    Array() = default;
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() {
      if (data_ == nullptr) return;
      static_cast<void>(cudaDeviceSynchronize());
      static_cast<void>(cudaFree(data_));
    }

    // data()[begin .. n) = from[begin .. n); what lies before `begin` stays. `from` is read at once.
    void Write(const Cuda& cuda, const T* from, int64_t begin, int64_t n) {
      if (n > capacity_) {
        const int64_t capacity = std::max(n, 2 * capacity_);
        T* wider = nullptr;
        SOK_CUDA(
            cudaMallocAsync(reinterpret_cast<void**>(&wider), static_cast<size_t>(capacity) * sizeof(T), cuda.stream));
        if (data_ != nullptr) SOK_CUDA(cudaFreeAsync(data_, cuda.stream));
        data_ = wider;
        capacity_ = capacity;
        begin = 0;
      }
      if (begin < n) UploadTo(cuda, from + begin, n - begin, data_ + begin);
    }

    const T* data() const { return data_; }

   private:
    T* data_ = nullptr;
    int64_t capacity_ = 0;
  };

  HomeDevice home;
  Array<Decay> ready;
  Array<DecayTerms> powers;
  Array<AlphaRun> runs;
  int64_t num_runs = 0;  // of those already there
  bool has_powers = false;
};

DeviceDecay::DeviceDecay() : memory_(std::make_unique<Memory>()) {}

DeviceDecay::~DeviceDecay() {
  if (memory_ == nullptr) return;
  const HomeDevice::Visit visit(memory_->home);
  memory_.reset();
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
  memory_->runs.Write(cuda, alphas.runs, memory_->num_runs, alphas.num_runs);
  memory_->num_runs = alphas.num_runs;
  if (!sums_) return;
  const DecayView view = sums_->view(history_);
  memory_->ready.Write(cuda, view.ready, 0, view.num_ready);
  memory_->powers.Write(cuda, view.powers, memory_->has_powers ? view.length + 1 : 0, view.length + 1);
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
