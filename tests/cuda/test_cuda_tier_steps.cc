// What a DeviceTier says and does in a step: of room, gradients that come late, rows that leave, and what fails.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "sok/combine.h"
#include "threads.h"
#include "tiers.h"

namespace {

// bytes: of the device; 0: the smallest budget.
sok::TableConfig TierConfig(int64_t dim = 3, int64_t bytes = 0, int64_t capacity = 4000) {
  sok::TableConfig config = Config(dim, capacity);
  config.storage.device_bytes = bytes == 0 ? LeastDeviceBytes(config) : bytes;
  return config;
}

sok::TableConfig Evicting(int64_t older_than, float norm_below, int64_t every) {
  sok::TableConfig config = TierConfig();
  config.policies.older_than = older_than;
  config.policies.norm_below = norm_below;
  config.policies.every = every;
  return config;
}

Keys From(uint64_t first, int64_t n) {
  Keys keys;
  for (int64_t i = 0; i < n; ++i) keys.push_back(first + static_cast<uint64_t>(i));
  return keys;
}

Floats Ones(const Ids& ids, int64_t dim = 3) { return Floats(ids.size() * static_cast<size_t>(dim), 1.0f); }

}  // namespace

TEST(ABudgetThatIsTooSmallIsRefusedByItsNumber) {
  const int64_t least = LeastDeviceBytes(Config(3, 4000));
  CHECK(least > 0);
  CHECK_THROWS(
      OnTier(TierConfig(3, least - 1)), sok::InvalidArgument,
      "needs at least " + std::to_string(least) + " bytes of the device. Received: " + std::to_string(least - 1));
  CHECK_EQ(OnTier(TierConfig(3, least)).counts().rows_on_device, 0);
}

// Whatever comes with the first optimizers, up to three vectors of slots.
TEST(AsManyRowsAsATierTakesFindRoom) {
  for (const int64_t dim : {1, 6}) {
    for (const double times : {1.0, 1.7}) {
      for (const bool adam_first : {true, false}) {
        const auto least = static_cast<double>(LeastDeviceBytes(Config(dim, 100000)));
        OnTier on(TierConfig(dim, static_cast<int64_t>(times * least), 100000));
        uint64_t next = 0;
        for (int64_t step = 1; step <= 5; ++step) {
          const Keys keys = From(next, on.counts().most_rows_on_device);
          next += keys.size();
          const Ids ids = on.Lookup(keys, true);
          CHECK_EQ(on.counts().rows_on_device, Size(keys));
          if (step > 1) on.Apply(Rule(adam_first ? "adam" : "adagrad", step), "one", ids, Ones(ids, dim));
          if (step > 2) on.Apply(Rule(adam_first ? "adagrad" : "adam", step), "two", ids, Ones(ids, dim));
          on.tier->EndStep(cpu);
        }
        CHECK(on.counts().device_bytes <= on.tier->config().storage.device_bytes);
      }
    }
  }
}

TEST(AStepOfMoreRowsThanThereIsRoomForIsRefusedAndAllGoesOn) {
  TierPair pair(TierConfig());
  OnTier& on = pair.tier();
  const int64_t most = on.counts().most_rows_on_device + 1;
  const TierPair::Found found = pair.Lookup(From(0, 20), true);
  CHECK_THROWS(
      on.Lookup(From(100, most), true), sok::OutOfMemory,
      std::to_string(most) + " rows of a lookup have to come to the device, and it has no room for them beside");
  CHECK_THROWS(on.Lookup(From(100, most), false), sok::OutOfMemory, "Give the table's storage more gpu_bytes");
  sok::Scratch scratch;
  const Keys others = From(100, most);
  Floats rows(others.size() * 3);
  Ids ids(others.size());
  pair.twin().Lookup(cpu, &scratch, others.data(), most, true, nullptr, rows.data(), ids.data());
  pair.Apply(Rule("adagrad", 1), "ada", found, Ones(found.tier));  // those of before are still there
  pair.Compare(others);
  pair.EndStep();
  const int64_t now = on.counts().most_rows_on_device;
  const TierPair::Found again = pair.Lookup(From(100, std::min(most, now)), true);
  pair.Apply(Rule("adagrad", 2), "ada", again, Ones(again.tier));
  pair.Compare(others);
}

