// Many tables at once beside the same tables one by one: the same bits, errors and leavings, in as many launches as few take.
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "detail/scratch.h"
#include "device_memory.h"
#include "sok/device_table.h"
#include "sok/error.h"
#include "sok/sum_rows.h"
#include "table_cases.h"

namespace {

using Keys = std::vector<uint64_t>;
using Ids = std::vector<int64_t>;
using Floats = std::vector<float>;
using Bits = std::vector<uint32_t>;

constexpr int64_t kDims[] = {1, 4, 6, 64, 4};

Bits BitsOf(const Floats& values) {
  Bits bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

sok::TableConfig Config(size_t number) {
  sok::TableConfig config;
  config.name = "t" + std::to_string(number);
  config.dim = kDims[number % 5];
  config.capacity = number % 3 == 2 ? 64 : 200;
  config.hashed = number % 3 != 1;
  config.initializer.seed = 7 + number;
  return config;
}

Floats Random(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  Floats values(static_cast<size_t>(n));
  for (float& value : values) value = uniform(random);
  return values;
}

// What a call said, or "".
template <class F>
std::string Said(const F& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

// Tables of several widths and kinds.
struct Tables {
  explicit Tables(size_t n) : scratch(cuda) {
    for (size_t t = 0; t < n; ++t) all.push_back(std::make_unique<sok::DeviceTable>(Config(t), 0));
  }

  Ids Lookup(size_t t, const Keys& keys, bool insert = true) {
    DeviceArray<uint64_t> device_keys(keys);
    DeviceArray<int64_t> row_ids(static_cast<int64_t>(keys.size()));
    scratch.Reset();
    all[t]->Lookup(cuda, &scratch, device_keys, device_keys.size(), insert, nullptr, row_ids);
    return row_ids.Get();
  }

  void Erase(size_t t, const Keys& keys) {
    DeviceArray<uint64_t> device_keys(keys);
    scratch.Reset();
    all[t]->Erase(cuda, &scratch, device_keys, device_keys.size());
    SOK_CUDA(cudaDeviceSynchronize());
  }

  // Keys and the bits of weights and slots of a table.
  std::pair<Keys, Bits> Contents(size_t t, const std::string& set) {
    sok::DeviceTable& table = *all[t];
    const int64_t n = table.SizeToHost(cuda);
    DeviceArray<uint64_t> keys(n);
    DeviceArray<int64_t> row_ids(n);
    scratch.Reset();
    table.Export(cuda, &scratch, keys, row_ids, n);
    DeviceArray<float> weights(n * table.config().dim);
    table.Weights(cuda, &scratch, row_ids, n, weights);
    Floats floats = weights.Get();
    if (!set.empty()) {
      DeviceArray<float> slots(n * table.SlotFloats(set));
      table.Slots(cuda, &scratch, set, row_ids, n, slots);
      const Floats more = slots.Get();
      floats.insert(floats.end(), more.begin(), more.end());
    }
    return {keys.Get(), BitsOf(floats)};
  }

  const sok::Cuda cuda{};
  sok::StreamScratch scratch;
  std::vector<std::unique_ptr<sok::DeviceTable>> all;
};

// One step's gradients of every table: distinct row ids, some of rows that are gone and, with `wild`, some never given.
struct Step {
  std::vector<std::unique_ptr<DeviceArray<int64_t>>> row_ids;
  std::vector<std::unique_ptr<DeviceArray<float>>> grads;

  std::vector<sok::DeviceTable::Gradients> Of(const Tables& tables) const {
    std::vector<sok::DeviceTable::Gradients> all;
    for (size_t t = 0; t < row_ids.size(); ++t) {
      all.push_back({tables.all[t].get(), row_ids[t]->data(), grads[t]->data(), row_ids[t]->size(), nullptr});
    }
    return all;
  }
};

std::string Apply(Tables* tables, const Step& step, const sok::UpdateRule& rule, sok::Nonfinite nonfinite,
                  bool as_group) {
  const auto gradients = step.Of(*tables);
  tables->scratch.Reset();
  return Said([&] {
    if (as_group) {
      sok::DeviceTable::ApplyGroup(tables->cuda, &tables->scratch, rule, "a", nonfinite, 0.5f, gradients.data(),
                                   static_cast<int64_t>(gradients.size()));
    }
    for (const auto& g : gradients) {
      if (as_group) break;
      g.table->Apply(tables->cuda, &tables->scratch, rule, "a", nonfinite, 0.5f, g.row_ids, g.grads, g.n);
    }
    SOK_CUDA(cudaDeviceSynchronize());
  });
}

}  // namespace

TEST(AGroupIsUpdatedAsItsTablesAre) {
  for (const auto kind : {sok::Rule::kSgd, sok::Rule::kAdagrad, sok::Rule::kLazyAdam, sok::Rule::kAdam}) {
    constexpr size_t kTables = 7;
    Tables group(kTables), single(kTables);
    std::mt19937_64 random(static_cast<uint64_t>(kind) + 1);
    std::vector<Ids> known(kTables);  // ids that lookups gave so far
    for (uint64_t round = 0; round < 5; ++round) {
      Step step;
      for (size_t t = 0; t < kTables; ++t) {
        Keys keys;
        for (uint64_t i = 0; i < round * 5 + t % 2; ++i) keys.push_back(random() % 50);
        const Ids ids = group.Lookup(t, keys);
        CHECK(ids == single.Lookup(t, keys));
        known[t].insert(known[t].end(), ids.begin(), ids.end());
        const Keys gone = {random() % 50, random() % 50};
        group.Erase(t, gone);
        single.Erase(t, gone);
        Ids wanted = {-1};
        std::set<int64_t> rows;  // an id may be of a row that was born again
        for (auto id = known[t].rbegin(); id != known[t].rend(); ++id)
          if (rows.insert(*id & 0xFFFFFFFF).second) wanted.push_back(*id);
        if (round == 3 && t % 3 == 0) wanted.push_back(5000 + static_cast<int64_t>(t));
        const int64_t n = static_cast<int64_t>(wanted.size());
        step.row_ids.push_back(std::make_unique<DeviceArray<int64_t>>(wanted));
        step.grads.push_back(std::make_unique<DeviceArray<float>>(Random(n * kDims[t % 5], random())));
      }
      CHECK_EQ(Apply(&group, step, RuleOf(kind), sok::Nonfinite::kAllow, true), "");
      CHECK_EQ(Apply(&single, step, RuleOf(kind), sok::Nonfinite::kAllow, false), "");
      for (size_t t = 0; t < kTables; ++t) {
        CHECK(group.Contents(t, "a") == single.Contents(t, "a"));
        const std::string said = Said([&] { group.all[t]->ThrowIfBadToHost(group.cuda); });
        CHECK_EQ(said, Said([&] { single.all[t]->ThrowIfBadToHost(single.cuda); }));
        CHECK_EQ(said.empty(), round != 3 || t % 3 != 0);
      }
    }
  }
}

TEST(ARefusedGradientStopsTheWholeGroup) {
  for (const auto kind : {sok::Rule::kAdagrad, sok::Rule::kAdam}) {
    Tables group(4);
    Step step;
    std::vector<sok::DeviceTable*> tables;
    for (size_t t = 0; t < 4; ++t) {
      const Ids ids = group.Lookup(t, {1, 2, 3});
      Floats grads = Random(3 * kDims[t], t);
      if (t >= 2) grads[static_cast<size_t>(kDims[t])] = std::numeric_limits<float>::infinity();
      step.row_ids.push_back(std::make_unique<DeviceArray<int64_t>>(ids));
      step.grads.push_back(std::make_unique<DeviceArray<float>>(grads));
      tables.push_back(group.all[t].get());
    }
    std::vector<std::pair<Keys, Bits>> before;
    for (size_t t = 0; t < 4; ++t) before.push_back(group.Contents(t, ""));
    CHECK_EQ(Apply(&group, step, RuleOf(kind), sok::Nonfinite::kRaise, true), "");
    for (size_t t = 0; t < 4; ++t) CHECK(group.Contents(t, "") == before[t]);
    // One after the other: each table keeps its own.
    for (const char* name : {"'t2'", "'t3'"}) {
      const std::string said = Said([&] { sok::DeviceTable::ThrowIfBadToHost(group.cuda, &group.scratch, tables); });
      CHECK(said.find(name) != std::string::npos);
      CHECK(said.find("gradient 1, for row id") != std::string::npos && said.find("holds NaN") != std::string::npos);
    }
    sok::DeviceTable::ThrowIfBadToHost(group.cuda, &group.scratch, tables);
  }
}

TEST(UpdatesOfAGroupThatMakeNoSenseChangeNothing) {
  Tables group(3);
  Step step;
  for (size_t t = 0; t < 3; ++t) {
    step.row_ids.push_back(std::make_unique<DeviceArray<int64_t>>(group.Lookup(t, {1, 2})));
    step.grads.push_back(std::make_unique<DeviceArray<float>>(Random(2 * kDims[t], t)));
  }
  auto gradients = step.Of(group);
  group.all[2]->Apply(group.cuda, &group.scratch, RuleOf(sok::Rule::kSgd), "a", sok::Nonfinite::kAllow, 1.0f,
                      gradients[2].row_ids, gradients[2].grads, 2);
  const auto before = group.Contents(0, "");
  const std::string other = Apply(&group, step, RuleOf(sok::Rule::kAdagrad), sok::Nonfinite::kAllow, true);
  CHECK(other.find("'t2'") != std::string::npos && other.find("belongs to another rule") != std::string::npos);
  CHECK_THROWS(group.all[0]->SlotFloats("a"), sok::FailedPrecondition, "no optimizer has used");
  gradients[1].table = gradients[0].table;
  CHECK_THROWS(sok::DeviceTable::ApplyGroup(group.cuda, &group.scratch, RuleOf(sok::Rule::kAdagrad), "a",
                                            sok::Nonfinite::kAllow, 1.0f, gradients.data(), 2),
               sok::InvalidArgument, "gradients given twice in one call");
  CHECK(group.Contents(0, "") == before);
}

TEST(AWatchHearsOfBadInputOfAnyTable) {
  Tables group(6);
  std::vector<sok::DeviceTable*> tables;
  for (const auto& table : group.all) tables.push_back(table.get());
  sok::DeviceTableWatch watch;
  auto hear = [&] {
    std::string heard;
    for (int i = 0; i < 1000 && heard.empty(); ++i) {
      group.scratch.Reset();
      heard = Said([&] { watch.ThrowIfBadIsKnown(group.cuda, &group.scratch, tables); });
      SOK_CUDA(cudaDeviceSynchronize());
    }
    return heard;
  };
  CHECK_EQ(hear(), "");
  CHECK(group.Lookup(4, {3, 777}) == (Ids{3, -1}));
  CHECK(group.Lookup(1, {888}) == (Ids{-1}));
  CHECK(hear().find("key 888 is outside") != std::string::npos);
  CHECK(hear().find("key 777 is outside") != std::string::npos);
  CHECK_EQ(hear(), "");
}

namespace {

// Looks up keys of every table, in pieces: piece p is of table p % tables. Gives what each got, and what was said.
struct Looked {
  std::vector<Ids> row_ids;
  std::vector<Bits> rows;
  std::string said;

  bool operator==(const Looked& other) const {
    return row_ids == other.row_ids && rows == other.rows && said == other.said;
  }
};

Looked LookupAll(Tables* tables, const std::vector<Keys>& pieces, bool insert, bool as_group, bool with_rows = true) {
  Looked looked;
  std::vector<std::unique_ptr<DeviceArray<uint64_t>>> keys;
  std::vector<std::unique_ptr<DeviceArray<int64_t>>> row_ids;
  std::vector<std::unique_ptr<DeviceArray<float>>> rows;
  std::vector<sok::DeviceTable::Asked> asked;
  for (size_t p = 0; p < pieces.size(); ++p) {
    sok::DeviceTable* table = tables->all[p % tables->all.size()].get();
    const int64_t n = static_cast<int64_t>(pieces[p].size());
    keys.push_back(std::make_unique<DeviceArray<uint64_t>>(pieces[p]));
    row_ids.push_back(std::make_unique<DeviceArray<int64_t>>(Ids(pieces[p].size(), -7)));
    rows.push_back(std::make_unique<DeviceArray<float>>(Floats(pieces[p].size() * table->config().dim, -7.0f)));
    asked.push_back({table, keys[p]->data(), n, with_rows ? rows[p]->data() : nullptr, row_ids[p]->data()});
  }
  tables->scratch.Reset();
  looked.said = Said([&] {
    if (as_group) {
      sok::DeviceTable::LookupGroup(tables->cuda, &tables->scratch, asked.data(), static_cast<int64_t>(asked.size()),
                                    insert);
    }
    for (const auto& a : asked) {
      if (!as_group) a.table->Lookup(tables->cuda, &tables->scratch, a.keys.wide(), a.n, insert, a.rows, a.row_ids);
    }
  });
  SOK_CUDA(cudaDeviceSynchronize());
  if (!looked.said.empty()) return looked;
  for (size_t p = 0; p < pieces.size(); ++p) {
    looked.row_ids.push_back(row_ids[p]->Get());
    looked.rows.push_back(BitsOf(rows[p]->Get()));
  }
  return looked;
}

Keys RandomKeys(std::mt19937_64* random, uint64_t most, uint64_t below) {
  Keys keys((*random)() % (most + 1));
  for (uint64_t& key : keys) key = (*random)() % below;
  return keys;
}

}  // namespace

TEST(AGroupIsLookedUpAsItsTablesAre) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    constexpr size_t kTables = 6;
    Tables group(kTables), single(kTables);
    std::mt19937_64 random(seed);
    for (int round = 0; round < 8; ++round) {
      std::vector<Keys> pieces;
      // Some tables are asked more than once, some keys are in no table, some tables are asked for nothing.
      const size_t num_pieces = 2 + random() % (2 * kTables);
      for (size_t p = 0; p < num_pieces; ++p) pieces.push_back(RandomKeys(&random, round == 7 ? 0 : 9, 210));
      const bool insert = random() % 3 != 0, with_rows = random() % 2 == 0;
      const Looked mine = LookupAll(&group, pieces, insert, true, with_rows);
      const Looked theirs = LookupAll(&single, pieces, insert, false, with_rows);
      CHECK(mine.said.empty());
      CHECK(mine == theirs);
      for (size_t t = 0; t < kTables; ++t) {
        const Keys gone = RandomKeys(&random, 12, 210);
        group.Erase(t, gone);
        single.Erase(t, gone);
        CHECK(group.Contents(t, "") == single.Contents(t, ""));
        CHECK_EQ(Said([&] { group.all[t]->ThrowIfBadToHost(group.cuda); }).empty(),
                 Said([&] { single.all[t]->ThrowIfBadToHost(single.cuda); }).empty());
      }
    }
  }
}

