#include "sok/device_tier.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>

#include "detail/table_state.h"
#include "sok/device_words.h"
#include "sok/error.h"
#include "sok/hash_key.h"
#include "sok/reserve_more.h"

namespace sok {
namespace {

constexpr int64_t kRowsAtATime = int64_t{1} << 16;  // on their way between host and device
constexpr int64_t kLostAtMost = int64_t{1} << 16;   // rows that have left, until the device forgets that they did

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

EmbeddingTable* DeviceTier::OnHost() {
  const std::lock_guard<std::mutex> lock(mutex_);
  WriteHome({serial});
  return host_.get();
}

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
  if (over > 0 && SendHome(cpu, over, over + most / kMoreAtOnce) < over) {
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

// ---- lookups and updates

std::vector<std::unique_lock<std::mutex>> DeviceTier::LockAll(const std::vector<DeviceTier*>& tiers) {
  std::vector<std::unique_lock<std::mutex>> locks;
  for (DeviceTier* tier : tiers) locks.emplace_back(tier->mutex_);
  return locks;
}

namespace {

// In one order for all threads, each once.
std::vector<DeviceTier*> InOrder(std::vector<DeviceTier*> tiers) {
  std::sort(tiers.begin(), tiers.end(), std::less<>());
  tiers.erase(std::unique(tiers.begin(), tiers.end()), tiers.end());
  return tiers;
}

}  // namespace

DeviceTier::Held::Held(const Cuda& cuda, const Cpu& cpu, DeviceScratch* device_scratch, const std::vector<Asked>& asked,
                       bool insert) {
  std::vector<DeviceTier*> tiers;
  for (const Asked& one : asked) tiers.push_back(one.tier);
  tiers = InOrder(std::move(tiers));
  locks_ = LockAll(tiers);
  for (const DeviceTier* tier : tiers) tier->Tell();
  Scratch scratch;
  std::vector<EmbeddingTable::Feature> features;
  for (const Asked& one : asked) {
    const int64_t n = one.of->n;
    EmbeddingTable::Feature feature;
    feature.table = one.tier->host_.get();
    feature.n = n;
    feature.keys = one.keys;
    feature.row_ids = scratch.Get<int64_t>(n);
    if (one.keys == nullptr && n > 0) {
      DeviceKeys keys = one.of->keys;
      auto* words = scratch.Get<uint64_t>(n);
      auto* there = scratch.Get<char>(n * (keys.is_narrow ? 4 : 8));
      CopyToHost(cuda, there, keys.words, n * (keys.is_narrow ? 4 : 8));
      keys.words = there;
      for (int64_t i = 0; i < n; ++i) words[i] = keys.At(i);
      feature.keys = words;
    }
    features.push_back(feature);
  }
  const auto shares = [](const DeviceTier* tier) { return tier->config().policies.shared_rows > 0; };
  for (DeviceTier* tier : tiers) {
    tier->wanted_.clear();
    ++tier->call_;
    // A key that is admitted begins with the row that it has shared; a step that is ended late may look at weights.
    if (insert && (shares(tier) || tier->host_->HasStepToEnd())) tier->WriteHome(cpu);
  }
  std::exception_ptr error;
  try {
    EmbeddingTable::LookupGroup(cpu, &scratch, features.data(), static_cast<int64_t>(features.size()), insert);
  } catch (...) {
    error = std::current_exception();
  }
  for (DeviceTier* tier : tiers) tier->DropLost();  // also what others could not
  if (error) std::rethrow_exception(error);
  for (size_t f = 0; f < features.size(); ++f) {
    const EmbeddingTable::Feature& feature = features[f];
    DeviceTier* tier = asked[f].tier;
    const uint64_t* keys = feature.keys;
    if (shares(tier)) {
      const Policies& policies = tier->config().policies;
      auto *shared = scratch.Get<uint64_t>(feature.n), *found = scratch.Get<uint64_t>(feature.n);
      auto* ids = scratch.Get<int64_t>(feature.n);
      for (int64_t i = 0; i < feature.n; ++i) shared[i] = policies.SharedKey(feature.keys[i]);
      feature.table->Lookup(cpu, &scratch, shared, feature.n, /*insert=*/false, nullptr, nullptr, ids);
      for (int64_t i = 0; i < feature.n; ++i) {
        found[i] = feature.row_ids[i] >= 0 && feature.row_ids[i] == ids[i] ? shared[i] : feature.keys[i];
      }
      auto* there = device_scratch->Get<uint64_t>(feature.n);
      sok::CopyToDevice(cuda, there, found, feature.n * int64_t{sizeof(uint64_t)});
      asked[f].of->keys = there;
      keys = found;
    }
    tier->Want(keys, feature.row_ids, feature.n);
  }
  for (DeviceTier* tier : tiers) tier->Bring(cpu);
  if (!insert) return;
  // Only now: of a lookup that was refused no row has to stay, or the next one would be refused as well.
  for (size_t f = 0; f < features.size(); ++f) asked[f].tier->KeepForStep(features[f].row_ids, features[f].n);
}

void DeviceTier::CheckIds(const Cuda& cuda, const int64_t* row_ids, int64_t n) const {
  if (sent_home_.empty() || n == 0) return;
  std::vector<int64_t> ids(static_cast<size_t>(n));
  CopyToHost(cuda, ids.data(), row_ids, n * int64_t{sizeof(int64_t)});
  for (const int64_t id : ids) {
    if (id < 0) continue;
    const auto row = static_cast<size_t>(id & UINT32_MAX);
    if (row >= sent_home_.size() || id > sent_home_[row])
      continue;  // ids of one row number grow with each row that had it
    throw InvalidArgument(
        Label() +
        ": a gradient is for a row that has left the device since its lookup. Apply gradients in the step of their "
        "lookups, look up fewer ids in a step, or give the table's storage more gpu_bytes.");
  }
}

void DeviceTier::CheckRule(const UpdateRule& rule, const std::string& slot_set) const {
  for (const SlotSetInfo& set : host_->SlotSets()) {
    if (set.name != slot_set || set.rule.rule == rule.rule) continue;
    throw InvalidArgument(Label() + ": slot set '" + slot_set +
                          "' belongs to another rule. Give each optimizer its own name.");
  }
}

DeviceTier::Updating::Updating(const Cuda& cuda, const Cpu& cpu, const std::vector<Updated>& updated,
                               const UpdateRule& rule, const std::string& slot_set)
    : cpu_(cpu), rule_(rule), slot_set_(slot_set) {
  for (const Updated& one : updated) tiers_.push_back(one.tier);
  tiers_ = InOrder(std::move(tiers_));
  locks_ = LockAll(tiers_);
  for (const Updated& one : updated) one.tier->CheckIds(cuda, one.row_ids, one.n);
  if (slot_set_.empty()) return;
  for (const DeviceTier* tier : tiers_) tier->CheckRule(rule_, slot_set_);
  SlotSetInfo set;
  set.name = slot_set_;
  set.rule = rule_;
  Scratch scratch;
  for (DeviceTier* tier : tiers_) tier->host_->Restore(cpu_, &scratch, {set}, RowValues());
}

void DeviceTier::Updating::Done() {
  if (slot_set_.empty() || tiers_.empty()) return;
  std::vector<EmbeddingTable::Gradients> none(tiers_.size());
  for (size_t t = 0; t < tiers_.size(); ++t) none[t].table = tiers_[t]->host_.get();
  Scratch scratch;
  EmbeddingTable::ApplyGroup(cpu_, &scratch, rule_, slot_set_, Nonfinite::kAllow, none.data(),
                             static_cast<int64_t>(none.size()));
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

// ---- what others do to the table

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
  const auto locks = LockAll(InOrder({this, other}));
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
         static_cast<int64_t>(here_.capacity() * sizeof(Here) + place_of_.capacity() * sizeof(uint32_t));
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
