// DeviceStore saved by changes, and beside training: what EmbeddingTable gives, and the chain of it the table again.
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device_stores.h"
#include "sok/error.h"

namespace {

using Of = TableStore::SnapshotOf;

int64_t host_bytes = 0;

std::vector<TableStore*> Both(OnDevice* device, OnCpu* host) { return {&device->store, &host->store}; }

Collector Changes(TableStore* store, Of of = Of::kNothing) {
  Collector changes(store->dim(), 4);
  store->BeginSave(of);
  if (of == Of::kNothing) store->ReadChanges(cpu, &changes);
  if (of != Of::kNothing) store->ReadSnapshot(cpu, &changes);
  return changes;
}

void SaveAll(TableStore* store, const std::string& name) {
  store->BeginSave();
  ReadAll(*store);
  store->EndSave(name);
}

// What somebody does who reads one link of a chain.
void ReadLink(TableStore* store, const Collector& link, const std::string& name) {
  store->Erase(link.erased.data(), Size(link.erased));
  store->SkipCalls(name, link.sets);
  Restore(store, link);
}

void CheckEqual(const Collector& a, const Collector& b) {
  CHECK_EQ(a.expected, b.expected);
  CheckSame(a.found, b.found);
  CHECK(a.erased == b.erased);
  CHECK_EQ(a.sets.size(), b.sets.size());
  for (size_t s = 0; s < a.sets.size(); ++s) {
    CHECK_EQ(a.sets[s].calls, b.sets[s].calls);
    CHECK_EQ(a.sets[s].missed.size(), b.sets[s].missed.size());
    for (size_t i = 0; i < a.sets[s].missed.size(); ++i) {
      CHECK_EQ(a.sets[s].missed[i].first_call, b.sets[s].missed[i].first_call);
      CHECK_EQ(a.sets[s].missed[i].alpha, b.sets[s].missed[i].alpha);
    }
  }
}

void Erase(TableStore* store, const Keys& keys) { store->Erase(keys.data(), Size(keys)); }

}  // namespace

TEST(ChangesAreThoseOfTheCpuAndAChainIsTheTableAgain) {
  for (const bool hashed : {true, false}) {
    for (const Of of : {Of::kNothing, Of::kChanges}) {
      OnDevice device(Config(3, 500, hashed)), from_host(Config(3, 500, hashed));
      OnCpu host(Config(3, 500, hashed)), from_device(Config(3, 500, hashed));
      Train(&device, 60, 1, 1);
      Train(&host, 60, 1, 1);
      for (TableStore* store : Both(&device, &host)) SaveAll(store, "g0");
      Restore(&from_device.store, ReadAll(device.store));
      Restore(&from_host.store, ReadAll(host.store));
      for (int64_t link = 1; link <= 3; ++link) {
        const uint64_t last = static_cast<uint64_t>(link);
        const int64_t step = 2 * link;
        Train(&device, 30 + last, step, step + 1);
        Train(&host, 30 + last, step, step + 1);
        device.Lookup({300 + last});  // a row that nobody but the lookup has written
        host.Lookup({300 + last});
        for (TableStore* store : Both(&device, &host)) {
          Erase(store, {3 * last, 150 + 3 * last, 400 + last, 171, 177});
          Assign(store, {200 + last, 201, 171}, 2.0f);  // new ones, and one that was just erased
          const TableStore::SlotSetInfo info{"ada", Rule("adagrad", 1), 0, {}};
          const Keys restored{120, 210 + last};
          const Floats values(6, 3.0f);
          sok::Scratch scratch;
          store->Restore(cpu, &scratch, {info}, {restored.data(), values.data(), {values.data()}, 2});
          CHECK_EQ(store->Changes().base, "g" + std::to_string(link - 1));
        }
        const auto mine = device.store.Changes(), theirs = host.store.Changes();
        CHECK(mine.is_on && theirs.is_on);
        CHECK_EQ(mine.erased, theirs.erased);
        CHECK_EQ(mine.sets[0].num_missed(), theirs.sets[0].num_missed());
        const std::string name = "g" + std::to_string(link);
        const Collector a = Changes(&device.store, of), b = Changes(&host.store, of);
        CheckEqual(a, b);
        CHECK(a.found.size() >= 8 && a.found.size() < 30);
        CHECK_EQ(a.sets[0].num_missed(), 2);
        for (TableStore* store : Both(&device, &host)) store->EndSave(name);
        CHECK_EQ(device.store.Changes().rows, 0);
        CHECK_EQ(device.store.Changes().erased, 0);
        ReadLink(&from_device.store, a, name);
        ReadLink(&from_host.store, b, name);
      }
      const AllRows expected = ReadAll(device.store).found;
      CheckSame(ReadAll(from_device.store).found, expected);
      CheckSame(ReadAll(from_host.store).found, expected);
    }
  }
}