TEST(TablesOfAGroupGrow) {
  Tables group(5), single(5);
  for (uint64_t round = 0; round < 4; ++round) {
    std::vector<Keys> pieces(5);
    for (size_t t = 0; t < 5; ++t)
      for (uint64_t i = 0; i < 16 * (round + 1); ++i) pieces[t].push_back((i * 7 + t) % 64);
    CHECK(LookupAll(&group, pieces, true, true) == LookupAll(&single, pieces, true, false));
    for (size_t t = 0; t < 5; ++t) CHECK(group.Contents(t, "") == single.Contents(t, ""));
  }
}

// Near their budgets tables go on as long as no key is new.
TEST(KnownKeysOfAGroupTakeNoRows) {
  Tables group(0);
  for (size_t t = 0; t < 2; ++t) {
    sok::TableConfig config = Config(t);
    config.dim = 16;
    config.capacity = 1 << 20;
    config.hashed = true;
    group.all.push_back(std::make_unique<sok::DeviceTable>(config, 3760128));
  }
  std::vector<Keys> pieces(2);
  for (uint64_t i = 0; i < 30000; ++i)
    for (Keys& keys : pieces) keys.push_back(i);
  CHECK_EQ(LookupAll(&group, pieces, true, true).said, "");
  for (Keys& keys : pieces) keys.resize(8000);
  for (int step = 0; step < 3; ++step) CHECK_EQ(LookupAll(&group, pieces, true, true).said, "");
}

