// Many features and tables in one call: LookupGroup and ApplyGroup give what one call for each gives, and calls that share
// tables neither wait for one another for ever nor see half a change. The thread sanitizer watches.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "tables.h"

namespace {

using Keys = std::vector<uint64_t>;
using Splits = std::vector<int64_t>;

const ThreadExecutor kThreads(3);

// One feature with room for its answers.
struct Asked {
  sok::EmbeddingTable* table;
  Keys keys;
  Splits splits;  // empty: nothing is pooled
  std::vector<float> output;
  std::vector<int64_t> ids;
  bool is_read = true;

  Asked(Table& of, Keys asked, Splits pooled = {})
      : table(&of.native()), keys(std::move(asked)), splits(std::move(pooled)), ids(keys.size(), -99) {
    const size_t rows = splits.empty() ? keys.size() : splits.size() - 1;
    output.assign(rows * static_cast<size_t>(table->dim()), -99.0f);
  }
  sok::EmbeddingTable::Feature feature() {
    sok::EmbeddingTable::Feature f;
    f.table = table;
    f.keys = keys.data();
    f.n = static_cast<int64_t>(keys.size());
    f.row_splits = splits.empty() ? nullptr : splits.data();
    f.segments = splits.empty() ? 0 : static_cast<int64_t>(splits.size()) - 1;
    f.output = is_read ? output.data() : nullptr;
    f.row_ids = ids.data();
    return f;
  }
};

void LookUp(std::vector<Asked>* asked, bool insert = true) {
  sok::Scratch scratch;
  std::vector<sok::EmbeddingTable::Feature> features;
  for (Asked& one : *asked) features.push_back(one.feature());
  sok::EmbeddingTable::LookupGroup({kThreads}, &scratch, features.data(), static_cast<int64_t>(features.size()),
                                   insert);
}

struct Update {
  Table* table;
  std::vector<int64_t> ids;
  std::vector<float> grads;
};

void Apply(const std::vector<Update>& updates, const std::string& rule, const std::vector<double>& hyper,
           const std::string& set, int64_t step = 1, sok::Nonfinite nonfinite = sok::Nonfinite::kAllow) {
  sok::Scratch scratch;
  std::vector<sok::EmbeddingTable::Gradients> gradients;
  for (const Update& u : updates)
    gradients.push_back({&u.table->native(), u.ids.data(), u.grads.data(), static_cast<int64_t>(u.ids.size()), false});
  sok::EmbeddingTable::ApplyGroup({kThreads}, &scratch,
                                  sok::MakeUpdateRule(rule, hyper.data(), static_cast<int64_t>(hyper.size()), step),
                                  set, nonfinite, gradients.data(), static_cast<int64_t>(gradients.size()));
}

std::vector<float> Grads(const std::vector<int64_t>& ids, int64_t dim, float scale) {
  std::vector<float> grads;
  for (size_t i = 0; i < ids.size() * static_cast<size_t>(dim); ++i) grads.push_back(scale * static_cast<float>(i % 7));
  return grads;
}

Keys Range(uint64_t begin, uint64_t end, uint64_t step = 1) {
  Keys keys;
  for (uint64_t key = begin; key < end; key += step) keys.push_back(key);
  return keys;
}

const std::vector<double> kAdam = {0.01, 0.9, 0.999, 1e-7}, kAdagrad = {0.1, 0.1, 1e-7};

}  // namespace

