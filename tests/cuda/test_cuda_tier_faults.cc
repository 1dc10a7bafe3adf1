// A call of CUDA's that fails, for every call of every operation of a DeviceTier, as test_cuda_faults.cc has it of a
// table. What the host's table does stays done where the device cannot follow: then rows are brought again. Each seventh call
// or so fails; with SOK_TEST_SLOW=1 each does, which takes minutes.
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tiers.h"

namespace {

constexpr int64_t kDimOf = 3;

sok::TableConfig SmallTier() {
  sok::TableConfig config = Config(kDimOf, 4000);
  config.policies.norm_below = 0.02f;  // passes look at weights
  config.policies.every = 4;
  config.storage.device_bytes = LeastDeviceBytes(config);
  return config;
}

struct Fixture {
  Fixture() : of(SmallTier()), other(SmallTier()) {
    for (OnTier* each : {&of, &other}) {
      Update(each, "adagrad", Range(each == &of ? 50 : 10));
      each->tier->EndStep(cpu);
    }
    of.tier->BeginSave(TableStore::SnapshotOf::kNothing);
    of.tier->EndSave("first");
    Update(&of, "adagrad", Range(30, 6));
    of.tier->EndStep(cpu);
    Update(&of, "adagrad", {0, 3});
    Assign(of.tier.get(), {9, 12}, 0.001f);  // they leave with the next pass
    of.tier->EndStep(cpu);
  }

  void Update(OnTier* on, const std::string& rule, const Keys& keys) {
    const Ids ids = on->Lookup(keys, true);
    Floats grads;
    for (const uint64_t key : keys) grads.insert(grads.end(), kDimOf, static_cast<float>(key % 5) - 1.5f);
    on->Apply(Rule(rule, ++step), rule, ids, grads);
  }
  // A lookup for training makes up for the end of a step.
  AllRows Contents() {
    of.Lookup({0}, true);
    return ReadAll(*of.tier).found;
  }

  OnTier of, other;
  int64_t step = 0;
};

struct Operation {
  const char* name;
  std::function<void(Fixture*)> run;
  bool has_parts = false;  // of which the first may be done when a later one fails
};

std::vector<Operation> Operations() {
  const auto save = [](Fixture* f, TableStore::SnapshotOf of) {
    f->of.tier->BeginSave(of);
    Collector collector(kDimOf, 4);
    try {
      of == TableStore::SnapshotOf::kNothing ? f->of.tier->ReadChanges(cpu, &collector)
                                             : f->of.tier->ReadSnapshot(cpu, &collector);
    } catch (const std::exception&) {
      f->of.tier->EndSave("");
      throw;
    }
    f->of.tier->EndSave("second");
    CHECK_EQ(collector.found.size(), size_t{32});
  };
  return {
      {"a new tier", [](Fixture*) { OnTier(SmallTier()).Lookup({1, 2}, true); }},
      {"rows that are there", [](Fixture* f) { f->of.Lookup({0, 3, 6}, false); }},
      {"bring", [](Fixture* f) { f->of.Lookup({0, 3, 1000, 1003}, true); }, true},
      {"send home", [](Fixture* f) { f->of.Lookup(Range(60, 7), true); }, true},
      {"update", [](Fixture* f) { f->Update(&f->of, "adagrad", {0, 3, 9}); }, true},
      {"first update of another optimizer", [](Fixture* f) { f->Update(&f->of, "adam", {0, 3}); }, true},
      {"write home", [](Fixture* f) { f->of.tier->OnHost(); }},
      {"end of a step with evictions", [](Fixture* f) { f->of.tier->EndStep(cpu); }},
      {"assign", [](Fixture* f) { Assign(f->of.tier.get(), Range(40, 2), 3.0f); }},
      {"restore", [](Fixture* f) { Restore(f->of.tier.get(), ReadAll(*f->other.tier)); }},
      {"skip", [](Fixture* f) { f->of.tier->SkipCalls("x", {{"exact", Rule("adam", 8), 8, {{4, 0.125f}}}}); }},
      {"erase",
       [](Fixture* f) {
         const Keys keys{0, 6, 7};
         f->of.tier->Erase(keys.data(), Size(keys));
       }},
      {"reserve", [](Fixture* f) { f->of.tier->Reserve(cpu, 60, true); }},
      {"read all", [](Fixture* f) { ReadAll(*f->of.tier); }},
      {"save of changes", [&](Fixture* f) { save(f, TableStore::SnapshotOf::kNothing); }},
      {"snapshot", [&](Fixture* f) { save(f, TableStore::SnapshotOf::kChanges); }},
      {"swap", [](Fixture* f) { f->of.tier->Swap(f->other.tier.get()); }},
  };
}

enum class Told { kNothing, kMemory, kOther };

Told Run(const Operation& operation, Fixture* fixture) {
  try {
    operation.run(fixture);
  } catch (const sok::OutOfMemory&) {
    return Told::kMemory;
  } catch (const sok::CudaError&) {
    return Told::kOther;
  }
  return Told::kNothing;
}

const bool is_slow = std::getenv("SOK_TEST_SLOW") != nullptr;

int64_t ForCalls(int64_t every, const std::function<bool(int64_t)>& fails) {
  int64_t calls = 0;
  while (fails(calls * every)) ++calls;
  return calls;
}

void Check(bool is_so, const Operation& operation, int64_t k, const char* what) {
  if (!is_so) check::Fail(__FILE__, __LINE__, operation.name + (", call " + std::to_string(k) + ": ") + what);
}

// Slots of sets that one of them lacks are not looked at.
bool IsSameRow(const Kept& a, const Kept& b) {
  const auto near = [](const Floats& x, const Floats& y) {
    for (size_t i = 0; i < x.size(); ++i)
      if (!(std::fabs(x[i] - y[i]) <= 1e-5f * (1.0f + std::fabs(y[i])))) return false;
    return x.size() == y.size();
  };
  for (size_t s = 1; s < std::min(a.slots.size(), b.slots.size()); ++s)  // the first are histories
    if (!near(a.slots[s], b.slots[s])) return false;
  return near(a.row, b.row);
}

bool IsSame(const AllRows& a, const AllRows& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [key, kept] : a)
    if (b.count(key) == 0 || !IsSameRow(kept, b.at(key))) return false;
  return true;
}

