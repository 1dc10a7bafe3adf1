// Saves of a table over a file that are marks: its rows stay in the file.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "slot_set.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "sok/file_error.h"
#include "sok/shard_file.h"

namespace sok {
namespace {

constexpr int64_t kMaxRuns = kMaxShardRuns;
constexpr int64_t kFramesAtOnce = 256;  // that are written while the table is locked
constexpr int kRestsPerWork = 5;        // beside training, as much longer: a step meets a sixth of a processor

}  // namespace

bool EmbeddingTable::CountsInRecords() const {
  return history_ != nullptr && rows_.tier() != nullptr && rows_.tier()->has_versions();
}

void EmbeddingTable::BeginToAge(const Cpu& cpu, const std::vector<std::pair<uint32_t, uint64_t>>& some, int64_t now) {
  std::vector<uint32_t> rows;
  for (const auto& [row, key] : some)
    if (HistoryOf(row)->last == 0) rows.push_back(row);
  if (rows.empty()) return;
  CheckWhole();
  RowTier* tier = rows_.tier();
  tier->SetBeside(BytesBeside());
  const auto age = [&](uint32_t row) {
    CopyAside(&row, 1);
    HistoryOf(row)->last = static_cast<uint32_t>(now);
    if (saved_.is_on()) saved_.Mark(row);
  };
  for (auto row = rows.begin(); row != rows.end();) {
    try {
      const int64_t count = tier->Bring(cpu, &*row, rows.end() - row, RowUse::kWrite);
      std::for_each(row, row + count, age);
      row += count;
    } catch (const RowTier::Unreadable& unreadable) {
      // One that is damaged ages like the others: whoever wants its record, in this version or a later one, hears of that.
      if (unreadable.error != 0) ThrowUnreadable(unreadable);
      std::iter_swap(row, std::find(row, rows.end(), static_cast<uint32_t>(unreadable.row)));
      age(*row++);
    }
  }
}

RowTier::Facts EmbeddingTable::FactsForTier(const SlotSet* more) const {
  RowTier::Facts facts;
  facts.key = [this](uint32_t row) { return KeptKey(row); };
  std::vector<const SlotSet*> sets;
  const auto add = [&](const SlotSet* set) {
    if (set == nullptr || set->words_beside() == 0) return;
    sets.push_back(set);
    facts.num_words += set->words_beside();
  };
  for (const auto& set : sets_) add(set.get());
  add(more);
  facts.words = [sets](uint32_t row, uint32_t* words) {
    for (const SlotSet* set : sets) {
      std::memcpy(words, set->Beside(row), static_cast<size_t>(set->words_beside()) * sizeof(uint32_t));
      words += set->words_beside();
    }
  };
  return facts;
}

std::unique_ptr<EmbeddingTable::Settler> EmbeddingTable::SettlerOf(const SlotSetInfo& info) {
  class OfSet final : public Settler {
   public:
    explicit OfSet(const SlotSetInfo& info) {
      set_.SetRule(info.rule);
      set_.Append(info.missed, info.calls);
    }
    void Settle(uint32_t stamp, int64_t dim, float* weights, float* slots) const override {
      set_.SettleFrom(stamp, dim, weights, slots);
    }

   private:
    SlotSet set_;
  };
  return std::make_unique<OfSet>(info);
}

void EmbeddingTable::CheckVersions() const {
  const std::string who = Label() + " cannot keep versions";
  if (rows_.tier() == nullptr) {
    throw FailedPrecondition(who + ": its rows are in memory. Give it storage=sok.Storage(...), or save it otherwise.");
  }
}

void EmbeddingTable::StartVersions() {
  CheckVersions();
  KeepKeys();
  rows_.tier()->SetBeside(BytesBeside());
  try {
    rows_.KeepVersions(FactsForTier());
  } catch (const RowTier::Unreadable& row) {
    ThrowUnreadable(row);
  }
}

void EmbeddingTable::KeepVersions() {
  Lock lock(mutex_);
  CheckWhole();
  CheckVersions();
  if (rows_.tier()->has_versions()) return;
  if (snapshot_) {
    throw FailedPrecondition(Label() + ": an asynchronous save is under way. Wait for its result first.");
  }
  StartVersions();
}

// Expects the lock to be held by this thread alone.
void EmbeddingTable::BeginVersion() {
  if (!rows_.tier()->has_versions()) throw FailedPrecondition(Label() + " keeps no versions.");
  auto version = std::make_unique<Version>();
  int64_t word = rows_.floats(), runs = 0;  // behind the record, in the order of FactsForTier
  for (const auto& set : sets_) {
    version->sets.push_back({set->name, set->rule, set->history.calls(), set->history.RunsAfter(0)});
    version->offsets.push_back(set->is_beside ? word : set->offset);
    version->stamps.push_back(set->rule.decays() ? word : -1);
    word += set->words_beside();
    runs += static_cast<int64_t>(version->sets.back().missed.size());
  }
  if (runs > kMaxRuns) {
    throw FailedPrecondition(Label() +
                             ": the learning rate of an optimizer that moves rows without gradients has changed " +
                             std::to_string(runs) + " times, and a version can tell of " + std::to_string(kMaxRuns) +
                             " changes. Save it otherwise, and restore it.");
  }
  version->num_rows = num_rows_;
  version->row_numbers = config_.hashed ? next_row_ : config_.capacity;
  if (config_.hashed) {
    version->bits.assign(static_cast<size_t>((next_row_ + 63) / 64), ~uint64_t{0});
    if (next_row_ % 64 != 0) version->bits.back() = (uint64_t{1} << (next_row_ % 64)) - 1;
    for (const uint32_t row : free_rows_) version->bits[row / 64] &= ~(uint64_t{1} << (row % 64));
  } else {
    version->bits = in_use_;
    version->bits.resize(static_cast<size_t>((config_.capacity + 63) / 64));
  }
  version->log = rows_.tier()->log().file();
  version->shape = rows_.tier()->log().shape();
  version->number = rows_.tier()->BeginVersion();
  version_ = std::move(version);
}

const EmbeddingTable::Version& EmbeddingTable::WriteVersion(const std::string& shard, bool is_beside) {
  using Clock = std::chrono::steady_clock;
  int file = -1;
  Clock::duration worked{};
  for (bool is_done = false; !is_done;) {
    if (is_beside) std::this_thread::sleep_for(kRestsPerWork * worked);
    Lock lock(mutex_);
    const Clock::time_point begin = Clock::now();
    if (!version_) throw FailedPrecondition(Label() + ": there is no version to write.");
    is_done = !rows_.tier()->WriteSome(version_->number, kFramesAtOnce);
    worked = Clock::now() - begin;
    if (!is_done) continue;
    file = rows_.tier()->Flush();
    version_->digest = rows_.tier()->version_digest();
    version_->shard = shard;
  }
  const int error = fdatasync(file) == 0 ? 0 : errno;
  close(file);
  if (error != 0) throw FileError(error, "sync", version_->log);
  return *version_;
}

}  // namespace sok