// Two hashed tables, one of them behind three features that bring new keys of one another, and an identity table.
TEST(AGroupGivesWhatSingleLookupsGive) {
  Table a(Config(4, 9000)), b(Config(3, 9000)), c(Config(5, 500, false));
  Table twin_a(Config(4, 9000)), twin_b(Config(3, 9000)), twin_c(Config(5, 500, false));
  for (int step = 0; step < 4; ++step) {
    const uint64_t s = static_cast<uint64_t>(step) * 700;
    std::vector<Asked> asked;
    asked.emplace_back(a, Range(s, s + 1000));
    asked.emplace_back(b, Range(s, s + 900));
    asked.emplace_back(a, Range(s + 500, s + 1500), Splits{0, 0, 3, 400, 400, 1000});  // half of them new to the first
    asked.emplace_back(c, Range(0, 300), Splits{0, 100, 300});
    asked.emplace_back(a, Range(s + 200, s + 1800, 3));
    asked.emplace_back(a, Range(s + 1000, s + 2400, 2));
    asked.back().is_read = false;  // its new keys get their rows all the same
    LookUp(&asked);
    std::vector<Rows> single;
    single.push_back(twin_a.Lookup(asked[0].keys));
    single.push_back(twin_b.Lookup(asked[1].keys));
    single.push_back(twin_a.LookupCombine(asked[2].keys, asked[2].splits));
    single.push_back(twin_c.LookupCombine(asked[3].keys, asked[3].splits));
    single.push_back(twin_a.Lookup(asked[4].keys));
    single.push_back(twin_a.Lookup(asked[5].keys));
    single[5].values = asked[5].output;
    for (size_t f = 0; f < asked.size(); ++f) {
      CHECK(asked[f].output == single[f].values);
      CHECK(asked[f].ids == single[f].ids);
    }
    // An exact Adam: the next lookup settles rows, with the table to itself.
    for (auto [table, twin, f] : {std::tuple{&a, &twin_a, 0}, std::tuple{&b, &twin_b, 1}}) {
      const auto& ids = asked[static_cast<size_t>(f)].ids;
      const auto grads = Grads(ids, table->native().dim(), 0.1f);
      table->Apply("adam", kAdam, ids, grads, step + 1);
      twin->Apply("adam", kAdam, ids, grads, step + 1);
    }
  }
  CHECK(a.native().Keys() == twin_a.native().Keys());
}

// New keys of the first feature make the row numbers that the second has found stale; so does an erasure between calls.
TEST(FeaturesOfOneTableAgreeOnTheRowsOfNewKeys) {
  Table table(Config(4, 20000));
  for (uint64_t round = 0; round < 5; ++round) {
    const Keys keys = Range(round * 2000, round * 2000 + 3000);
    Splits each;
    for (int64_t i = 0; i <= 3000; ++i) each.push_back(i);
    std::vector<Asked> asked;
    for (int f = 0; f < 4; ++f) asked.emplace_back(table, keys, f % 2 == 0 ? Splits() : each);
    LookUp(&asked);
    for (const Asked& one : asked) {
      CHECK(one.ids == asked[0].ids);
      CHECK(one.output == asked[0].output);
    }
    table.Erase(Range(round * 2000, round * 2000 + 3000, 7));  // their numbers go to the next round's keys
  }
}

TEST(AKeyThatNoTableHoldsStoresNothingAnywhere) {
  Table a(Config(4, 100)), b(Config(3, 50, false));
  std::vector<Asked> asked;
  asked.emplace_back(a, Keys{1, 2});
  asked.emplace_back(b, Keys{3, 50});
  CHECK_THROWS(LookUp(&asked), sok::InvalidArgument, "key 50 is outside [0, 50)");
  CHECK_EQ(a.native().size() + b.native().size(), 0);
}

// Features that fit one by one, but not together: new keys of a table are added for all of its features or for none.
TEST(AFullTableStoresNothingForAnyOfItsFeatures) {
  Table tight(Config(4, 10)), ample(Config(3, 100)), twin(Config(4, 10));
  for (Table* table : {&tight, &twin}) table->Lookup(Range(0, 4));
  std::vector<Asked> asked;
  asked.emplace_back(tight, Range(2, 8));
  asked.emplace_back(ample, Range(0, 5));
  asked.emplace_back(tight, Range(6, 11), Splits{0, 2, 5});
  CHECK_THROWS(LookUp(&asked), sok::TableFull, "all 10 rows are in use and key 10 is new");
  CHECK(tight.native().Keys() == Range(0, 4));
  CHECK(ample.native().Keys() == Range(0, 5));
  asked.back().keys.back() = 9;  // nine keys with those that are there: together they fit
  asked.back().keys[3] = 3;
  LookUp(&asked);
  const Rows first = twin.Lookup(asked[0].keys), pooled = twin.LookupCombine(asked[2].keys, asked[2].splits);
  CHECK(asked[0].output == first.values && asked[0].ids == first.ids);
  CHECK(asked[2].output == pooled.values && asked[2].ids == pooled.ids);
}