TEST(NewRowsOfAGroupHaveFreshSlots) {
  for (const auto kind : {sok::Rule::kAdagrad, sok::Rule::kAdam}) {
    Tables group(4), single(4);
    for (uint64_t round = 0; round < 4; ++round) {
      std::vector<Keys> pieces;
      for (size_t t = 0; t < 4; ++t) pieces.push_back({round, round + t, 40 + 2 * round});
      for (Tables* tables : {&group, &single}) {
        const Looked looked = LookupAll(tables, pieces, true, tables == &group);
        Step step;
        for (size_t t = 0; t < 4; ++t) {
          const std::set<int64_t> distinct(looked.row_ids[t].begin(), looked.row_ids[t].end());
          const Ids ids(distinct.begin(), distinct.end());
          step.row_ids.push_back(std::make_unique<DeviceArray<int64_t>>(ids));
          step.grads.push_back(std::make_unique<DeviceArray<float>>(
              Random(static_cast<int64_t>(ids.size()) * kDims[t], round * 10 + t)));
        }
        CHECK_EQ(Apply(tables, step, RuleOf(kind), sok::Nonfinite::kAllow, tables == &group), "");
      }
      for (const bool insert : {false, true}) {
        CHECK(LookupAll(&group, pieces, insert, true) == LookupAll(&single, pieces, insert, false));
      }
      for (size_t t = 0; t < 4; ++t) CHECK(group.Contents(t, "a") == single.Contents(t, "a"));
    }
  }
}

