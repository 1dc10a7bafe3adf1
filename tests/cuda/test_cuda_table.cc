// DeviceTable beside EmbeddingTable: the same calls, the same answers.
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "rules.h"
#include "sok/device_table.h"
#include "sok/embedding_table.h"
#include "sok/error.h"
#include "table_cases.h"

namespace {

using Keys = std::vector<uint64_t>;
using Floats = std::vector<float>;

struct Answer {
  Floats rows;
  std::vector<int64_t> row_ids;
};

// A table on the device and its twin on the CPU.
class Twins {
 public:
  explicit Twins(const sok::TableConfig& config, int64_t budget = 0)
      : device(config, budget), cpu(config), scratch(cuda) {}

  Answer Lookup(const Keys& keys, bool insert) {
    const int64_t n = static_cast<int64_t>(keys.size());
    DeviceArray<uint64_t> device_keys(keys);
    DeviceArray<float> rows(n * device.config().dim);
    DeviceArray<int64_t> row_ids(n);
    scratch.Reset();
    device.Lookup(cuda, &scratch, device_keys, n, insert, rows, row_ids);
    return {rows.Get(), row_ids.Get()};
  }

  Answer CpuLookup(const Keys& keys, bool insert) {
    Answer answer;
    answer.rows.resize(keys.size() * static_cast<size_t>(cpu.dim()));
    answer.row_ids.resize(keys.size());
    cpu_scratch.Reset();
    cpu.Lookup({executor}, &cpu_scratch, keys.data(), static_cast<int64_t>(keys.size()), insert, nullptr,
               answer.rows.data(), answer.row_ids.data());
    return answer;
  }

  // Both say the same.
  Answer Check(const Keys& keys, bool insert, float tolerance = 0.0f) {
    const Answer mine = Lookup(keys, insert), theirs = CpuLookup(keys, insert);
    CHECK(mine.row_ids == theirs.row_ids);
    CheckClose(mine.rows, theirs.rows, tolerance);
    return mine;
  }

  static void CheckClose(const Floats& a, const Floats& b, float tolerance) {
    CHECK_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      if (std::fabs(a[i] - b[i]) <= tolerance * (1.0f + std::fabs(b[i])) || (std::isnan(a[i]) && std::isnan(b[i]))) {
        continue;
      }
      CHECK_EQ(a[i], b[i]);
      return;
    }
  }

  void Apply(const sok::UpdateRule& rule, const std::string& set, const std::vector<int64_t>& row_ids,
             const Floats& grads, sok::Nonfinite nonfinite = sok::Nonfinite::kAllow, bool on_cpu = true) {
    const int64_t n = static_cast<int64_t>(row_ids.size());
    DeviceArray<int64_t> ids(row_ids);
    DeviceArray<float> device_grads(grads);
    scratch.Reset();
    device.Apply(cuda, &scratch, rule, set, nonfinite, 1.0f, ids, device_grads, n);
    SOK_CUDA(cudaDeviceSynchronize());
    cpu_scratch.Reset();
    if (!on_cpu) return;
    const sok::EmbeddingTable::Gradients gradients{&cpu, row_ids.data(), grads.data(), n};
    sok::EmbeddingTable::ApplyGroup({executor}, &cpu_scratch, rule, set, nonfinite, &gradients, 1);
  }

  void Assign(const Keys& keys, const Floats& rows) {
    const int64_t n = static_cast<int64_t>(keys.size());
    DeviceArray<uint64_t> device_keys(keys);
    DeviceArray<float> device_rows(rows);
    scratch.Reset();
    device.Assign(cuda, &scratch, device_keys, device_rows, n);
    SOK_CUDA(cudaDeviceSynchronize());
    cpu_scratch.Reset();
    cpu.Assign({executor}, &cpu_scratch, keys.data(), rows.data(), n);
  }

  void Erase(const Keys& keys) {
    DeviceArray<uint64_t> device_keys(keys);
    scratch.Reset();
    device.Erase(cuda, &scratch, device_keys, static_cast<int64_t>(keys.size()));
    SOK_CUDA(cudaDeviceSynchronize());
    cpu.Erase(keys.data(), static_cast<int64_t>(keys.size()));
  }