TEST(RowsOfAStepStayUntilItEnds) {
  OnTier on(TierConfig());
  const int64_t most = on.counts().most_rows_on_device;
  const Ids ids = on.Lookup(From(0, 10), true);
  for (uint64_t first = 1000; first < 1000 + 20 * static_cast<uint64_t>(most); first += static_cast<uint64_t>(most) / 2)
    on.Lookup(From(first, most / 2), false);
  for (uint64_t first = 0; first < 10; ++first) CHECK(on.Lookup({first}, false)[0] == ids[first]);
  on.Apply(Rule("adagrad", 1), "ada", ids, Ones(ids));
  on.tier->EndStep(cpu);
  on.Lookup(From(5000, on.counts().most_rows_on_device), true);
  CHECK_EQ(on.counts().rows_on_device, on.counts().most_rows_on_device);
  on.tier->EndStep(cpu);
  CHECK_EQ(on.Lookup(From(0, 1), false)[0] == ids[0], false);  // it came again
}

TEST(AGradientOfARowThatWasSentHomeIsRefusedAndChangesNothing) {
  OnTier on(TierConfig());
  const Ids ids = on.Lookup(From(0, 10), true);
  on.Apply(Rule("adagrad", 1), "ada", ids, Ones(ids));
  on.tier->EndStep(cpu);
  const Ids later = on.Lookup(From(1000, on.counts().most_rows_on_device), true);
  const AllRows before = ReadAll(*on.tier).found;
  const auto set = on.tier->SlotSets();
  CHECK_THROWS(on.Apply(Rule("adagrad", 2), "ada", {ids[3]}, Ones({0})), sok::InvalidArgument,
               "a gradient is for a row that has left the device since its lookup");
  Ids mixed = later;
  mixed.push_back(ids[9]);
  CHECK_THROWS(on.Apply(Rule("adam", 2), "exact", mixed, Ones(mixed)), sok::InvalidArgument, "has left the device");
  CheckSame(ReadAll(*on.tier).found, before);
  CHECK_EQ(on.tier->SlotSets().size(), set.size());
  on.Apply(Rule("adagrad", 2), "ada", later, Ones(later));
  on.tier->EndStep(cpu);
  const Ids now = on.Lookup(From(0, 10), true);
  CHECK_THROWS(on.Apply(Rule("adagrad", 3), "ada", ids, Ones(ids)), sok::InvalidArgument, "has left the device");
  on.Apply(Rule("adagrad", 3), "ada", now, Ones(now));
}

TEST(AGradientOfARowThatAnEvictionTookIsDropped) {
  TierPair pair(Evicting(1, 0.0f, 1));
  const TierPair::Found gone = pair.Lookup(From(0, 10), true);
  pair.Apply(Rule("adagrad", 1), "ada", gone, Ones(gone.tier));
  pair.EndStep();
  pair.Lookup(From(5, 10), true);
  pair.EndStep();  // 0 .. 4 leave
  CHECK_EQ(pair.twin().size(), 10);
  pair.Apply(Rule("adagrad", 2), "ada", gone, Ones(gone.tier));
  pair.Compare(From(0, 20));
  const TierPair::Found fresh = pair.Lookup(From(0, 10), true);
  pair.Apply(Rule("adagrad", 3), "ada", gone, Ones(gone.tier));  // of numbers that others may have by now
  pair.Compare(From(0, 20));
  pair.Apply(Rule("adagrad", 4), "ada", fresh, Ones(fresh.tier));
  const Keys some = From(0, 3);
  pair.Both([&](TableStore* store) { store->Erase(some.data(), Size(some)); });
  pair.Apply(Rule("adam", 5), "exact", fresh, Ones(fresh.tier));
  pair.Compare(From(0, 20));
}