TEST(AGroupOfUpdatesIsAsManySingleOnes) {
  for (const bool exact : {false, true}) {
    Table a(Config(4, 300)), b(Config(3, 300)), twin_a(Config(4, 300)), twin_b(Config(3, 300));
    for (Table* table : {&a, &b, &twin_a, &twin_b}) table->Lookup(Range(0, 200));
    const std::string rule = exact ? "adam" : "adagrad";
    const std::vector<double>& hyper = exact ? kAdam : kAdagrad;
    for (int step = 1; step <= 4; ++step) {
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < 150; ++i) ids.push_back((i * i + step) % 200);  // some come more than once
      const auto of_a = Grads(ids, 4, 0.1f), of_b = Grads(ids, 3, -0.2f);
      Apply({{&a, ids, of_a}, {&b, ids, of_b}}, rule, hyper, rule, step);
      twin_a.Apply(rule, hyper, ids, of_a, step);
      twin_b.Apply(rule, hyper, ids, of_b, step);
    }
    CHECK(a.Lookup(Range(0, 200), false).values == twin_a.Lookup(Range(0, 200), false).values);
    CHECK(b.Lookup(Range(0, 200), false).values == twin_b.Lookup(Range(0, 200), false).values);
  }
}

// Whatever is wrong with the second table, the first is what it was: rows, slot sets, and their settings.
TEST(AGroupThatIsRefusedChangesNoTable) {
  Table a(Config(4, 300)), b(Config(3, 300)), never(Config(4, 300));
  const Keys keys = Range(0, 20);
  const auto ids = a.Lookup(keys).ids;
  never.Lookup(keys);
  b.Lookup(keys);
  const auto of_a = Grads(ids, 4, 0.1f), of_b = Grads(ids, 3, 0.1f);
  b.Apply("adagrad", kAdagrad, ids, of_b);  // the set 'adagrad' of b belongs to this rule
  const auto rows_a = a.Lookup(keys, false).values, rows_b = b.Lookup(keys, false).values;
  const int64_t bytes = a.native().memory_bytes();
  auto is_untouched = [&] {
    CHECK(a.Lookup(keys, false).values == rows_a);
    CHECK(b.Lookup(keys, false).values == rows_b);
    CHECK(a.native().SlotSets().empty());
    CHECK_EQ(a.native().memory_bytes(), bytes);
  };
  CHECK_THROWS(Apply({{&a, ids, of_a}, {&b, ids, of_b}}, "adam", kAdam, "adagrad"), sok::InvalidArgument,
               "belongs to another rule");
  is_untouched();
  auto bad = of_b;
  bad[7] = 0.0f / 0.0f;
  CHECK_THROWS(Apply({{&a, ids, of_a}, {&b, ids, bad}}, "adam", kAdam, "x", 1, sok::Nonfinite::kRaise),
               sok::InvalidArgument, "the gradient of key 2 holds NaN");
  is_untouched();
  CHECK_THROWS(Apply({{&a, ids, of_a}, {&b, {20}, {0, 0, 0}}}, "adam", kAdam, "x"), sok::InvalidArgument, "row id 20");
  is_untouched();
  CHECK_THROWS(Apply({{&a, ids, of_a}, {&a, ids, of_a}}, "adam", kAdam, "x"), sok::InvalidArgument, "given twice");
  is_untouched();
  // Settings too: of a set that is there, those of a call that is refused leave no trace.
  Apply({{&a, ids, of_a}}, "adam", kAdam, "x", 1);
  Apply({{&never, ids, of_a}}, "adam", kAdam, "x", 1);
  const std::vector<double> other = {0.5, 0.5, 0.9, 1e-3};
  b.Apply("sgd", {0.0}, ids, of_b);
  CHECK_THROWS(Apply({{&a, ids, of_a}, {&b, ids, of_b}}, "adam", other, "sgd"), sok::InvalidArgument, "another rule");
  for (int step = 2; step <= 5; ++step)
    for (Table* table : {&a, &never}) Apply({{table, {ids[3]}, {1, 1, 1, 1}}}, "adam", kAdam, "x", step);
  CHECK(a.Lookup(keys, false).values == never.Lookup(keys, false).values);
}