  // Keys, rows and slots of all rows, in the order of rows.
  void CheckAll(const std::string& set, float tolerance = 0.0f) {
    const int64_t n = device.SizeToHost(cuda);
    CHECK_EQ(n, cpu.size());
    DeviceArray<uint64_t> keys(n);
    DeviceArray<int64_t> row_ids(n);
    scratch.Reset();
    device.Export(cuda, &scratch, keys, row_ids, n);
    CHECK(keys.Get() == cpu.Keys());
    Floats rows, slots;
    std::vector<int64_t> stamps(static_cast<size_t>(n));
    cpu.Export({executor}, set, [&](int64_t count, int64_t slot_floats) {
      rows.resize(static_cast<size_t>(count * cpu.dim()));
      slots.resize(static_cast<size_t>(count * slot_floats));
      return sok::EmbeddingTable::ExportTarget{nullptr, rows.data(), set.empty() ? nullptr : slots.data(),
                                               set.empty() ? nullptr : stamps.data()};
    });
    DeviceArray<float> device_rows(n * cpu.dim());
    device.Weights(cuda, &scratch, row_ids, n, device_rows);
    CheckClose(device_rows.Get(), rows, tolerance);
    if (set.empty()) return;
    DeviceArray<float> device_slots(n * device.SlotFloats(set));
    device.Slots(cuda, &scratch, set, row_ids, n, device_slots);
    CheckClose(device_slots.Get(), slots, tolerance);
  }

  const sok::Cuda cuda{};
  const sok::SerialExecutor executor;
  sok::DeviceTable device;
  sok::EmbeddingTable cpu;
  sok::StreamScratch scratch;
  sok::Scratch cpu_scratch;
};

Floats Random(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  Floats values(n);
  for (float& value : values) value = uniform(random);
  return values;
}

}  // namespace

TEST(RowsAndRowIdsAreThoseOfTheCpu) {
  for (const auto kind : {sok::InitKind::kConstant, sok::InitKind::kUniform, sok::InitKind::kBank}) {
    for (const int64_t dim : {1, 3, 4, 6, 64, 67}) {
      sok::TableConfig config = Config(dim, 1000);
      config.initializer.kind = kind;
      config.initializer.bank_rows = kind == sok::InitKind::kBank ? 5 : 0;
      if (kind == sok::InitKind::kBank) config.initializer.bank = Random(static_cast<size_t>(5 * dim), 2);
      Twins t(config);
      t.Check({5, 6, 5}, false);
      t.Check({5, 9, 5, ~0ull, 0}, true);
      t.Check({9, 77, 0, 5}, false);
      t.Check({}, true);
      Keys many;
      for (uint64_t i = 0; i < 257; ++i) many.push_back(i * i % 101);
      t.Check(many, true);
      t.CheckAll("");
    }
  }
}

TEST(NormalsAreTheCpusUpToTheirLastPlaces) {
  for (const auto kind : {sok::InitKind::kNormal, sok::InitKind::kTruncatedNormal}) {
    sok::TableConfig config = Config(33, 100);
    config.initializer.kind = kind;
    Twins(config).Check({1, 2, ~0ull}, true, 1e-5f);
  }
}

TEST(EveryRuleTrainsAsOnTheCpu) {
  for (const std::string& name : RuleNames()) {
    for (const bool hashed : {true, false}) {
      Twins t(Config(6, 400, hashed));
      const float tolerance = RuleNamed(name, 1).decays() ? 1e-5f : 1e-6f;  // missed decay in closed form
      for (unsigned step = 0; step < 6; ++step) {
        Keys keys;
        for (uint64_t i = 0; i < 40; ++i) keys.push_back((i * 7 + step * 13) % 211);
        const Answer answer = t.Check(keys, true, tolerance);
        t.Apply(RuleNamed(name, step + 1, 0.1 / (1 + step)), "a", answer.row_ids, Random(keys.size() * 6, step));
        t.Check({0, 1, 2, 3, 399}, false, tolerance);
      }
      t.device.ThrowIfBadToHost(t.cuda);
      t.CheckAll("a", tolerance);
    }
  }
}

