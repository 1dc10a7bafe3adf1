// Memory that ends, at each allocation in turn: what throws has changed nothing, and works when asked again.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "files.h"
#include "sok/error.h"
#include "tables.h"

namespace {

// Allocations until one fails; negative: none does.
int64_t allocations_left = -1;

bool Fails() { return allocations_left >= 0 && allocations_left-- == 0; }

}  // namespace

// All of new and, by way of AllocatePages, mmap. (Not malloc: nothing of ours calls it but a snapshot's calloc.)
void* operator new(size_t bytes) {
  void* p = Fails() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

extern "C" void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  if (Fails()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, protection, flags, file, offset));
}

namespace {

using sok::EmbeddingTable;

sok::StorageConfig storage;  // of the tables of a World

const sok::SerialExecutor kSerial;
const sok::Cpu kCpu{kSerial};

// Everything that can be asked of a table, as text; of floats all bits.
class StateSink : public EmbeddingTable::RowSink {
 public:
  explicit StateSink(std::ostringstream* out) : out_(out) {}
  int64_t Begin(int64_t rows, const std::vector<EmbeddingTable::SlotSetInfo>& sets) override {
    *out_ << rows << " rows";
    for (const auto& set : sets) {
      *out_ << "; " << set.name << " " << sok::RuleName(set.rule.rule) << " " << set.rule.beta_1 << " "
            << set.rule.epsilon << " " << set.calls;
      slots_.push_back(set.rule.slot_floats(dim));
    }
    return 64;
  }
  void Erased(const std::vector<uint64_t>& keys) override { *out_ << "; " << keys.size() << " erased"; }
  EmbeddingTable::RowTarget Allocate(int64_t n) override {
    n_ = n;
    keys_.assign(static_cast<size_t>(n), 0);
    floats_.assign(1, std::vector<float>(static_cast<size_t>(n * dim)));
    for (const int64_t slots : slots_) floats_.emplace_back(static_cast<size_t>(n * slots));
    EmbeddingTable::RowTarget target;
    target.keys = keys_.data();
    target.rows = floats_[0].data();
    for (size_t s = 1; s < floats_.size(); ++s) target.slots.push_back(floats_[s].data());
    return target;
  }
  void Commit() override {
    for (const uint64_t key : keys_) *out_ << "\n" << key;
    *out_ << std::hexfloat;
    for (const auto& one : floats_)
      for (const float x : one) *out_ << " " << x;
    *out_ << std::defaultfloat;
  }
  int64_t dim = 4;