// Each row is as it was, or as it should be; and all that were there are.
bool IsBetween(const AllRows& rows, const AllRows& before, const AllRows& after) {
  for (const auto& [key, kept] : rows) {
    const bool was = before.count(key) > 0 && IsSameRow(kept, before.at(key));
    if (!was && !(after.count(key) > 0 && IsSameRow(kept, after.at(key)))) return false;
  }
  for (const auto& [key, kept] : before)
    if (rows.count(key) == 0 && after.count(key) > 0) return false;
  return true;
}

}  // namespace

TEST(MemoryThatIsNotToBeHadLeavesATierAsItWas) {
  int64_t calls = 0;
  for (const Operation& operation : Operations()) {
    for (const bool for_good : {true, false}) {
      Fixture untouched, twin;
      const AllRows before = untouched.Contents();
      operation.run(&twin);
      const AllRows after = twin.Contents();
      calls += ForCalls(is_slow ? 1 : 3, [&](int64_t k) {
        Fixture fixture;
        sok_emulator::FailCall(k, cudaErrorMemoryAllocation, for_good, /*of_allocations=*/true);
        const Told told = Run(operation, &fixture);
        const bool has_failed = sok_emulator::EndFaults();
        Check(told != Told::kOther, operation, k, "another error");
        Check(cudaGetLastError() == cudaSuccess, operation, k, "the error stays for the next call");
        Check(fixture.of.tier->device().SizeToHost(fixture.of.cuda) >= fixture.of.counts().rows_on_device, operation, k,
              "rows are taken for some of the device");
        const AllRows now = fixture.Contents();
        if (told == Told::kNothing) {
          Check(IsSame(now, after), operation, k, "nothing is told, and there are other rows");
        } else {
          Check(operation.has_parts ? IsBetween(now, before, after) : IsSame(now, before), operation, k, "other rows");
          Check(Run(operation, &fixture) == Told::kNothing, operation, k, "fails when it is done again");
          if (!operation.has_parts)
            Check(IsSame(fixture.Contents(), after), operation, k, "other rows the second time");
        }
        Check(fixture.of.tier->device().SizeToHost(fixture.of.cuda) == fixture.of.counts().rows_on_device, operation, k,
              "the device has rows that nobody knows of");
        return has_failed;
      });
    }
  }
  CHECK(calls > 15);
}

TEST(ACallOfATierThatFailsIsToldAndNothingHangs) {
  int64_t calls = 0, told = 0;
  for (const Operation& operation : Operations()) {
    Fixture twin;
    operation.run(&twin);
    const AllRows after = twin.Contents();
    calls += ForCalls(is_slow ? 1 : 7, [&](int64_t k) {
      Fixture fixture;
      sok_emulator::FailCall(k, cudaErrorIllegalAddress, /*for_good=*/false);
      const Told said = Run(operation, &fixture);
      const bool has_failed = sok_emulator::EndFaults();
      told += said != Told::kNothing;
      Check(cudaGetLastError() == cudaSuccess, operation, k, "the error stays for the next call");
      if (said == Told::kNothing) Check(IsSame(fixture.Contents(), after), operation, k, "other rows");
      return has_failed;
    });
  }
  CHECK(told > 60 && told > calls * 2 / 3);
}

// Of a device that is gone nothing is given back, and the emulator's has an end.
TEST(OfADeviceThatIsGoneATierTellsAndIsLetGo) {
  for (const Operation& operation : Operations()) {
    ForCalls(11, [&](int64_t k) {
      auto fixture = std::make_unique<Fixture>();
      sok_emulator::FailCall(k, cudaErrorIllegalAddress, /*for_good=*/true);
      Run(operation, fixture.get());
      const bool is_gone = cudaGetLastError() == cudaErrorIllegalAddress;
      const Operation look{operation.name, [](Fixture* f) { f->of.Lookup({0}, true); }};
      if (is_gone) Check(Run(look, fixture.get()) == Told::kOther, operation, k, "then nothing is told");
      fixture.reset();
      sok_emulator::EndFaults();
      return is_gone;
    });
  }
}