TEST(WeightsAreSetByRowIdAsOnTheCpu) {
  for (const char* name : {"sgd", "adam"}) {  // of which one owes rows some decay
    Twins t(Config(6, 400));
    const Keys keys = {3, 5, 7, 9, 11};
    const Answer answer = t.Check(keys, true);
    t.Apply(RuleNamed(name, 1), "a", answer.row_ids, Random(keys.size() * 6, 1));
    t.Apply(RuleNamed(name, 2), "a", {answer.row_ids[0]}, Random(6, 2));
    t.Erase({5});
    std::vector<int64_t> row_ids(answer.row_ids.begin() + 1, answer.row_ids.end());  // the first is gone by now
    row_ids.push_back(-1);
    const Floats rows = Random(row_ids.size() * 6, 3);
    DeviceArray<int64_t> device_row_ids(row_ids);
    DeviceArray<float> device_rows(rows);
    t.scratch.Reset();
    t.device.SetWeights(t.cuda, &t.scratch, device_row_ids, device_row_ids.size(), device_rows);
    t.cpu.Scatter({t.executor}, row_ids.data(), static_cast<int64_t>(row_ids.size()), rows.data());
    t.CheckAll("a", 1e-6f);
    t.Apply(RuleNamed(name, 3), "a", answer.row_ids, Random(keys.size() * 6, 4));
    t.CheckAll("a", 1e-5f);
  }
}

TEST(ABadKeyIsHeardOfWithoutWaiting) {
  Twins t(Config(2, 10, false));
  t.device.ThrowIfBadIsKnown(t.cuda);  // nothing is
  t.Lookup({3, 77}, true);
  std::string heard;
  for (int i = 0; i < 100000 && heard.empty(); ++i) {
    try {
      t.device.ThrowIfBadIsKnown(t.cuda);
    } catch (const sok::InvalidArgument& e) {
      heard = e.what();
    }
    std::this_thread::yield();
  }
  CHECK(heard.find("77") != std::string::npos);
  for (int i = 0; i < 10; ++i) t.device.ThrowIfBadIsKnown(t.cuda);  // once
  t.device.ThrowIfBadToHost(t.cuda);
}

TEST(TwoOptimizersKeepTheirSlotsApart) {
  Twins t(Config(5, 300));
  for (unsigned step = 0; step < 4; ++step) {
    Keys keys = {step, step + 1, 100 + step};
    const Answer answer = t.Check(keys, true, 1e-6f);
    t.Apply(RuleOf(step % 2 == 0 ? sok::Rule::kAdagrad : sok::Rule::kLazyAdam), step % 2 == 0 ? "x" : "y",
            answer.row_ids, Random(15, step));
  }
  t.CheckAll("x", 1e-6f);
  t.CheckAll("y", 1e-6f);
  CHECK_THROWS(t.Apply(RuleOf(sok::Rule::kSgd), "x", {}, {}), sok::InvalidArgument, "belongs to another rule");
  CHECK_THROWS(t.device.SlotFloats("z"), sok::FailedPrecondition, "Known: 'x', 'y'");
}

TEST(AFullTableSaysSoAndStoresNothing) {
  Twins t(Config(4, 5));
  t.Check({1, 2, 3}, true);
  CHECK_THROWS(t.Lookup({1, 10, 11, 12, 10}, true), sok::TableFull, "table 'item' (rank 0 of 1): full: all 5 rows");
  CHECK_THROWS(t.Lookup({1, 10, 11, ~0ull}, true), sok::TableFull, "key -1 is new");
  t.CheckAll("");
  t.Check({4, 5, 1}, true);
  t.Check({4, 5, 1, 2, 3}, true);
}