TEST(HitsAndMissesAreCountedByRowsOfACall) {
  OnTier on(TierConfig());
  on.Lookup({1, 2, 3, 1}, true);
  CHECK_EQ(on.counts().device_misses, 3);
  CHECK_EQ(on.counts().device_hits, 0);
  on.Lookup({1, 1, 2, 7}, false);  // 7 has no row
  CHECK_EQ(on.counts().device_misses, 3);
  CHECK_EQ(on.counts().device_hits, 2);
  on.Lookup({7, 3}, true, nullptr, /*on_host=*/false);
  CHECK_EQ(on.counts().device_misses, 4);
  CHECK_EQ(on.counts().device_hits, 3);
  CHECK_EQ(on.counts().rows_on_device, 4);
  const Keys gone{1};
  on.tier->Erase(gone.data(), 1);
  CHECK_EQ(on.counts().rows_on_device, 3);
}

// Features of two tiers and of a table that has none; keys come in several of them, as 32-bit words too.
TEST(AGroupOfSeveralTiersIsBroughtAtOnce) {
  TierPair first(TierConfig()), second(TierConfig(3, 200000));
  OnDevice plain(Config(3, 100));
  const sok::Cuda& cuda = first.tier().cuda;
  for (int64_t step = 1; step <= 4; ++step) {
    const Keys a = From(0, 10 + step), b = From(5 * static_cast<uint64_t>(step), 12);
    const std::vector<uint32_t> narrow = {7, 0xFFFFFFFFu, 3};
    const Keys wide = {7, ~uint64_t{0}, 3};
    DeviceArray<uint64_t> on_a(a), on_b(b);
    DeviceArray<uint32_t> on_narrow(narrow);
    DeviceArray<int64_t> ids(2 * Size(a) + 2 * Size(b) + 3);
    first.tier().scratch.Reset();
    std::vector<sok::DeviceTable::Asked> asked;
    std::vector<sok::DeviceTier::Asked> tiered;
    asked.reserve(5);
    int64_t at = 0;
    const auto add = [&](TierPair* pair, sok::DeviceKeys keys, int64_t n) {
      asked.push_back({&pair->tier().tier->device(), keys, n, nullptr, ids + at});
      tiered.push_back({pair->tier().tier.get(), &asked.back(), nullptr});
      at += n;
    };
    add(&second, on_a.data(), Size(a));
    add(&first, on_a.data(), Size(a));
    add(&first, on_b.data(), Size(b));
    add(&second, on_b.data(), Size(b));
    add(&first, {on_narrow.data(), /*unsigned_words=*/false}, 3);
    {
      const sok::DeviceTier::Held held(cuda, cpu, &first.tier().scratch, tiered, true);
      sok::DeviceTable::FindGroup(cuda, &first.tier().scratch, asked.data(), Size(asked));
    }
    const Ids found = ids.Get();
    for (const int64_t id : found) CHECK(id >= 0);
    for (const Keys& keys : {a, b, wide}) {
      sok::Scratch scratch;
      Floats rows(keys.size() * 3);
      Ids twins(keys.size());
      first.twin().Lookup(cpu, &scratch, keys.data(), Size(keys), true, nullptr, rows.data(), twins.data());
      if (keys.size() == 3) continue;
      second.twin().Lookup(cpu, &scratch, keys.data(), Size(keys), true, nullptr, rows.data(), twins.data());
    }
    first.Compare({});
    second.Compare({});
  }
  const sok::DeviceTier::Held held(cuda, cpu, &first.tier().scratch, {}, true);  // of none
}

TEST(AnUpdateThatOneTierRefusesChangesNone) {
  OnTier one(TierConfig()), other(TierConfig());
  const Ids mine = one.Lookup(From(0, 5), true), theirs = other.Lookup(From(0, 5), true);
  other.Apply(Rule("adagrad", 1), "set", theirs, Ones(theirs));
  for (const bool swaps : {false, true}) {
    OnTier &a = swaps ? other : one, &b = swaps ? one : other;
    std::vector<sok::DeviceTier::Updated> updated{{a.tier.get(), nullptr, 0}, {b.tier.get(), nullptr, 0}};
    CHECK_THROWS(sok::DeviceTier::Updating(one.cuda, cpu, updated, Rule("adam", 2), "set"), sok::InvalidArgument,
                 "slot set 'set' belongs to another rule");
    CHECK_EQ(one.tier->SlotSets().size(), size_t{0});
  }
}

