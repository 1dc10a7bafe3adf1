#include "sok/device_tier.h"

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

#include "sok/error.h"
#include "sok/hash_key.h"
#include "sok/reserve_more.h"

namespace sok {
namespace {

constexpr int64_t kRowsAtATime = int64_t{1} << 16;  // on their way between host and device

const SerialExecutor serial;

// Of a row on the device: its record, what notes its changes and erasures, and its key in an index that is there twice as it grows.
int64_t BytesOfRecord(int64_t floats) { return int64_t{sizeof(float)} * ((floats + 3) / 4 * 4); }
int64_t BytesOfRow(int64_t floats) { return BytesOfRecord(floats) + 5 + 48; }

constexpr int64_t kBlockBytes = int64_t{2} << 20;  // of rows, of which there are many

constexpr int64_t kFixedBytes = int64_t{32}
                                << 10;  // beside rows: lists of blocks, what exact Adam remembers of its calls

// What a table of the device is made for. Its rows are so many at most; where these are few they are one block of memory, which is
// there twice when slots come: three vectors of them find room, also where they come one after the other.
int64_t RowsOfDevice(const TableConfig& config) {
  constexpr int64_t kManyBytes = int64_t{64} << 20;
  const int64_t budget = config.storage.device_bytes, dim = config.dim;
  if (budget == 0) return config.capacity;
  const int64_t bytes =
      budget >= kManyBytes ? BytesOfRow(dim) : BytesOfRow(4 * dim) + 3 * dim * static_cast<int64_t>(sizeof(float));
  constexpr int64_t kLeastRows = 64;
  const int64_t least = kFixedBytes + std::min(kLeastRows, config.capacity) * bytes;
  if (budget < least) {
    throw InvalidArgument(config.Label() + ": it needs at least " + std::to_string(least) +
                          " bytes of the device. Received: " + std::to_string(budget) +
                          ". Give gpu_bytes of its storage, or gpu_memory_bytes, as many.");
  }
  return std::min((budget - kFixedBytes) / bytes, config.capacity);
}

// Rows lie there as keys of any kind, and as they came from the host; those that have none read what they do there.
TableConfig OnDevice(TableConfig config) {
  config.capacity = RowsOfDevice(config);
  if (config.policies.reads_constant) {
    config.initializer = Initializer();
    config.initializer.kind = InitKind::kConstant;
    config.initializer.a = config.policies.constant;
  }
  config.policies = Policies();
  config.storage = StorageConfig();
  config.hashed = true;
  config.num_keys = 0;
  return config;
}

// What a device keeps of a table's optimizers: not what policies have seen, nor slots that no rule here trains.
std::vector<TableStore::SlotSetInfo> SetsOfDevice(const EmbeddingTable& host, std::vector<size_t>* numbers) {
  std::vector<TableStore::SlotSetInfo> sets, all = host.SlotSets();
  for (size_t s = 0; s < all.size(); ++s) {
    if (all[s].rule.is_named()) continue;
    sets.push_back(std::move(all[s]));
    if (numbers != nullptr) numbers->push_back(s);
  }
  return sets;
}

// Rows with all their slots, for one call after the other.
struct Rows {
  Rows(int64_t num_rows, int64_t dim, const std::vector<TableStore::SlotSetInfo>& sets)
      : keys(static_cast<size_t>(num_rows)), weights(static_cast<size_t>(num_rows * dim)) {
    for (const auto& set : sets) slots.emplace_back(static_cast<size_t>(num_rows * set.rule.slot_floats(dim)));
  }
  TableStore::RowTarget target() {
    TableStore::RowTarget to{keys.data(), weights.data(), {}};
    for (auto& one : slots) to.slots.push_back(one.data());
    return to;
  }

  std::vector<uint64_t> keys;
  std::vector<float> weights;
  std::vector<std::vector<float>> slots;
};

}  // namespace

// Stores what the device has changed in the host's table.
class DeviceTier::HomeSink final : public RowSink {
 public:
  HomeSink(const Cpu& cpu, EmbeddingTable* host) : cpu_(cpu), host_(host) {}

  int64_t Begin(int64_t num_rows, const std::vector<SlotSetInfo>& sets) override {
    const int64_t most = std::max<int64_t>(1, std::min(num_rows, kRowsAtATime));
    sets_ = sets;
    rows_ = std::make_unique<Rows>(most, host_->dim(), sets);
    return most;
  }
  RowTarget Allocate(int64_t n) override {
    n_ = n;
    return rows_->target();
  }
  void Commit() override {
    RowValues values{rows_->keys.data(), rows_->weights.data(), {}, n_, {}, nullptr};
    for (const auto& one : rows_->slots) values.slots.push_back(one.data());
    host_->Restore(cpu_, &scratch_, sets_, values);
    scratch_.Reset();
  }