TEST(ABudgetIsKeptAndNothingIsLost) {
  Twins t(Config(64, 1 << 20), 8 << 20);
  Keys keys;
  for (uint64_t i = 0; i < 4000; ++i) keys.push_back(i);
  t.Check(keys, true);
  for (uint64_t i = 4000; i < 60000; ++i) keys.push_back(i);
  CHECK_THROWS(t.Lookup(keys, true), sok::OutOfMemory, "table 'item' (rank 0 of 1): no device memory for");
  CHECK(t.device.memory_bytes() <= 8 << 20);
  t.CheckAll("");
  CHECK_THROWS(t.Apply(RuleOf(sok::Rule::kLazyAdam), "a", {0, 1}, Floats(128, 1.0f)), sok::OutOfMemory,
               "wider embedding rows");
  t.CheckAll("");
  t.Check({3, 4, 4000}, true);
}

TEST(ErasedRowsAreBornAgainAndTheirGradientsAreDropped) {
  for (const bool hashed : {true, false}) {
    Twins t(Config(4, 50, hashed));
    const Answer before = t.Check({1, 2, 3}, true);
    t.Apply(RuleOf(sok::Rule::kAdagrad), "a", before.row_ids, Floats(12, 1.0f));
    t.Erase({2, 2, 40});
    CHECK_EQ(t.device.SizeToHost(t.cuda), 2);
    const Answer after = t.Lookup({2, 1, 7}, true);
    t.CpuLookup({2, 1, 7}, true);
    t.CheckAll("a", 1e-6f);
    CHECK(after.row_ids[0] != before.row_ids[1]);
    CHECK_EQ(after.row_ids[0] & 0xFFFFFFFF, before.row_ids[1]);
    CHECK_EQ(after.row_ids[1], before.row_ids[0]);
    // The stale gradient of key 2 is dropped, that of key 1 counts.
    t.Apply(RuleOf(sok::Rule::kAdagrad), "a", before.row_ids, Floats(12, 0.5f));
    t.device.ThrowIfBadToHost(t.cuda);
    t.CheckAll("a", 1e-6f);
  }
}

TEST(OfEqualKeysTheLastValueIsStored) {
  for (const bool hashed : {true, false}) {
    Twins t(Config(3, 50, hashed));
    t.Check({4}, true);
    t.Assign({9, 4, 9, 8, 9}, Random(15, 1));
    t.CheckAll("");
    t.Check({4, 8, 9, 10}, false);
  }
}

TEST(SlotsComeBackAsTheyWereRestored) {
  Twins t(Config(3, 50));
  DeviceArray<uint64_t> keys(Keys{9, 4});
  DeviceArray<float> slots(Random(12, 1)), back(12);
  t.device.AssignSlots(t.cuda, &t.scratch, RuleOf(sok::Rule::kLazyAdam), "a", keys, slots, 2);
  const Answer answer = t.Lookup({9, 4}, false);
  DeviceArray<int64_t> row_ids(answer.row_ids);
  t.device.Slots(t.cuda, &t.scratch, "a", row_ids, 2, back);
  CHECK(back.Get() == slots.Get());
  CHECK(answer.rows == t.CpuLookup({9, 4}, false).rows);
}

TEST(KeysThatTheShardCannotHoldAreToldWhenAsked) {
  Twins t(Config(4, 10, /*hashed=*/false));
  const Answer answer = t.Lookup({3, 10, 9}, true);
  CHECK(answer.row_ids == (std::vector<int64_t>{3, -1, 9}));
  for (size_t j = 4; j < 8; ++j) CHECK_EQ(answer.rows[j], 0.0f);
  CHECK_THROWS(t.device.ThrowIfBadToHost(t.cuda), sok::InvalidArgument, "key 10 is outside [0, 10)");
  t.device.ThrowIfBadToHost(t.cuda);  // told once
  CHECK_EQ(t.device.SizeToHost(t.cuda), 2);
  DeviceArray<uint64_t> keys(Keys{2, ~0ull});
  DeviceArray<float> rows(8);
  CHECK_THROWS(t.device.Assign(t.cuda, &t.scratch, keys, rows, 2), sok::InvalidArgument, "key -1 is outside");
  CHECK_EQ(t.device.SizeToHost(t.cuda), 2);

  sok::TableConfig config = Config(4, 10);
  config.world_size = 3;
  config.rank = 1;
  Twins shard(config);
  CHECK(shard.Lookup({1, 2, 4}, true).row_ids == (std::vector<int64_t>{0, -1, 1}));
  CHECK_THROWS(shard.device.ThrowIfBadToHost(shard.cuda), sok::InvalidArgument, "key 2 belongs to rank 2");
}