 private:
  std::ostringstream* out_;
  int64_t n_ = 0;
  std::vector<int64_t> slots_;
  std::vector<uint64_t> keys_;
  std::vector<std::vector<float>> floats_;
};

std::vector<uint64_t> Range(uint64_t begin, uint64_t end) {
  std::vector<uint64_t> keys;
  for (uint64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

// Two tables with a past: rows, an exact Adam with steps behind it, erased rows, a save that changes are counted from.
struct World {
  sok::Scratch scratch;
  std::vector<std::unique_ptr<EmbeddingTable>> tables;
  std::vector<int64_t> ids[2];     // of the last lookup of keys 0 .. 99
  std::vector<float> rows, grads;  // [400, 4]
  std::vector<uint64_t> wanted = Range(50, 450);
  std::vector<int64_t> row_ids;
  bool hashed;

  explicit World(bool is_hashed) : rows(1600, 0.5f), grads(1600, 0.25f), row_ids(800), hashed(is_hashed) {
    for (int t = 0; t < 2; ++t) {
      sok::TableConfig config = Config(4, 2000, hashed);
      config.storage = storage;
      tables.push_back(std::make_unique<EmbeddingTable>(config));
      EmbeddingTable& table = *tables.back();
      const auto keys = Range(0, 100), gone = Range(20, 30);
      ids[t].resize(100);
      LookUp(t, keys, ids[t].data());
      const double hyper[] = {0.01, 0.9, 0.999, 1e-7};
      for (int step = 1; step <= 3; ++step)
        ApplyTo(kCpu, &scratch, &table, sok::MakeUpdateRule("adam", hyper, 4, step), "adam", sok::Nonfinite::kAllow,
                ids[t].data() + 10 * step, grads.data(), 50);
      table.BeginSave();
      table.EndSave("base");
      table.Erase(gone.data(), 10);
      LookUp(t, Range(0, 5), row_ids.data());
      scratch.Reset();
    }
  }
  void LookUp(int t, const std::vector<uint64_t>& keys, int64_t* to) {
    std::vector<float> out(keys.size() * 4);
    tables[static_cast<size_t>(t)]->Lookup(kCpu, &scratch, keys.data(), static_cast<int64_t>(keys.size()), true,
                                           nullptr, out.data(), to);
  }
  std::string State() {
    std::ostringstream out;
    for (auto& table : tables) {
      StateSink sink(&out);
      table->ReadAll(kCpu, &sink);
      out << "\nsize " << table->size();
      const auto info = table->Changes();
      out << "; changes " << info.is_on << " of '" << info.base << "': " << info.rows << " rows, " << info.erased
          << " erased";
      // Which row is whose: what gradients would reach.
      const auto keys = Range(0, 500);
      std::vector<float> values(2000);
      std::vector<int64_t> now(500);
      table->Lookup(kCpu, &scratch, keys.data(), 500, false, nullptr, values.data(), now.data());
      for (const int64_t id : now) out << " " << id;
      scratch.Reset();
    }
    return out.str();
  }
};

using Act = std::function<void(World*)>;

// Whether `act` threw because memory ended at allocation `at`.
bool RunsOut(World* world, const Act& act, int64_t at) {
  allocations_left = at;
  try {
    act(world);
  } catch (const std::bad_alloc&) {
    allocations_left = -1;
    return true;
  } catch (const sok::OutOfMemory&) {
    allocations_left = -1;
    return true;
  }
  allocations_left = -1;
  return false;
}

// Lets memory end at each allocation of `act` in turn. `prepare`: what comes before it.
void EndsAtEach(const char* name, const Act& act, const Act& prepare = [](World*) {}) {
  for (const bool hashed : {true, false}) {
    World right(hashed);
    prepare(&right);
    const std::string before = right.State();
    act(&right);
    right.scratch.Reset();
    const std::string after = right.State();
    int64_t at = 0;
    for (;; ++at) {
      World world(hashed);
      prepare(&world);
      const bool ran_out = RunsOut(&world, act, at);
      world.scratch.Reset();
      if (!ran_out) {
        CHECK(world.State() == after);
        break;
      }
      if (world.State() != before) {
        check::Fail(__FILE__, __LINE__,
                    std::string(name) + (hashed ? "" : ", identity") + ": changed something when allocation " +
                        std::to_string(at) + " failed");
        continue;
      }
      act(&world);
      world.scratch.Reset();
      if (world.State() != after) {
        check::Fail(__FILE__, __LINE__,
                    std::string(name) + (hashed ? "" : ", identity") + ": gave something else after allocation " +
                        std::to_string(at) + " had failed");
      }
    }
    CHECK(at > 0);  // or nothing was tried
  }
}

void Take(World* world, int t, bool pooled) {
  EmbeddingTable::Feature features[2];
  static const std::vector<int64_t> splits = {0, 100, 400};
  for (int f = 0; f < 2; ++f) {
    features[f].table = world->tables[static_cast<size_t>(f == 0 ? 0 : t)].get();
    features[f].keys = world->wanted.data();
    features[f].n = 400;
    features[f].row_splits = pooled ? splits.data() : nullptr;
    features[f].segments = pooled ? 2 : 0;
    features[f].output = world->rows.data();
    features[f].row_ids = world->row_ids.data() + 400 * f;
  }
  EmbeddingTable::LookupGroup(kCpu, &world->scratch, features, t == 0 ? 1 : 2, true);
}

void Train(World* world, const std::string& rule, const std::vector<double>& hyper, const std::string& set) {
  EmbeddingTable::Gradients gradients[2];
  for (int t = 0; t < 2; ++t)
    gradients[t] = {world->tables[static_cast<size_t>(t)].get(), world->ids[t].data(), world->grads.data(), 100, false};
  EmbeddingTable::ApplyGroup(kCpu, &world->scratch,
                             sok::MakeUpdateRule(rule, hyper.data(), static_cast<int64_t>(hyper.size()), 4), set,
                             sok::Nonfinite::kAllow, gradients, 2);
}

}  // namespace

// Tables that keep a handful of rows in memory, and the others in files.
class WithFiles {
 public:
  WithFiles() {
    setenv("SOK_STORAGE_FRAMES", "32", 1);
    for (int64_t bytes = 1 << 20;; bytes += 4096) {  // hardly more than keys, places and buffers take
      storage = {bytes, folder_.path()};
      try {
        for (const bool hashed : {true, false}) {
          World world(hashed);
          Take(&world, 1, false);
          Train(&world, "adagrad", {0.1, 0.1, 1e-7}, "new");
          CHECK(world.tables[0]->storage_counts().rows_in_memory < 200);
        }
        return;
      } catch (const std::runtime_error&) {  // too few
      }
    }
  }
  ~WithFiles() {
    storage = {};
    unsetenv("SOK_STORAGE_FRAMES");
  }

 private:
  const Folder folder_;
};

void LookupsAreAllOrNone() {
  EndsAtEach("LookupGroup", [](World* world) { Take(world, 0, false); });
  EndsAtEach("LookupGroup, pooled", [](World* world) { Take(world, 0, true); });
}

void UpdatesAreAllOrNone() {
  EndsAtEach("ApplyGroup", [](World* world) { Train(world, "adam", {0.01, 0.9, 0.999, 1e-7}, "adam"); });
  EndsAtEach("ApplyGroup with other betas",
             [](World* world) { Train(world, "adam", {0.01, 0.8, 0.99, 1e-7}, "adam"); });
}

void AssigningIsAllOrNone() {
  EndsAtEach("Assign", [](World* world) {
    sok::Scratch scratch;  // all that it takes; the world's has room
    world->tables[0]->Assign(kCpu, &scratch, world->wanted.data(), world->rows.data(), 400);
  });
}

TEST(WithRowsInFilesItIsTheSame) {
  const WithFiles with_files;
  LookupsAreAllOrNone();
  UpdatesAreAllOrNone();
  AssigningIsAllOrNone();
  EndsAtEach("Erase", [](World* world) { world->tables[0]->Erase(Range(0, 80).data(), 80); });
}

TEST(AWorldIsTheSameEachTime) {
  CHECK(World(true).State() == World(true).State());
  World changed(true);
  changed.tables[1]->Assign(kCpu, &changed.scratch, changed.wanted.data(), changed.rows.data(), 1);
  CHECK(World(true).State() != changed.State());
}

TEST(LookupsOfNewKeysAreAllOrNone) { LookupsAreAllOrNone(); }

// All or none in each feature.
TEST(AGroupOfLookupsThatEndsMayBeRepeated) {
  for (const bool hashed : {true, false}) {
    World right(hashed);
    Take(&right, 1, false);
    right.scratch.Reset();
    const std::string after = right.State();
    bool ran_out = true;
    for (int64_t at = 0; ran_out; ++at) {
      World world(hashed);
      ran_out = RunsOut(&world, [](World* w) { Take(w, 1, false); }, at);
      world.scratch.Reset();
      for (const auto& table : world.tables) CHECK(table->size() == 90 || table->size() == 440);
      Take(&world, 1, false);
      world.scratch.Reset();
      CHECK(world.State() == after);
    }
  }
}

TEST(ErasingIsAllOrNone) {
  const Act erase = [](World* world) { world->tables[0]->Erase(Range(0, 80).data(), 80); };
  EndsAtEach("Erase", erase);
  EndsAtEach("Erase beside a save", erase,
             [](World* world) { world->tables[0]->BeginSave(EmbeddingTable::SnapshotOf::kAllRows); });
}

TEST(AssignmentsAreAllOrNone) { AssigningIsAllOrNone(); }

TEST(RestoringStoresAllOrNone) {
  static const std::vector<float> slots(3200, 0.125f);
  const auto restore = [](const char* set, sok::Rule rule, uint64_t first) {
    return [=](World* world) {
      EmbeddingTable::SlotSetInfo info;
      info.name = set;
      info.rule.rule = rule;
      EmbeddingTable::RowValues values;
      const auto keys = Range(first, first + 400);
      values.keys = keys.data();
      values.rows = world->rows.data();
      values.slots = {slots.data()};
      values.n = 400;
      world->tables[0]->Restore(kCpu, &world->scratch, {info}, values);
    };
  };
  EndsAtEach("Restore", restore("adam", sok::Rule::kAdam, 50));
  EndsAtEach("Restore of new rows", restore("adam", sok::Rule::kAdam, 1000));
}

TEST(GroupsOfUpdatesAreAllOrNone) { UpdatesAreAllOrNone(); }

// A set that some tables have already, unused, is all that may be left.
TEST(AnUpdateWithANewSetMayBeRepeated) {
  for (const char* rule : {"adagrad", "adam"}) {
    const Act train = [rule](World* world) {
      Train(world, rule,
            rule[2] == 'a' && rule[3] == 'g' ? std::vector<double>{0.1, 0.1, 1e-7}
                                             : std::vector<double>{0.01, 0.9, 0.999, 1e-7},
            "new");
    };
    World right(true);
    train(&right);
    right.scratch.Reset();
    const std::string after = right.State();
    bool ran_out = true;
    for (int64_t at = 0; ran_out; ++at) {
      World world(true);
      ran_out = RunsOut(&world, train, at);
      world.scratch.Reset();
      if (ran_out) train(&world);
      world.scratch.Reset();
      CHECK(world.State() == after);
    }
  }
}

TEST(SavesBeginOrDoNot) {
  for (const auto of : {EmbeddingTable::SnapshotOf::kNothing, EmbeddingTable::SnapshotOf::kAllRows,
                        EmbeddingTable::SnapshotOf::kChanges}) {
    EndsAtEach("BeginSave", [of](World* world) { world->tables[0]->BeginSave(of); });
    EndsAtEach(
        "EndSave", [](World* world) { world->tables[0]->EndSave("the generation of the next complete save"); },
        [of](World* world) { world->tables[0]->BeginSave(of); });
    EndsAtEach(
        "a save that fails", [](World* world) { world->tables[0]->EndSave(""); },
        [of](World* world) {
          world->tables[0]->BeginSave(of);
          world->tables[0]->Erase(Range(30, 60).data(), 30);
        });
  }
}