// Steps that a row has missed were those of the settings then, whatever the settings are when it catches up.
TEST(MissedStepsKeepTheirSettings) {
  Table lazy(Config(4, 300)), eager(Config(4, 300));
  const Keys keys = Range(0, 20);
  const auto ids = lazy.Lookup(keys).ids;
  eager.Lookup(keys);
  const auto grads = Grads(ids, 4, 0.1f);
  std::vector<double> hyper = kAdam;
  for (int step = 1; step <= 40; ++step) {
    if (step == 20) hyper = {0.01, 0.5, 0.9, 1e-3};
    if (step == 30) hyper = {0.02, 0.5, 0.9, 1e-3};
    for (Table* table : {&lazy, &eager})
      table->Apply("adam", hyper, step == 1 ? ids : std::vector<int64_t>{}, grads, step);
    eager.Lookup(keys);  // settles every row at every step
  }
  const auto a = lazy.Lookup(keys, false).values, b = eager.Lookup(keys, false).values;
  for (size_t i = 0; i < a.size(); ++i) CHECK(std::abs(a[i] - b[i]) <= 2e-6f * (1.0f + std::abs(b[i])));
}

TEST(GradientsOfRowsThatWereErasedSinceAreIgnored) {
  Table a(Config(4, 300)), b(Config(3, 300));
  const auto ids = a.Lookup(Range(0, 20)).ids;
  b.Lookup(Range(0, 20));
  a.Erase({5});
  const auto fresh = a.Lookup({100});  // the row number of key 5
  Apply({{&a, ids, Grads(ids, 4, 1.0f)}, {&b, ids, Grads(ids, 3, 1.0f)}}, "sgd", {1.0}, "sgd");
  CHECK(a.Lookup({100}, false).values == fresh.values);
}

// Groups that name the same tables in other orders, with insertions, updates of exact Adam, erasures and reads at once.
TEST(CallsThatShareTablesInAnyOrderAllEnd) {
  std::vector<std::unique_ptr<Table>> tables;
  for (int t = 0; t < 3; ++t) tables.push_back(std::make_unique<Table>(Config(4, 4000), 2));
  tables.push_back(std::make_unique<Table>(Config(4, 500, false), 2));
  for (auto& table : tables) {
    const auto ids = table->Lookup(Range(0, 200)).ids;
    table->Apply(table == tables[1] ? "adagrad" : "adam", table == tables[1] ? kAdagrad : kAdam, ids,
                 Grads(ids, 4, 0.1f));
  }
  std::atomic<int64_t> wrong{0};
  RunTogether(5, [&](int thread) {
    for (int step = 0; step < 12; ++step) {
      if (thread == 4) {
        for (auto& table : tables) {
          table->Erase(Range(static_cast<uint64_t>(step) * 16, static_cast<uint64_t>(step) * 16 + 8));
          wrong += table->native().size() < 0;
        }
        continue;
      }
      std::vector<Asked> asked;
      for (int t = 0; t < 4; ++t) {
        Table& table = *tables[static_cast<size_t>(thread % 2 == 0 ? t : 3 - t)];
        const uint64_t first = static_cast<uint64_t>((step * 30 + thread * 10) % 300);
        asked.emplace_back(table, Range(first, first + 150));
        asked.emplace_back(table, Range(first, first + 150), Splits{0, 50, 150});
      }
      LookUp(&asked, thread != 3);
      for (size_t f = 0; f < asked.size(); f += 2)
        for (size_t i = 0; i < asked[f].ids.size(); ++i) wrong += thread != 3 && asked[f].ids[i] < 0;
      if (thread == 3) continue;
      std::vector<Update> updates;
      for (size_t f = 0; f < asked.size(); f += 2) {
        Table* table = tables[thread % 2 == 0 ? f / 2 : 3 - f / 2].get();
        if (table != tables[1].get()) updates.push_back({table, asked[f].ids, Grads(asked[f].ids, 4, 0.01f)});
      }
      Apply(updates, "adam", kAdam, "adam", step + 2);
    }
  });
  CHECK_EQ(wrong.load(), 0);
}