TEST(AFullTableStopsTheWholeGroup) {
  Tables group(6), single(6);
  std::vector<Keys> fits(6), too_many(6);
  for (uint64_t i = 0; i < 60; ++i)
    for (Keys& keys : fits) keys.push_back(i);
  for (size_t t = 0; t < 6; ++t) too_many[t] = {5, 150 + t, 160, 150 + t, 170, 180, 190, 191};
  LookupAll(&group, fits, true, true);
  LookupAll(&single, fits, true, false);
  std::vector<std::pair<Keys, Bits>> before;
  for (size_t t = 0; t < 6; ++t) before.push_back(group.Contents(t, ""));
  const Looked mine = LookupAll(&group, too_many, true, true), theirs = LookupAll(&single, too_many, true, false);
  CHECK_EQ(mine.said, theirs.said);
  CHECK(mine.said.find("'t2'") != std::string::npos && mine.said.find("key 190 is new") != std::string::npos);
  // Table by table, those before the full one have their keys; of a group, none has.
  for (size_t t = 0; t < 6; ++t) CHECK(group.Contents(t, "") == before[t]);
  too_many[2] = too_many[5] = {5, 6, 150};
  LookupAll(&single, {{}, {}, {5, 6, 150}, too_many[3], too_many[4], too_many[5]}, true, false);
  CHECK_EQ(LookupAll(&group, too_many, true, true).said, "");
  for (size_t t = 0; t < 6; ++t) CHECK(group.Contents(t, "") == single.Contents(t, ""));
}

