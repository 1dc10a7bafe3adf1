// How calls on several streams keep out of each other's way.
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "detail/slot_set.h"
#include "detail/table_state.h"

namespace sok {
namespace {

using States = std::vector<DeviceTable::State*>;

States InOrder(States states) {
  std::sort(states.begin(), states.end());
  states.erase(std::unique(states.begin(), states.end()), states.end());
  return states;
}

// Events that nobody holds, of each device. Never destroyed: when the process ends, CUDA may be gone before this is.
struct Idle {
  std::mutex mutex;
  std::map<int, std::vector<std::unique_ptr<Event>>> of_device;
};
Idle& AllIdle() {
  static Idle& idle = *new Idle;
  return idle;
}

// For the `reads` of all tables. Held from a mark to where it is noted, so that of two calls on one stream the later mark stays.
std::mutex& ReadsMutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

// The read of the stream, or null. The caller has ReadsMutex.
DeviceTable::State::Read* FindRead(DeviceTable::State* state, cudaStream_t stream) {
  for (auto& read : state->reads)
    if (read.stream == stream) return &read;
  return nullptr;
}

}  // namespace

std::shared_ptr<Event> TakeEvent() {
  int device = 0;
  SOK_CUDA(cudaGetDevice(&device));
  auto give_back = [device](Event* event) {
    std::unique_ptr<Event> idle(event);
    const std::lock_guard<std::mutex> lock(AllIdle().mutex);
    AllIdle().of_device[device].push_back(std::move(idle));
  };
  {
    const std::lock_guard<std::mutex> lock(AllIdle().mutex);
    auto& idle = AllIdle().of_device[device];
    if (!idle.empty()) {
      std::shared_ptr<Event> event(idle.back().release(), give_back);
      idle.pop_back();
      return event;
    }
  }
  return {new Event, give_back};
}

TableReading::TableReading(States states, const Cuda& cuda)
    : states_(InOrder(std::move(states))), cuda_(cuda), done_(TakeEvent()) {
  std::set<const Event*> before;
  for (DeviceTable::State* state : states_) {
    locks_.emplace_back(state->mutex);
    const Event* written = state->written.get();
    if (written != nullptr && before.insert(written).second) written->Before(cuda);
    const std::lock_guard<std::mutex> lock(ReadsMutex());
    if (FindRead(state, cuda.stream) == nullptr) state->reads.push_back({cuda.stream, nullptr});
  }
}

TableReading::~TableReading() {
  const HomeDevice::Visit visit(home_);  // whoever holds it may let go of it on any thread
  const std::lock_guard<std::mutex> lock(ReadsMutex());
  try {
    done_->Record(cuda_);
  } catch (const std::exception&) {  // nobody could wait for us: then we wait ourselves
    Ignore(cudaStreamSynchronize(cuda_.stream));
    return;
  }
  for (DeviceTable::State* state : states_) FindRead(state, cuda_.stream)->done = done_;
}

TableWriting::TableWriting(States states, const Cuda& cuda)
    : states_(InOrder(std::move(states))), cuda_(cuda), done_(TakeEvent()) {
  std::set<const Event*> before;
  auto wait_for = [&](const std::shared_ptr<Event>& event) {
    if (event != nullptr && before.insert(event.get()).second) event->Before(cuda);
  };
  for (DeviceTable::State* state : states_) {
    locks_.emplace_back(state->mutex);
    wait_for(state->written);
    for (const auto& read : state->reads) wait_for(read.done);
  }
  for (DeviceTable::State* state : states_) state->reads.clear();
}

TableWriting::~TableWriting() {
  try {
    done_->Record(cuda_);
  } catch (const std::exception&) {
    Ignore(cudaStreamSynchronize(cuda_.stream));
    return;  // and what was written before is waited for as it was
  }
  for (DeviceTable::State* state : states_) state->written = done_;
}

}  // namespace sok
