// DeviceStore beside EmbeddingTable: everything but lookups and updates gives the same.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device_stores.h"
#include "sok/device_words.h"
#include "sok/error.h"

namespace {

struct Exported {
  Keys keys;
  Floats rows, slots;
  std::vector<int64_t> stamps;
};

Exported Export(const TableStore& store, const std::string& set) {
  Exported e;
  store.Export(cpu, set, [&](int64_t n, int64_t floats) {
    e.keys.resize(static_cast<size_t>(n));
    e.rows.resize(static_cast<size_t>(n * store.dim()));
    e.slots.resize(static_cast<size_t>(n * floats));
    e.stamps.resize(static_cast<size_t>(n));
    const bool slots = !set.empty();
    return TableStore::ExportTarget{e.keys.data(), e.rows.data(), slots ? e.slots.data() : nullptr,
                                    slots ? e.stamps.data() : nullptr};
  });
  return e;
}

}  // namespace

TEST(EverythingReadIsWhatTheCpuReads) {
  for (const bool hashed : {true, false}) {
    OnDevice device(Config(3, 500, hashed));
    OnCpu host(Config(3, 500, hashed));
    Train(&device, 60, 1, 4);
    Train(&host, 60, 1, 4);
    const Collector mine = ReadAll(device.store), theirs = ReadAll(host.store);
    CHECK_EQ(mine.begins, 1);
    CHECK_EQ(mine.expected, 60);
    CheckSame(mine.found, theirs.found);
    CHECK_EQ(device.store.size(), 60);
    CHECK(device.store.Keys() == host.store.Keys());
    const auto sets = device.store.SlotSets();
    CHECK_EQ(sets.size(), size_t{2});
    CHECK_EQ(sets[0].name, std::string("exact"));
    CHECK_EQ(sets[0].calls, 4);
    CHECK_EQ(sets[1].calls, 0);
    for (const std::string set : {"", "exact", "ada"}) {
      const Exported a = Export(device.store, set), b = Export(host.store, set);
      CHECK(a.keys == b.keys);
      CheckClose(a.rows, b.rows);
      CheckClose(a.slots, b.slots);
      if (!set.empty()) CHECK(a.stamps == b.stamps);
    }
    const Keys some{3, 0, 177, 3};
    for (const std::string set : {"exact", "ada"}) {
      const auto floats = static_cast<size_t>(device.store.SlotFloats(set));
      Floats a(4 * floats), b(4 * floats);
      std::vector<int64_t> stamps(4), expected(4);
      device.store.Slots(set, some.data(), 4, a.data(), stamps.data());
      host.store.Slots(set, some.data(), 4, b.data(), expected.data());
      CheckClose(a, b);
      CHECK(stamps == expected);
    }
  }
}

#if defined(SOK_CUDA_EMULATED)  // which counts

TEST(WhatGoesToADeviceGoesByPinnedMemory) {
  std::vector<uint64_t> words((size_t{40} << 20) / 8);
  for (size_t i = 0; i < words.size(); ++i) words[i] = i * 0x9E3779B97F4A7C15ull;
  DeviceArray<uint64_t> there(Size(words));
  const sok::Cuda cuda{};
  const auto before = sok_emulator::CountsSoFar();
  sok::CopyToDevice(cuda, there, words.data(), Size(words) * int64_t{sizeof(uint64_t)});
  const auto counts = sok_emulator::CountsSoFar() - before;
  CHECK_EQ(counts.to_device, 2);  // of 32 MiB at most
  CHECK_EQ(counts.pageable, 0);
  CHECK_EQ(counts.host_waits, 0);
  CHECK(there.Get() == words);
}