TEST(ASaveThatFailsForgetsNothing) {
  OnDevice device(Config(3, 100));
  TableStore& store = device.store;
  Assign(&store, Range(20, 1), 1.0f);
  const int64_t bytes = store.memory_bytes();
  store.BeginSave();
  CHECK(store.Changes().is_on);
  store.EndSave("");  // the first one: nothing to count from
  CHECK(!store.Changes().is_on);
  CHECK_EQ(store.memory_bytes(), bytes);
  SaveAll(&store, "g0");
  Assign(&store, {3, 4}, 2.0f);
  Erase(&store, {7, 8});
  store.BeginSave();
  Assign(&store, {5, 8}, 2.0f);
  Erase(&store, {9});
  CHECK_EQ(store.Changes().rows, 2);  // of the next save
  store.EndSave("");
  CHECK_EQ(store.Changes().base, std::string("g0"));
  CHECK_EQ(store.Changes().rows, 4);
  const Collector changes = Changes(&store, Of::kChanges);
  CHECK(changes.erased == Keys({7, 9}));
  CHECK_EQ(changes.found.size(), size_t{4});
  for (const uint64_t key : {3, 4, 5, 8}) CHECK(changes.found.count(key) == 1);
  store.EndSave("g1");
  store.BeginSave();
  Assign(&store, {1}, 3.0f);
  store.BeginSave();  // nobody ended the one before
  store.EndSave("g2");
  CHECK_EQ(store.Changes().rows, 0);
}

TEST(NumbersOfSavesBeginAnew) {
  OnDevice device(Config(1, 64));
  Assign(&device.store, Range(40, 1), 0.0f);
  SaveAll(&device.store, "g");
  std::mt19937 random(3);
  AllRows expected;
  for (int save = 0; save < 600; ++save) {
    const Keys keys{random() % 40};
    Assign(&device.store, keys, static_cast<float>(save));
    expected[keys[0]] = Kept{Floats(1, static_cast<float>(save)), {}};
    const Collector changes = Changes(&device.store);
    CHECK(changes.found == expected);
    const bool fails = random() % 3 == 0;
    device.store.EndSave(fails ? "" : "g");
    if (!fails) expected.clear();
  }
}

TEST(ASnapshotIsTheTableOfThatMomentWhateverIsDoneAfterwards) {
  for (const bool hashed : {true, false}) {
    OnDevice device(Config(3, 600, hashed));
    Assign(&device.store, Range(100, 1), 1.0f);
    Train(&device, 60, 1, 3);
    Erase(&device.store, Range(10, 1));
    const Collector before = ReadAll(device.store);
    device.store.BeginSave(Of::kAllRows);
    CHECK(device.store.Changes().copied_bytes > 0);
    int64_t step = 3;
    uint64_t key = 0;
    Collector read(3, 7, [&] {
      if (++step > 8) return;
      Train(&device, 50, step, step);
      Erase(&device.store, {20 + ++key, 60 + key});
      Assign(&device.store, {key, 400 + key}, 9.0f);
    });
    device.store.ReadSnapshot(cpu, &read);
    CHECK_EQ(read.expected, before.expected);
    CHECK(read.found == before.found);
    CHECK(!(ReadAll(device.store).found == before.found));
    CHECK_EQ(device.store.Changes().copied_bytes, 0);
    device.store.EndSave("g1");
    // What was done meanwhile belongs to the next one.
    OnCpu again(Config(3, 600, hashed));
    Restore(&again.store, read);
    ReadLink(&again.store, Changes(&device.store, Of::kChanges), "g2");
    device.store.EndSave("g2");
    CheckSame(ReadAll(again.store).found, ReadAll(device.store).found);
  }
}

TEST(MisuseIsTold) {
  OnDevice device(Config(3, 100)), other(Config(3, 100));
  TableStore& store = device.store;
  Collector read(3, 7);
  CHECK_THROWS(store.ReadSnapshot(cpu, &read), sok::FailedPrecondition, "there is no snapshot to read");
  CHECK_THROWS(store.ReadChanges(cpu, &read), sok::FailedPrecondition, "no save that its changes");
  CHECK_THROWS(store.BeginSave(Of::kChanges), sok::FailedPrecondition, "no save that its changes");
  CHECK(!store.Changes().is_on);
  store.BeginSave();
  CHECK_THROWS(store.ReadChanges(cpu, &read), sok::FailedPrecondition, "no save that its changes");
  store.EndSave("");
  store.BeginSave(Of::kAllRows);
  CHECK_THROWS(store.BeginSave(), sok::FailedPrecondition, "an asynchronous save is under way");
  CHECK_THROWS(store.Swap(&other.store), sok::FailedPrecondition, "an asynchronous save is under way");
  CHECK_THROWS(other.store.Swap(&store), sok::FailedPrecondition, "an asynchronous save is under way");
  store.ReadSnapshot(cpu, &read);
  CHECK_THROWS(store.ReadSnapshot(cpu, &read), sok::FailedPrecondition, "there is no snapshot to read");
  store.EndSave("g0");
  CHECK(store.Changes().is_on);
  store.Swap(&other.store);
  CHECK(!store.Changes().is_on && !other.store.Changes().is_on);
  device.Lookup({1});
  OnDevice identity(Config(3, 10, false));
  identity.Lookup({12});
  CHECK_THROWS(identity.store.BeginSave(Of::kAllRows), sok::InvalidArgument, "key 12 is outside [0, 10)");
  CHECK(!identity.store.Changes().is_on);
}