 private:
  const Cpu cpu_;
  EmbeddingTable* const host_;
  std::vector<SlotSetInfo> sets_;
  std::unique_ptr<Rows> rows_;
  int64_t n_ = 0;
  Scratch scratch_;
};

std::unique_ptr<DeviceTier> DeviceTier::Make(TableConfig config, int64_t rows_at_a_time,
                                             std::unique_ptr<DeviceAllocator> owner) {
  auto host = std::make_unique<EmbeddingTable>(std::move(config));
  return std::unique_ptr<DeviceTier>(new DeviceTier(std::move(host), rows_at_a_time, std::move(owner)));
}

DeviceTier::DeviceTier(std::unique_ptr<EmbeddingTable> host, int64_t rows_at_a_time,
                       std::unique_ptr<DeviceAllocator> owner)
    : TableStore(host.get()),
      host_(std::move(host)),
      device_(std::make_unique<DeviceStore>(OnDevice(host_->config()), host_->config().storage.device_bytes,
                                            rows_at_a_time, nullptr, std::move(owner))) {
  host_->TakeLost();
  device_->HoldCopies();
  device_->BeginSave(SnapshotOf::kNothing);  // from now on it notes what changes
  device_->EndSave("home");
}
DeviceTier::~DeviceTier() = default;

// ---- between host and device

void DeviceTier::Tell() const {
  if (untold_) std::rethrow_exception(std::exchange(untold_, nullptr));
}

void DeviceTier::WriteHome(const Cpu& cpu) const {
  Tell();
  EraseLost();  // or they would come back
  if (here_.empty()) return;
  HomeSink sink(cpu, host_.get());
  device_->BeginSave(SnapshotOf::kNothing);
  try {
    if (device_->Changes().base.empty()) {  // there is no room to note what changes
      device_->ReadAll(cpu, &sink);
    } else {
      device_->ReadChanges(cpu, &sink);
    }
  } catch (...) {
    device_->EndSave("");
    throw;
  }
  device_->EndSave("home");
  dropped_ = 0;
}

void DeviceTier::CopyToDevice(const Cpu& cpu, const uint64_t* keys, int64_t n) {
  std::vector<size_t> numbers;
  const std::vector<SlotSetInfo> all = host_->SlotSets(), sets = SetsOfDevice(*host_, &numbers);
  const int64_t most = std::min(n, kRowsAtATime);
  Rows rows(most, dim(), all);
  const std::unique_ptr<bool[]> changed(new bool[static_cast<size_t>(most)]);
  Scratch scratch;
  for (int64_t at = 0; at < n; at += most) {
    const int64_t count = std::min(most, n - at);
    host_->ReadKeys(cpu, keys + at, count, rows.target(), changed.get());
    std::fill_n(changed.get(), count, false);  // they are what the host has
    RowValues values{rows.keys.data(), rows.weights.data(), {}, count, {}, changed.get()};
    for (const size_t s : numbers) values.slots.push_back(rows.slots[s].data());
    device_->Restore(cpu, &scratch, sets, values);
  }
}

std::vector<uint64_t> DeviceTier::Which(const Cpu& cpu, const uint64_t* keys, int64_t n, bool are_here) const {
  Scratch scratch;
  int64_t* ids = scratch.Get<int64_t>(n);
  std::vector<uint64_t> mine;  // those of other ranks are none of this table's
  for (int64_t i = 0; i < n; ++i)
    if (host_->IsLegal(keys[i]) && host_->OwnerOf(keys[i]) == config().rank) mine.push_back(keys[i]);
  const auto count = static_cast<int64_t>(mine.size());
  host_->Lookup(cpu, &scratch, mine.data(), count, /*insert=*/false, nullptr, nullptr, ids);
  std::vector<uint64_t> found;
  for (size_t i = 0; i < mine.size(); ++i) {
    const auto row = static_cast<size_t>(ids[i] & UINT32_MAX);
    const bool is_here = ids[i] >= 0 && row < place_of_.size() && place_of_[row] != 0 &&
                         here_[place_of_[row] - 1].key == mine[i];  // not that of one that it shares
    if (is_here == are_here) found.push_back(mine[i]);
  }
  return found;
}

void DeviceTier::Refresh(const Cpu& cpu, const uint64_t* keys, int64_t n) {
  if (here_.empty() || n == 0) return;
  CopyAgain(cpu, Which(cpu, keys, n, /*are_here=*/true));
}

void DeviceTier::CopyAgain(const Cpu& cpu, std::vector<uint64_t> keys) {
  try {
    return CopyToDevice(cpu, keys.data(), static_cast<int64_t>(keys.size()));
  } catch (const OutOfMemory&) {  // the host has them: they come again when they are looked up
    DropKeys(&keys);
  } catch (...) {
    DropKeys(&keys);
    throw;
  }
}

void DeviceTier::DropKeys(std::vector<uint64_t>* keys) {
  std::sort(keys->begin(), keys->end());
  lost_.reserve(lost_.size() + keys->size());
  for (size_t place = here_.size(); place-- > 0;) {
    if (!std::binary_search(keys->begin(), keys->end(), here_[place].key)) continue;
    lost_.push_back(here_[place].key);
    Forget(place);
  }
}

int64_t DeviceTier::ReadAhead(const Cpu& cpu, const uint64_t* keys, int64_t n, int64_t batches) {
  std::vector<uint64_t> others;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    others = Which(cpu, keys, n, /*are_here=*/false);
  }
  return host_->ReadAhead(cpu, others.data(), static_cast<int64_t>(others.size()), batches);
}