TEST(PartsThatLieApartGoToADeviceByOneCopy) {
  const std::vector<uint64_t> first(1000, 7);
  const std::vector<uint32_t> second(3, 9);
  std::vector<uint64_t> third((size_t{40} << 20) / 8);  // goes on where the second copy begins
  for (size_t i = 0; i < third.size(); ++i) third[i] = i * 0x9E3779B97F4A7C15ull;
  constexpr int64_t kSecond = 8064, kThird = 8128;
  DeviceArray<uint64_t> there(kThird / 8 + Size(third));
  const sok::HostPart parts[] = {{first.data(), 8000, 0},
                                 {second.data(), 12, kSecond},
                                 {nullptr, 0, kThird},
                                 {third.data(), Size(third) * 8, kThird}};
  const sok::Cuda cuda{};
  const auto before = sok_emulator::CountsSoFar();
  sok::CopyToDevice(cuda, there, parts, 1);
  sok::CopyToDevice(cuda, there, parts, 4);
  sok::CopyToDevice(cuda, there, parts, 0);
  const auto counts = sok_emulator::CountsSoFar() - before;
  CHECK_EQ(counts.to_device, 1 + 2);
  CHECK_EQ(counts.pageable, 0);
  CHECK_EQ(counts.host_waits, 0);
  const std::vector<uint64_t> found = there.Get();
  CHECK(std::equal(first.begin(), first.end(), found.begin()));
  CHECK_EQ(std::memcmp(&found[kSecond / 8], second.data(), 12), 0);
  CHECK(std::equal(third.begin(), third.end(), found.begin() + kThird / 8));
}

// Rows that are read come by two blocks in turns: the copies are not ones that a host waits for one by one.
TEST(ManyRowsAreReadByBlocksThatTakeTurns) {
  constexpr int64_t kDim = 1024, kRows = 11000;  // three turns of 16 MiB
  sok::DeviceStore store(Config(kDim, kRows), 0);
  Keys keys(kRows);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = 7 * i;
  Floats rows(static_cast<size_t>(kRows * kDim));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 65521);
  sok::Scratch scratch;
  store.Assign(cpu, &scratch, keys.data(), rows.data(), kRows);
  const auto before = sok_emulator::CountsSoFar();
  const Exported read = Export(store, "");
  const auto counts = sok_emulator::CountsSoFar() - before;
  CHECK(read.keys == keys);
  CHECK(read.rows == rows);
  CHECK(counts.pageable <= 4);  // counts and keys
  CHECK(counts.to_host >= 5);
}

#endif

TEST(RestoredRowsGoOnAsIfNothingHadHappened) {
  for (const bool hashed : {true, false}) {
    OnDevice device(Config(3, 500, hashed)), again(Config(3, 400, hashed));
    OnCpu host(Config(3, 500, hashed));
    Train(&device, 60, 1, 4);
    const Collector saved = ReadAll(device.store);
    CHECK_EQ(Restore(&again.store, saved), 60);
    CHECK_EQ(Restore(&host.store, saved), 60);
    CHECK_EQ(Restore(&again.store, saved), 0);
    CheckSame(ReadAll(again.store).found, saved.found);
    CHECK_EQ(again.store.SlotSets()[0].calls, 0);
    Train(&device, 60, 5, 7);
    Train(&again, 60, 5, 7);
    Train(&host, 60, 5, 7);
    CheckSame(ReadAll(again.store).found, ReadAll(device.store).found);
    CheckSame(ReadAll(host.store).found, ReadAll(device.store).found);
  }
}

TEST(RowsAreRestoredColumnByColumn) {
  OnDevice device(Config(3, 500)), again(Config(3, 400)), narrow(Config(2, 400));
  OnCpu host(Config(2, 400));
  Train(&device, 60, 1, 4);
  const Collector saved = ReadAll(device.store);
  CHECK_EQ(Restore(&again.store, saved, {3, 2, 2, 1}), 60);
  CHECK_EQ(Restore(&again.store, saved, {3, 0, 0, 2}), 0);
  CheckSame(ReadAll(again.store).found, saved.found);
  CHECK_EQ(Restore(&narrow.store, saved, {3, 1, 0, 2}), 60);
  CHECK_EQ(Restore(&host.store, saved, {3, 1, 0, 2}), 60);
  CheckSame(ReadAll(narrow.store).found, ReadAll(host.store).found);
  CHECK_EQ(Restore(&again.store, ReadAll(narrow.store), {2, 0, 1, 2}), 0);
  CheckSame(ReadAll(again.store).found, saved.found);
}