#if defined(SOK_CUDA_EMULATED)  // which counts

namespace {

// Launches and all else that a call puts on streams, once everything has its size.
sok_emulator::Counts CountsOf(size_t num_tables, bool insert) {
  Tables tables(num_tables);
  std::vector<Keys> pieces;
  for (size_t t = 0; t < num_tables; ++t) {
    pieces.push_back({1, 2, 3, 3, 50});
    tables.all[t]->Reserve(tables.cuda, tables.all[t]->config().capacity);
  }
  LookupAll(&tables, pieces, true, true);
  LookupAll(&tables, pieces, true, true);
  std::vector<std::unique_ptr<DeviceArray<uint64_t>>> keys;
  DeviceArray<int64_t> row_ids(5);
  std::vector<sok::DeviceTable::Asked> asked;
  for (size_t t = 0; t < num_tables; ++t) {
    keys.push_back(std::make_unique<DeviceArray<uint64_t>>(pieces[t]));
    asked.push_back({tables.all[t].get(), keys[t]->data(), 5, nullptr, row_ids});
  }
  SOK_CUDA(cudaDeviceSynchronize());
  const sok_emulator::Counts before = sok_emulator::CountsSoFar();
  sok::DeviceTable::LookupGroup(tables.cuda, &tables.scratch, asked.data(), static_cast<int64_t>(num_tables), insert);
  const sok_emulator::Counts counts = sok_emulator::CountsSoFar() - before;
  SOK_CUDA(cudaDeviceSynchronize());
  return counts;
}

}  // namespace

