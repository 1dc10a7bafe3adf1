// The same table as a TableStore: what the device has changed comes home, and the host's table is asked.
#include <algorithm>
#include <exception>
#include <utility>

#include "sok/device_tier.h"
#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kLostAtMost = int64_t{1} << 16;  // rows that have left, until the device forgets that they did

const SerialExecutor serial;

}  // namespace

template <class Call>
auto DeviceTier::OfHost(const Call& call) -> decltype(call()) {
  struct Dropping {
    DeviceTier* tier;
    ~Dropping() {
      try {
        tier->DropLost();
      } catch (const std::exception&) {  // no lookup finds rows before it has been done
      }
    }
  } dropping{this};
  return call();
}

void DeviceTier::EndStep(const Cpu& cpu) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_began_ = call_ + 1;
  try {
    if (host_->ReadsRowsAtEndOf(step + 1) || host_->HasStepToEnd() || dropped_ > kLostAtMost) {
      try {
        WriteHome(cpu);
      } catch (const InvalidArgument&) {  // what an update could not say: it is no reason not to end the step
        const std::exception_ptr said = std::current_exception();
        WriteHome(cpu);
        untold_ = said;
      }
    }
  } catch (const std::exception&) {
    return host_->EndStepLater();  // one worker alone must not leave the others in a step that it has not ended
  }
  OfHost([&] { host_->EndStep(cpu); });
}

int64_t DeviceTier::size() const { return host_->size(); }
std::vector<uint64_t> DeviceTier::Keys() const { return host_->Keys(); }
int64_t DeviceTier::SlotFloats(const std::string& slot_set) const { return host_->SlotFloats(slot_set); }
std::vector<TableStore::SlotSetInfo> DeviceTier::SlotSets() const { return host_->SlotSets(); }
PolicyCounts DeviceTier::policy_counts() const { return host_->policy_counts(); }
int64_t DeviceTier::collisions() const { return host_->collisions(); }
void DeviceTier::EndSave(const std::string& base) { host_->EndSave(base); }
void DeviceTier::ReadSnapshot(const Cpu& cpu, RowSink* sink) { host_->ReadSnapshot(cpu, sink); }

void DeviceTier::Export(const Cpu& cpu, const std::string& slot_set,
                        const std::function<ExportTarget(int64_t, int64_t)>& allocate) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome(cpu);
  host_->Export(cpu, slot_set, allocate);
}

void DeviceTier::Slots(const std::string& slot_set, const uint64_t* keys, int64_t n, float* slots,
                       int64_t* stamps) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome({serial});
  host_->Slots(slot_set, keys, n, slots, stamps);
}

void DeviceTier::Assign(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, const float* rows, int64_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome(cpu);
  OfHost([&] { host_->Assign(cpu, scratch, keys, rows, n); });
  Refresh(cpu, keys, n);
}

int64_t DeviceTier::Restore(const Cpu& cpu, Scratch* scratch, const std::vector<SlotSetInfo>& sets,
                            const RowValues& values) {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome(cpu);
  const int64_t made = OfHost([&] { return host_->Restore(cpu, scratch, sets, values); });
  Refresh(cpu, values.keys, values.n);
  return made;
}

void DeviceTier::SkipCalls(const std::string& save, const std::vector<SlotSetInfo>& sets) {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome({serial});
  OfHost([&] { host_->SkipCalls(save, sets); });
  std::vector<uint64_t> keys;
  for (const Here& here : here_) keys.push_back(here.key);
  CopyAgain({serial}, std::move(keys));
}

void DeviceTier::ReadAll(const Cpu& cpu, RowSink* sink) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome(cpu);
  host_->ReadAll(cpu, sink);
}

void DeviceTier::BeginSave(SnapshotOf snapshot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome({serial});
  OfHost([&] { host_->BeginSave(snapshot); });
}

void DeviceTier::ReadChanges(const Cpu& cpu, RowSink* sink) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome(cpu);
  host_->ReadChanges(cpu, sink);
}

TableStore::ChangeInfo DeviceTier::Changes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome({serial});
  return host_->Changes();
}

void DeviceTier::Swap(TableStore* with) {
  if (with == this) return;
  auto* other = dynamic_cast<DeviceTier*>(with);
  if (other == nullptr) {
    throw InvalidArgument(Label() + " has rows on a device and on its host, and " + with->Label() +
                          " does not: they cannot swap rows.");
  }
  std::vector<DeviceTier*> both = {this, other};
  const auto locks = LockAll(&both);
  for (DeviceTier* tier : {this, other}) tier->WriteHome({serial});
  host_->CheckSwap(*other->host_);
  device_->Swap(other->device_.get());  // or nothing has changed yet
  host_->Swap(other->host_.get());
  here_.swap(other->here_);
  place_of_.swap(other->place_of_);
  lost_.swap(other->lost_);
  for (DeviceTier* tier : {this, other}) tier->sent_home_.clear();  // all ids from before are of rows that are gone
  for (DeviceTier* tier : {this, other}) {                          // they were called by other numbers
    for (Here& here : tier->here_) here.used = 0;
    tier->device_->BeginSave(SnapshotOf::kNothing);
    tier->device_->EndSave("home");
  }
}

void DeviceTier::Reserve(const Cpu& cpu, int64_t n, bool rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  host_->Reserve(cpu, n, rows);
  device_->Reserve(cpu, std::min(n, MostRows()), rows);
}

int64_t DeviceTier::Erase(const uint64_t* keys, int64_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return OfHost([&] { return host_->Erase(keys, n); });
}

int64_t DeviceTier::memory_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return host_->memory_bytes() + device_->memory_bytes() +
         static_cast<int64_t>(here_.capacity() * sizeof(Here) + lost_.capacity() * sizeof(uint64_t) +
                              place_of_.capacity() * sizeof(uint32_t) + sent_home_.capacity() * sizeof(int64_t));
}

StorageCounts DeviceTier::storage_counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  StorageCounts counts = host_->storage_counts();
  counts.rows_on_device = static_cast<int64_t>(here_.size());
  counts.most_rows_on_device = MostRows();
  counts.device_hits = hits_;
  counts.device_misses = misses_;
  counts.device_bytes = device_->memory_bytes();
  return counts;
}

}  // namespace sok