TEST(GradientsThatCannotBeAppliedAreToldWhenAsked) {
  Twins t(Config(2, 10));
  const Answer answer = t.Check({1, 2, 3}, true);
  t.Apply(RuleOf(sok::Rule::kSgd), "a", {0, -1, 5000}, Floats(6, 1.0f), sok::Nonfinite::kAllow, /*on_cpu=*/false);
  CHECK_THROWS(t.device.ThrowIfBadToHost(t.cuda), sok::InvalidArgument, "row id 5000, which this shard does not have");
  const Floats before = t.Lookup({1, 2, 3}, false).rows;
  CHECK(before[0] != answer.rows[0] && before[2] == answer.rows[2]);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto kind : {sok::Rule::kSgd, sok::Rule::kAdam}) {
    t.Apply(RuleOf(kind), kind == sok::Rule::kSgd ? "a" : "b", {0, 1}, {1.0f, 1.0f, nan, 1.0f}, sok::Nonfinite::kRaise,
            /*on_cpu=*/false);
    CHECK_THROWS(t.device.ThrowIfBadToHost(t.cuda), sok::InvalidArgument, "gradient 1, for row id 1, holds NaN");
    CHECK(t.Lookup({1, 2, 3}, false).rows == before);
  }
}

TEST(LookupsAndUpdatesOfTwoStreamsAreOrdered) {
  // Each update adds one to every weight; what each lookup sees is a whole number of updates, the same for all rows, and
  // never fewer than were put before it.
  sok::TableConfig config = Config(8, 100);
  config.initializer.kind = sok::InitKind::kConstant;
  config.initializer.a = 0.0f;
  sok::DeviceTable table(config, 0);
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) SOK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    const sok::Cuda reader{streams[0]}, writer{streams[1]};
    sok::StreamScratch read_scratch(reader), write_scratch(writer);
    Keys keys;
    for (uint64_t i = 0; i < 64; ++i) keys.push_back(i);
    DeviceArray<uint64_t> device_keys(keys);
    DeviceArray<int64_t> row_ids(64), read_ids(64);
    DeviceArray<float> grads(Floats(64 * 8, -1.0f));
    table.Lookup(writer, &write_scratch, device_keys, 64, true, nullptr, row_ids);
    sok::UpdateRule rule = RuleOf(sok::Rule::kSgd);
    rule.lr = 1.0f;
    std::vector<std::unique_ptr<DeviceArray<float>>> seen;
    for (int step = 0; step < 20; ++step) {
      write_scratch.Reset();
      table.Apply(writer, &write_scratch, rule, "a", sok::Nonfinite::kAllow, 1.0f, row_ids, grads, 64);
      seen.push_back(std::make_unique<DeviceArray<float>>(64 * 8));
      read_scratch.Reset();
      table.Lookup(reader, &read_scratch, device_keys, 64, false, seen.back()->data(), read_ids);
    }
    for (int step = 0; step < 20; ++step) {
      for (const float value : seen[static_cast<size_t>(step)]->Get()) CHECK_EQ(value, static_cast<float>(step + 1));
    }
    const sok::DeviceTable::Reading reading = table.Read(reader);
    CHECK(reading.num_rows >= 64);
  }
  for (cudaStream_t stream : streams) SOK_CUDA(cudaStreamDestroy(stream));
}