void DeviceTier::SetUsed(uint32_t row, uint64_t key) {
  if (row >= place_of_.size()) place_of_.resize(std::max<size_t>(row + size_t{1}, 2 * place_of_.size()), 0);
  uint32_t& place = place_of_[row];
  if (place == 0) {
    ReserveMore(&here_, 1);
    lost_.reserve(here_.capacity());  // whoever drops them may be a destructor
    here_.push_back({key, row, 0});
    place = static_cast<uint32_t>(here_.size());
  }
  Here& here = here_[place - 1];
  here.used = call_ << 1 | (Stays(here) ? 1 : 0);
}

void DeviceTier::Forget(size_t place) {
  place_of_[here_[place].row] = 0;
  if (place + 1 != here_.size()) {
    here_[place] = here_.back();
    place_of_[here_[place].row] = static_cast<uint32_t>(place + 1);
  }
  here_.pop_back();
}

void DeviceTier::DropLost() {
  for (const EmbeddingTable::Lost& lost : host_->TakeLost()) {
    if (lost.row >= place_of_.size() || place_of_[lost.row] == 0) continue;
    const size_t place = place_of_[lost.row] - 1;
    if (here_[place].key != lost.key) continue;
    lost_.push_back(lost.key);
    Forget(place);
  }
  EraseLost();
}

void DeviceTier::EraseLost() const {
  if (lost_.empty()) return;
  device_->Erase(lost_.data(), static_cast<int64_t>(lost_.size()));
  dropped_ += static_cast<int64_t>(lost_.size());
  lost_.clear();
}

int64_t DeviceTier::SendHome(const Cpu& cpu, int64_t least, int64_t most) {
  std::vector<Here> leaving;
  int64_t of_before = 0;  // of steps that have ended, or of no step
  for (const Here& here : here_) {
    if (here.used >> 1 == call_) continue;
    leaving.push_back(here);
    of_before += Stays(here) ? 0 : 1;
  }
  const int64_t n = std::min(std::max(least, std::min(most, of_before)), static_cast<int64_t>(leaving.size()));
  if (n <= 0) return 0;
  WriteHome(cpu);
  // Whom nobody has asked for the longest, those of this step last; a hash decides between equals.
  std::nth_element(leaving.begin(), leaving.begin() + n - 1, leaving.end(), [this](const Here& a, const Here& b) {
    return std::tuple(Stays(a), a.used >> 1, HashKey(a.key)) < std::tuple(Stays(b), b.used >> 1, HashKey(b.key));
  });
  std::vector<uint64_t> keys;
  for (int64_t i = 0; i < n; ++i) keys.push_back(leaving[static_cast<size_t>(i)].key);
  const std::vector<int64_t> ids = device_->RowIds(keys.data(), n);
  if (sent_home_.empty()) sent_home_.assign(static_cast<size_t>(device_->config().capacity), -1);
  device_->Erase(keys.data(), n);
  for (const int64_t id : ids)
    if (id >= 0) sent_home_[static_cast<size_t>(id & UINT32_MAX)] = id;
  for (int64_t i = 0; i < n; ++i) Forget(place_of_[leaving[static_cast<size_t>(i)].row] - 1);
  dropped_ += n;
  return n;
}