TEST(WhatIsReadAheadIsNeverRefused) {
  sok::TableConfig config = TierConfig();
  config.hashed = false;
  OnTier on(config);
  on.Lookup(From(0, 10), true);
  const Keys some{3, 5000, ~uint64_t{0}};  // no row numbers of this table
  CHECK_EQ(on.tier->ReadAhead(cpu, some.data(), 3, 1), 0);
}

// A gradient for a row that no lookup gave is left out, and told by a later call, though the end of the step has met it
// first.
TEST(WhatAnUpdateCouldNotSayIsSaidAfterTheEndOfTheStep) {
  TierPair pair(Evicting(0, 1e-3f, 1));
  const TierPair::Found found = pair.Lookup(From(0, 10), true);
  pair.Apply(Rule("adagrad", 1), "ada", found, Ones(found.tier));
  pair.tier().Apply(Rule("adagrad", 2), "ada", {77}, Ones({77}));
  pair.EndStep();
  int told = 0;
  for (int i = 0; i < 3; ++i) {
    try {
      pair.tier().Lookup(From(0, 10), true);
    } catch (const sok::InvalidArgument& error) {
      told += std::string(error.what()).find("for row id 77") != std::string::npos;
    }
  }
  CHECK_EQ(told, 1);
  CHECK_EQ(pair.tier().tier->size(), 10);
}

#if defined(SOK_CUDA_EMULATED)  // where calls fail

// Each step whose end fails is ended later: a pass that it had to make is made, whatever ends come between.
TEST(AnEndOfAStepThatFailsIsMadeUpFor) {
  TierPair pair(Evicting(0, 0.5f, 3));
  const Keys keys = From(0, 20);
  for (int64_t step = 1; step <= 4; ++step) {
    const TierPair::Found found = pair.Lookup(keys, true);
    pair.Apply(Rule("adagrad", step, 0.02), "ada", found, Ones(found.tier));
    const Keys small{2, 3};
    if (step == 3) {
      Assign(pair.tier().tier.get(), small, 0.01f);
      Assign(&pair.twin(), small, 0.01f);
    }
    if (step < 3) {
      pair.EndStep();
      continue;
    }
    sok_emulator::FailCall(0, cudaErrorIllegalAddress, /*for_good=*/true);
    pair.tier().tier->EndStep(cpu);
    CHECK(sok_emulator::EndFaults() || step > 3);
    static_cast<void>(cudaGetLastError());
    pair.twin().EndStep(cpu);
    CHECK_EQ(pair.tier().tier->step.load(), step);
    if (step == 3) {  // nobody looks anything up in the next step
      sok_emulator::FailCall(0, cudaErrorIllegalAddress, /*for_good=*/true);
      pair.tier().tier->EndStep(cpu);
      sok_emulator::EndFaults();
      static_cast<void>(cudaGetLastError());
      pair.twin().EndStep(cpu);
      break;
    }
  }
  CHECK(pair.twin().policy_counts().evicted > 0);
  pair.Lookup(From(10, 5), true);  // makes up for what was left
  CHECK_EQ(pair.tier().tier->policy_counts().evicted, pair.twin().policy_counts().evicted);
  pair.Compare(keys);
}

#endif