// Keys that are known need no rows, however often they come: a table near its budget goes on.
TEST(KnownKeysTakeNoRows) {
  Twins t(Config(16, 1 << 20), 3760128);
  Keys keys;
  for (uint64_t i = 0; i < 30000; ++i) keys.push_back(i);
  t.Check(keys, true);
  keys.resize(8000);
  for (int step = 0; step < 3; ++step) t.Check(keys, true);
}

TEST(RowsGrowWithKeysAndNotWithSteps) {
  constexpr int64_t kDim = 512, kRowBytes = kDim * 4, kSlab = int64_t{2} << 20;
  constexpr size_t kBatch = 64, kKeys = 1500;
  Twins t(Config(kDim, 1 << 20));
  t.device.Reserve(t.cuda, 1 << 16, /*rows=*/false);
  const int64_t empty = t.device.memory_bytes();
  std::mt19937 random(3);
  Keys known;
  for (int step = 0; step < 400 / kFewer; ++step) {
    Keys keys;
    while (keys.size() < kBatch) {
      if (known.empty() || (known.size() < kKeys && random() % 8 == 0)) known.push_back(known.size() * 977);
      keys.push_back(known[random() % known.size()]);
    }
    t.Lookup(keys, true);
    const int64_t in_use = static_cast<int64_t>(known.size());
    const int64_t most = (in_use + in_use / 8 + static_cast<int64_t>(kBatch)) * kRowBytes + 2 * kSlab;
    CHECK(t.device.memory_bytes() - empty <= most);
  }
}

#if defined(SOK_CUDA_EMULATED)  // which has two devices, and counts

// A table goes on a thread that has never seen its device, and must not get to see another.
TEST(ATableIsFreedOnItsDevice) {
  std::unique_ptr<sok::DeviceTable> table;
  std::shared_ptr<void> reading;
  std::thread([&] {
    SOK_CUDA(cudaSetDevice(1));
    const sok::Cuda cuda{};
    sok::StreamScratch scratch(cuda);
    table = std::make_unique<sok::DeviceTable>(Config(4, 100), 0);
    DeviceArray<uint64_t> keys(Keys{1, 2, 3});
    DeviceArray<int64_t> row_ids(3);
    DeviceArray<float> grads(Floats(12, 1.0f));
    table->Lookup(cuda, &scratch, keys, 3, true, nullptr, row_ids);
    table->Apply(cuda, &scratch, RuleOf(sok::Rule::kAdam), "a", sok::Nonfinite::kAllow, 1.0f, row_ids, grads, 3);
    reading = table->Read(cuda).lock;
    SOK_CUDA(cudaDeviceSynchronize());
  }).join();
  const int64_t elsewhere = sok_emulator::CallsOn(0), there = sok_emulator::CallsOn(1);
  std::thread([&] {
    reading.reset();
    table.reset();
  }).join();
  CHECK_EQ(sok_emulator::CallsOn(0), elsewhere);
  CHECK(sok_emulator::CallsOn(1) > there);
}

#endif

TEST(ReservedRoomIsNotAskedForAgain) {
  Twins t(Config(16, 5000));
  t.device.Reserve(t.cuda, 5000);
  const int64_t bytes = t.device.memory_bytes();
  Keys keys;
  for (uint64_t i = 0; i < 5000; ++i) keys.push_back(i * 977);
  t.Check(keys, true);
  CHECK_EQ(t.device.memory_bytes(), bytes);
  CHECK_THROWS(t.device.Reserve(t.cuda, 5001), sok::InvalidArgument, "can reserve 0 to 5000 rows");
}

TEST(AConfigurationThatMakesNoSenseIsRefused) {
  CHECK_THROWS(sok::DeviceTable(Config(0, 10), 0), sok::InvalidArgument, "dim must lie in");
  CHECK_THROWS(sok::DeviceTable(Config(64, 1 << 20, false), 1 << 20), sok::OutOfMemory, "of a budget of 1048576");
  Twins t(Config(1, 10));
  CHECK_THROWS(t.device.Lookup(t.cuda, &t.scratch, nullptr, int64_t{1} << 31, false, nullptr, nullptr),
               sok::InvalidArgument, "2^31");
}