int64_t DeviceTier::MostRows() const {
  const int64_t most = device_->config().capacity, budget = config().storage.device_bytes;
  if (budget == 0) return most;
  int64_t slots = 0;
  for (const auto& set : SetsOfDevice(*host_, nullptr)) slots += set.rule.slot_floats(dim()) + 1;  // and a stamp
  int64_t twice = 0;
  if (slots == 0) {  // what comes with the first update finds room, for which two blocks are there twice
    slots = 3 * dim();
    twice = 2;
  }
  // Of several blocks of rows the last one may hold few.
  const int64_t block_rows = std::max(kBlockBytes / BytesOfRecord(dim()), most >> 9);  // about: see DeviceRowStore
  const int64_t block = BytesOfRecord(dim() + slots) + twice * BytesOfRecord(dim());
  const int64_t spare = most > block_rows ? block_rows * block : 0;
  return std::clamp<int64_t>((budget - kFixedBytes - spare) / BytesOfRow(dim() + slots), 1, most);
}

int64_t DeviceTier::keys_at_a_time() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return (MostRows() + 1) / 2;
}

void DeviceTier::Want(const uint64_t* keys, const int64_t* row_ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (row_ids[i] < 0) continue;
    const auto row = static_cast<uint32_t>(row_ids[i]);
    const bool is_here = row < place_of_.size() && place_of_[row] != 0;
    if (!is_here) {
      wanted_.push_back({keys[i], row, 0});
    } else if (here_[place_of_[row] - 1].used >> 1 != call_) {
      ++hits_;
    }
    if (is_here) SetUsed(row, keys[i]);
  }
}

void DeviceTier::KeepForStep(const int64_t* row_ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (row_ids[i] >= 0) here_[place_of_[static_cast<uint32_t>(row_ids[i])] - 1].used |= 1;
}

void DeviceTier::Bring(const Cpu& cpu) {
  const auto by_row = [](const Here& a, const Here& b) { return a.row < b.row; };
  std::sort(wanted_.begin(), wanted_.end(), by_row);
  const auto is_same = [](const Here& a, const Here& b) { return a.row == b.row; };
  wanted_.erase(std::unique(wanted_.begin(), wanted_.end(), is_same), wanted_.end());
  const auto n = static_cast<int64_t>(wanted_.size());
  if (n == 0) return;
  std::vector<uint64_t> keys;
  for (const Here& wanted : wanted_) keys.push_back(wanted.key);
  const auto refuse = [&](const std::string& why) {
    throw OutOfMemory(Label() + ": " + std::to_string(n) +
                      " rows of a lookup have to come to the device, and it has no room for them beside the " +
                      std::to_string(here_.size()) + " that this lookup has found there: " + why +
                      " Give the table's storage more gpu_bytes, or look up fewer ids at once.");
  };
  const int64_t most = MostRows(), over = static_cast<int64_t>(here_.size()) + n - most;
  constexpr int64_t kMoreAtOnce = 16;  // of the rows that there is room for, so that not every call sends some home
  const auto is_of_call = [this](const Here& here) { return here.used >> 1 == call_; };
  // What has no room at all sends nobody home.
  if (over > 0 && (std::count_if(here_.begin(), here_.end(), is_of_call) + n > most ||
                   SendHome(cpu, over, over + most / kMoreAtOnce) < over)) {
    refuse("it takes " + std::to_string(most) + ".");
  }
  for (int64_t at = 0; at < n;) {
    const int64_t count = std::min(n - at, kRowsAtATime);
    // Whatever of them is there if this fails goes again: no lookup may find it.
    lost_.insert(lost_.end(), keys.begin() + at, keys.begin() + at + count);
    try {
      CopyToDevice(cpu, keys.data() + at, count);
    } catch (const OutOfMemory& error) {
      const int64_t part = std::max<int64_t>(count, static_cast<int64_t>(here_.size()) / kMoreAtOnce);
      EraseLost();
      if (SendHome(cpu, part, part) == 0) refuse(error.what());
      continue;
    }
    lost_.clear();
    for (int64_t i = at; i < at + count; ++i)
      SetUsed(wanted_[static_cast<size_t>(i)].row, keys[static_cast<size_t>(i)]);
    at += count;
  }
  misses_ += n;
}

}  // namespace sok