TEST(ASnapshotIsReadToItsEndThoughTheSaveEnds) {
  OnDevice device(Config(2, 50, false));
  Assign(&device.store, Range(20, 1), 1.0f);
  device.store.BeginSave(Of::kAllRows);
  Collector read(2, 7, [&] { device.store.EndSave(""); });
  device.store.ReadSnapshot(cpu, &read);
  CHECK_EQ(read.found.size(), size_t{20});
}

TEST(ATableWithoutMemoryForNotesIsSavedAsAWhole) {
  int64_t bytes;
  {
    OnDevice measured(Config(2, 50, false));
    Assign(&measured.store, Range(20, 1), 1.0f);
    bytes = measured.store.memory_bytes();
  }
  OnDevice device(Config(2, 50, false), bytes);
  Assign(&device.store, Range(20, 1), 1.0f);
  SaveAll(&device.store, "g0");
  CHECK(!device.store.Changes().is_on);
  CHECK_THROWS(device.store.BeginSave(Of::kChanges), sok::FailedPrecondition, "no save that its changes");
  CHECK_EQ(Changes(&device.store, Of::kAllRows).found.size(), size_t{20});
  device.store.EndSave("g1");
  CHECK_EQ(device.store.memory_bytes(), bytes);
}

TEST(ASnapshotThatFindsNoMemoryIsNotBegun) {
  sok::DeviceStore store(Config(6, 400), 0, 100, [] { return host_bytes; });
  Assign(&store, Range(300, 1), 1.0f);
  SaveAll(&store, "g0");
  Assign(&store, {5, 6}, 2.0f);
  host_bytes = 300 * 32 - 1;
  CHECK_THROWS(store.BeginSave(Of::kAllRows), sok::OutOfMemory,
               "copies its rows to the host: 9600 bytes, and 9599 are available");
  CHECK_EQ(store.Changes().rows, 2);
  CHECK_EQ(store.Changes().copied_bytes, 0);
  host_bytes = 2 * 32;
  CHECK_EQ(Changes(&store, Of::kChanges).found.size(), size_t{2});
  store.EndSave("g1");
}

// What the emulator's streams, and the thread sanitizer, are for.
TEST(AChainThatIsWrittenWhileAnotherStreamTrainsIsTheTable) {
  for (const bool hashed : {true, false}) {
    OnDevice device(Config(4, 400, hashed));
    OnCpu again(Config(4, 400, hashed));
    Assign(&device.store, Range(100, 1), 1.0f);
    std::atomic<bool> stop{false};
    std::thread trainer([&] {
      cudaStream_t stream;
      SOK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      {
        const sok::Cuda cuda{stream};
        sok::StreamScratch scratch(cuda);
        std::mt19937 random(7);
        for (int64_t step = 1; !stop; ++step) {
          Keys keys;
          for (uint64_t key = random() % 50; key < 300; key += 1 + random() % 50) keys.push_back(key);
          DeviceArray<uint64_t> words(keys);
          DeviceArray<int64_t> ids(Size(keys));
          DeviceArray<float> grads(Floats(keys.size() * 4, 0.5f));
          scratch.Reset();
          device.store.table().Lookup(cuda, &scratch, words, Size(keys), true, nullptr, ids);
          device.store.table().Apply(cuda, &scratch, Rule("adagrad", step), "ada", sok::Nonfinite::kAllow, 1.0f, ids,
                                     grads, Size(keys));
          SOK_CUDA(cudaStreamSynchronize(stream));
        }
      }
      SOK_CUDA(cudaStreamDestroy(stream));
    });
    std::mt19937 random(9);
    for (int save = 0; save < 12; ++save) {
      const std::string name = "g" + std::to_string(save);
      const bool is_full = save < 2, aside = save % 2 == 1;
      Collector link(4, 16);
      device.store.BeginSave(!aside ? Of::kNothing : is_full ? Of::kAllRows : Of::kChanges);
      Erase(&device.store, {random() % 300, random() % 300, random() % 300});
      if (aside) {
        device.store.ReadSnapshot(cpu, &link);
      } else if (is_full) {
        device.store.ReadAll(cpu, &link);
      } else {
        device.store.ReadChanges(cpu, &link);
      }
      const bool fails = save % 5 == 2;
      device.store.EndSave(fails ? "" : name);
      if (fails) continue;
      if (is_full) link.erased = again.store.Keys();
      ReadLink(&again.store, link, name);
    }
    stop = true;
    trainer.join();
    ReadLink(&again.store, Changes(&device.store), "last");
    device.store.EndSave("last");
    CHECK(ReadAll(again.store).found == ReadAll(device.store).found);
  }
}