// Each row has the same number in all its columns, and each update adds one.
TEST(ThreadsSeeWholeRowsAndNoneIsMissing) {
  constexpr int kThreadsOf = 4, kSteps = 60 / (kFewer == 1 ? 1 : 4);
  constexpr int64_t kPerThread = 12;
  std::vector<std::unique_ptr<OnTier>> tiers;
  for (int t = 0; t < 2; ++t) tiers.push_back(std::make_unique<OnTier>(TierConfig(8, 0)));
  for (auto& on : tiers) Assign(on->tier.get(), From(0, 4 * kPerThread * kThreadsOf), 0.0f);
  std::atomic<int64_t> refused{0};
  cudaStream_t streams[kThreadsOf];
  for (cudaStream_t& stream : streams) SOK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  RunTogether(kThreadsOf, [&](int thread) {
    const cudaStream_t stream = streams[thread];
    {
      const sok::Cuda cuda{stream};
      sok::StreamScratch scratch(cuda);
      for (int step = 0; step < kSteps; ++step) {
        const bool trains = thread % 2 == 0;
        const uint64_t first =
            trains ? static_cast<uint64_t>(thread * 2 * kPerThread) : static_cast<uint64_t>(step % 8) * 20;
        const Keys keys = From(first, trains ? kPerThread : 20);
        const int64_t n = Size(keys);
        DeviceArray<uint64_t> words(keys);
        DeviceArray<int64_t> ids(2 * n);
        DeviceArray<float> rows(2 * n * 8), grads(Floats(keys.size() * 8, -1.0f));
        scratch.Reset();
        const size_t order = static_cast<size_t>(thread / 2 % 2);
        OnTier *a = tiers[order].get(), *b = tiers[1 - order].get();
        sok::DeviceTable::Asked asked[] = {{&a->tier->device(), words.data(), n, rows.data(), ids.data()},
                                           {&b->tier->device(), words.data(), n, rows + n * 8, ids + n}};
        try {
          const sok::DeviceTier::Held held(
              cuda, cpu, &scratch, {{a->tier.get(), &asked[0], keys.data()}, {b->tier.get(), &asked[1], nullptr}},
              trains);
          sok::DeviceTable::LookupGroup(cuda, &scratch, asked, 2, false);
        } catch (const sok::OutOfMemory&) {  // others use the room
          ++refused;
          continue;
        }
        SOK_CUDA(cudaStreamSynchronize(stream));
        Floats read(static_cast<size_t>(2 * n * 8));
        Ids found(static_cast<size_t>(2 * n));
        SOK_CUDA(cudaMemcpyAsync(read.data(), rows, read.size() * 4, cudaMemcpyDeviceToHost, stream));
        SOK_CUDA(cudaMemcpyAsync(found.data(), ids, found.size() * 8, cudaMemcpyDeviceToHost, stream));
        SOK_CUDA(cudaStreamSynchronize(stream));
        for (int64_t i = 0; i < 2 * n; ++i) {
          CHECK(found[static_cast<size_t>(i)] >= 0);
          for (int64_t j = 1; j < 8; ++j)
            CHECK_EQ(read[static_cast<size_t>(i * 8 + j)], read[static_cast<size_t>(i * 8)]);
        }
        if (!trains) continue;
        const double rate[] = {1.0};
        const sok::UpdateRule sgd = sok::MakeUpdateRule("sgd", rate, 1, step + 1);
        sok::DeviceTier::Updating updating(cuda, cpu, {{a->tier.get(), ids.data(), n}, {b->tier.get(), ids + n, n}},
                                           sgd, "sgd");
        const sok::DeviceTable::Gradients gradients[] = {{&a->tier->device(), ids.data(), grads.data(), n, nullptr},
                                                         {&b->tier->device(), ids + n, grads.data(), n, nullptr}};
        sok::DeviceTable::ApplyGroup(cuda, &scratch, sgd, "sgd", sok::Nonfinite::kAllow, 1.0f, gradients, 2);
        updating.Done();
      }
      SOK_CUDA(cudaStreamSynchronize(stream));
    }
  });
  for (cudaStream_t stream : streams) SOK_CUDA(cudaStreamDestroy(stream));
  CHECK(refused == 0);
  for (auto& on : tiers) {
    const AllRows all = ReadAll(*on->tier).found;
    CHECK_EQ(Size(on->tier->Keys()), 4 * kPerThread * kThreadsOf);
    for (const auto& [key, kept] : all) {
      const auto part = static_cast<int64_t>(key) / kPerThread;
      CHECK(kept.row == Floats(8, part == 0 || part == 4 ? static_cast<float>(kSteps) : 0.0f));
    }
  }
}