TEST(ManyTablesTakeNoMoreLaunchesThanFew) {
  for (const bool insert : {true, false}) {
    const auto few = CountsOf(5, insert), many = CountsOf(50, insert);
    std::printf("lookup, insert %d: %lld launches, %lld copies, %lld sets, %lld marks, %lld waits\n", insert,
                static_cast<long long>(many.launches), static_cast<long long>(many.copies),
                static_cast<long long>(many.sets), static_cast<long long>(many.marks),
                static_cast<long long>(many.waits));
    CHECK(many.OnStreams() <= few.OnStreams() + 2);  // 50 tables come from pinned memory, 5 as a kernel's parameters
    CHECK(many.launches <= few.launches);
    CHECK_EQ(many.host_waits, 0);
  }
  int64_t launches[2];
  for (const size_t num_tables : {5, 50}) {
    Tables tables(num_tables);
    Step step;
    for (size_t t = 0; t < num_tables; ++t) {
      step.row_ids.push_back(std::make_unique<DeviceArray<int64_t>>(tables.Lookup(t, {1, 2})));
      step.grads.push_back(std::make_unique<DeviceArray<float>>(Random(2 * kDims[t % 5], t)));
    }
    Apply(&tables, step, RuleOf(sok::Rule::kAdagrad), sok::Nonfinite::kAllow, true);
    const auto gradients = step.Of(tables);
    const auto before = sok_emulator::CountsSoFar();
    sok::DeviceTable::ApplyGroup(tables.cuda, &tables.scratch, RuleOf(sok::Rule::kAdagrad), "a", sok::Nonfinite::kAllow,
                                 1.0f, gradients.data(), static_cast<int64_t>(num_tables));
    const auto counts = sok_emulator::CountsSoFar() - before;
    SOK_CUDA(cudaDeviceSynchronize());
    CHECK_EQ(counts.host_waits, 0);
    std::printf("update: %lld launches, %lld copies, %lld sets, %lld marks, %lld waits\n",
                static_cast<long long>(counts.launches), static_cast<long long>(counts.copies),
                static_cast<long long>(counts.sets), static_cast<long long>(counts.marks),
                static_cast<long long>(counts.waits));
    launches[num_tables == 50] = counts.launches;
  }
  CHECK(launches[1] <= launches[0]);
}

#endif