TEST(OfEqualKeysTheLastCountsAndOtherRanksKeysAreLeftOut) {
  sok::TableConfig config = Config(2, 100);
  config.world_size = 3;
  config.rank = 1;
  OnDevice device(config);
  OnCpu host(config);
  sok::Scratch scratch;
  const Keys keys{1, 4, 2, 1, 7, 6, 4};
  Floats rows;
  for (size_t i = 0; i < 2 * keys.size(); ++i) rows.push_back(static_cast<float>(i));
  for (TableStore* store : {static_cast<TableStore*>(&device.store), static_cast<TableStore*>(&host.store)}) {
    store->Assign(cpu, &scratch, keys.data(), rows.data(), Size(keys));
    const TableStore::SlotSetInfo info{"ada", Rule("adagrad", 1), 0, {}};
    const Keys more{4, 9, 10, 4};
    CHECK_EQ(store->Restore(cpu, &scratch, {info}, {more.data(), rows.data(), {rows.data() + 1}, 4}), 1);
  }
  CheckSame(ReadAll(device.store).found, ReadAll(host.store).found);
  CHECK_EQ(device.store.size(), 4);
}

TEST(AllOrNothingIsStored) {
  OnDevice device(Config(2, 10));
  Assign(&device.store, Range(8), 1.0f);
  CHECK_THROWS(Assign(&device.store, Range(12), 2.0f), sok::TableFull, "full: all 10 rows");
  OnDevice other(Config(2, 100));
  Train(&other, 12, 1, 2);
  const Collector saved = ReadAll(other.store);
  CHECK_THROWS(Restore(&device.store, saved), sok::TableFull, "full: all 10 rows");
  CHECK_EQ(device.store.size(), 8);
  for (const auto& [key, kept] : ReadAll(device.store).found) CHECK(kept.row == Floats(2, 1.0f));
  OnDevice identity(Config(2, 10, false));
  CHECK_THROWS(Assign(&identity.store, {3, 10}, 1.0f), sok::InvalidArgument, "key 10 is outside [0, 10)");
  CHECK_EQ(identity.store.size(), 0);
  TableStore::SlotSetInfo info{"exact", Rule("adagrad", 1), 0, {}};
  const Floats zeros(4);
  const Keys key{1};
  sok::Scratch scratch;
  CHECK_THROWS(other.store.Restore(cpu, &scratch, {info}, {key.data(), zeros.data(), {zeros.data()}, 1}),
               sok::InvalidArgument, "slot set 'exact' belongs to rule 'adam' here, and to 'adagrad'");
}

TEST(ErasedRowsAreCountedAndGone) {
  for (const bool hashed : {true, false}) {
    OnDevice device(Config(2, 100, hashed));
    CHECK_EQ(device.store.Erase(nullptr, 0), 0);
    Assign(&device.store, Range(20), 1.0f);
    const Keys some{0, 3, 3, 1, 6};
    CHECK_EQ(device.store.Erase(some.data(), 5), 3);
    CHECK_EQ(device.store.size(), 17);
    CHECK_EQ(device.store.Keys()[0], uint64_t{9});
    Assign(&device.store, {0}, 5.0f);
    CHECK(ReadAll(device.store).found.at(0).row == Floats(2, 5.0f));
  }
  OnDevice identity(Config(2, 100, false));
  const Keys outside{100};
  CHECK_THROWS(identity.store.Erase(outside.data(), 1), sok::InvalidArgument, "key 100 is outside");
}

TEST(RowsMadeAreThoseOfTheCpu) {
  for (const bool hashed : {true, false}) {
    OnDevice device(Config(3, 500, hashed)), other_device(Config(3, 500, hashed));
    OnCpu host(Config(3, 500, hashed)), other_host(Config(3, 500, hashed));
    const auto check = [&] {
      for (const auto& [mine, theirs] : {std::pair<TableStore*, TableStore*>{&device.store, &host.store},
                                         {&other_device.store, &other_host.store}}) {
        CHECK_EQ(mine->size(), theirs->size());
        CHECK_EQ(mine->policy_counts().made, theirs->policy_counts().made);
      }
    };
    check();
    Train(&device, 60, 1, 4);
    Train(&host, 60, 1, 4);
    check();
    const Keys some = {1, 2, 3, 400};  // one has no row
    CHECK_EQ(device.store.Erase(some.data(), 4), host.store.Erase(some.data(), 4));
    check();
    device.store.Swap(&other_device.store);
    host.store.Swap(&other_host.store);
    check();
    Train(&device, 20, 1, 1);
    Train(&host, 20, 1, 1);
    check();
    CHECK_EQ(device.store.policy_counts().made, 80);
    CHECK_EQ(other_device.store.policy_counts().made, 0);
    CHECK(other_device.store.size() < 60);
  }
}

TEST(SwappedTablesHoldWhatTheOtherHeld) {
  for (const bool hashed : {true, false}) {
    OnDevice a(Config(3, 200, hashed)), b(Config(3, 200, hashed));
    Train(&a, 40, 1, 3);
    Train(&b, 10, 1, 1);
    const std::vector<int64_t> of_a = a.Lookup({0, 3}), of_b = b.Lookup({0, 3});
    const Collector first = ReadAll(a.store), second = ReadAll(b.store);
    const int64_t bytes = a.store.memory_bytes() + b.store.memory_bytes();
    a.store.Swap(&b.store);
    CheckSame(ReadAll(a.store).found, second.found);
    CheckSame(ReadAll(b.store).found, first.found);
    CHECK(a.store.memory_bytes() + b.store.memory_bytes() >= bytes);  // the counts of erasures have come
    CHECK_EQ(a.store.SlotSets()[0].calls, 1);
    // Gradients of lookups from before mean rows that are gone.
    a.Apply(Rule("adagrad", 1), "ada", of_a, Floats(6, 1.0f));
    b.Apply(Rule("adagrad", 1), "ada", of_b, Floats(6, 1.0f));
    CheckSame(ReadAll(a.store).found, second.found);
    CheckSame(ReadAll(b.store).found, first.found);
    // And the tables go on.
    const std::vector<int64_t> ids = b.Lookup({0, 3});
    b.Apply(Rule("adagrad", 1), "ada", ids, Floats(6, 1.0f));
    CHECK(!(ReadAll(b.store).found.at(0).row == first.found.at(0).row));
    Train(&a, 40, 2, 3);
    CHECK_EQ(a.store.size(), 20);
  }
  OnDevice a(Config(3, 200)), b(Config(2, 200));
  CHECK_THROWS(a.store.Swap(&b.store), sok::InvalidArgument, "configured differently");
  OnCpu host(Config(3, 200));
  CHECK_THROWS(a.store.Swap(&host.store), sok::InvalidArgument, "cannot swap rows");
  CHECK_THROWS(host.store.Swap(&a.store), sok::InvalidArgument, "cannot swap rows");
}

TEST(ASwapWithAnEmptyTableBringsNoOldRowsBack) {
  OnDevice a(Config(3, 200)), b(Config(3, 200));
  Train(&a, 40, 1, 3);
  const std::vector<int64_t> old = a.Lookup({0, 3});
  a.store.Swap(&b.store);
  CHECK_EQ(a.store.size(), 0);
  CHECK_EQ(b.store.size(), 40);
  const std::vector<int64_t> fresh = a.Lookup({0, 3});
  const Collector before = ReadAll(a.store);
  a.Apply(Rule("adagrad", 1), "ada", old, Floats(6, 1.0f));
  const Collector after = ReadAll(a.store);
  for (const auto& [key, kept] : before.found) CheckClose(kept.row, after.found.at(key).row);
  a.Apply(Rule("adagrad", 1), "ada", fresh, Floats(6, 1.0f));
  CHECK(!(ReadAll(a.store).found.at(0).row == before.found.at(0).row));
}

TEST(SkippedCallsAreThoseOfTheCpu) {
  OnDevice device(Config(3, 200));
  OnCpu host(Config(3, 200));
  Train(&device, 20, 1, 3);
  Train(&host, 20, 1, 3);
  TableStore::SlotSetInfo info{"exact", Rule("adam", 8), 8, {{4, 0.125f}, {6, 0.0625f}}};
  for (TableStore* store : {static_cast<TableStore*>(&device.store), static_cast<TableStore*>(&host.store)}) {
    store->SkipCalls("g1", {info});
    CHECK_EQ(store->SlotSets()[0].calls, 8);
    store->SkipCalls("g1", {info});  // told once
    CHECK_EQ(store->SlotSets()[0].calls, 8);
    TableStore::SlotSetInfo another = info;
    another.missed[1].alpha = 1.0f;
    CHECK_THROWS(store->SkipCalls("g1", {another}), sok::InvalidArgument, "disagree about the steps of 'exact'");
    store->SkipCalls("g2", {{"fresh", Rule("adam", 1), 2, {{1, 0.5f}}}});
    CHECK_EQ(store->SlotSets()[2].calls, 2);
    CHECK_THROWS(store->SkipCalls("g3", {{"ada", Rule("adam", 1), 2, {{1, 0.5f}}}}), sok::InvalidArgument,
                 "belongs to rule 'adagrad'");
    CHECK_THROWS(store->SkipCalls("g4", {{"exact", Rule("adam", 1), int64_t{1} << 32, {{1, 0.5f}}}}),
                 sok::InvalidArgument, "more than can be counted");
  }
  CheckSame(ReadAll(device.store).found, ReadAll(host.store).found);
  Train(&device, 20, 9, 10);
  Train(&host, 20, 9, 10);
  CheckSame(ReadAll(device.store).found, ReadAll(host.store).found);
}

TEST(RoomForKeysIsNotRoomForRows) {
  OnDevice device(Config(64, 100'000));
  device.store.Reserve(cpu, 50'000, false);
  const int64_t keys = device.store.memory_bytes();
  CHECK(keys < 50'000 * 64);
  device.store.Reserve(cpu, 50'000, true);
  CHECK(device.store.memory_bytes() >= keys + 50'000 * 256);
  CHECK_THROWS(device.store.Reserve(cpu, 100'001, true), sok::InvalidArgument, "can reserve 0 to 100000 rows");
}

// Every update moves every row by one: who reads sees all rows after the same number of them.
TEST(WhatIsReadWhileOthersTrainIsOnePointInTime) {
  OnDevice device(Config(2, 200));
  const Keys keys = Range(30);
  Assign(&device.store, keys, 0.0f);
  std::atomic<bool> stop{false};
  std::thread trainer([&] {
    cudaStream_t stream;
    SOK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    {
      const sok::Cuda cuda{stream};
      sok::StreamScratch scratch(cuda);
      DeviceArray<uint64_t> words(keys);
      DeviceArray<int64_t> ids(Size(keys));
      DeviceArray<float> grads(Floats(60, 1.0f));
      const std::vector<double> hyper{1.0};
      const sok::UpdateRule sgd = sok::MakeUpdateRule("sgd", hyper.data(), 1, 1);
      while (!stop) {
        scratch.Reset();
        device.store.table().Lookup(cuda, &scratch, words, Size(keys), true, nullptr, ids);
        device.store.table().Apply(cuda, &scratch, sgd, "sgd", sok::Nonfinite::kAllow, 1.0f, ids, grads, Size(keys));
        SOK_CUDA(cudaStreamSynchronize(stream));
      }
    }
    SOK_CUDA(cudaStreamDestroy(stream));
  });
  for (int i = 0; i < 15; ++i) {
    const Collector all = ReadAll(device.store);
    CHECK_EQ(all.found.size(), size_t{30});
    for (const auto& [key, kept] : all.found) CHECK(kept.row == all.found.at(0).row);
    const Exported e = Export(device.store, "");
    for (const float value : e.rows) CHECK_EQ(value, e.rows[0]);
  }
  stop = true;
  trainer.join();
}

TEST(WhatWasFoundBadIsToldByTheNextReadOnce) {
  OnDevice device(Config(2, 10, false));
  Collector sink(2);
  device.Lookup({1, 12});
  CHECK_THROWS(device.store.size(), sok::InvalidArgument, "key 12 is outside [0, 10)");
  CHECK_EQ(device.store.size(), 1);
  device.Lookup({13});
  CHECK_THROWS(device.store.Keys(), sok::InvalidArgument, "key 13");
  device.Lookup({14});
  CHECK_THROWS(device.store.ReadAll(cpu, &sink), sok::InvalidArgument, "key 14");
  CHECK_EQ(sink.begins, 0);
  CHECK_EQ(ReadAll(device.store).found.size(), size_t{1});
}

TEST(SlotsOfNobodyAreRefused) {
  OnDevice device(Config(2, 10));
  CHECK_THROWS(Export(device.store, "none"), sok::FailedPrecondition, "no optimizer has used slot set 'none'");
  Train(&device, 2, 1, 1);
  const Keys unknown{77};
  Floats slots(4);
  std::vector<int64_t> stamps(1);
  CHECK_THROWS(device.store.Slots("exact", unknown.data(), 1, slots.data(), stamps.data()), sok::InvalidArgument,
               "key 77 has no row");
}
