#include "sok/serving_table.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "files.h"
#include "sok/crc32c.h"
#include "sok/error.h"
#include "sok/file_error.h"

namespace {

using sok::MixKey;
using sok::ServingHead;
using sok::ServingTable;

constexpr int64_t kDim = 3;

uint64_t Align(uint64_t offset, uint64_t to) { return (offset + to - 1) / to * to; }

// A file of float rows {key, key + 1, key + 2}, without checksums, after `change` has had its way with the head.
std::string Made(
    const std::vector<uint64_t>& keys, bool hashed, uint32_t kind,
    const std::function<void(ServingHead*)>& change = [](ServingHead*) {}) {
  std::vector<uint64_t> order = keys;
  if (hashed) std::sort(order.begin(), order.end(), [](uint64_t a, uint64_t b) { return MixKey(a) < MixKey(b); });
  ServingHead head = {};
  std::memcpy(head.magic, "SOKSERVE", 8);
  head.version = sok::kServingVersion;
  head.flags = hashed ? 1 : 0;
  head.key_bytes = 8;
  head.dim = kDim;
  head.row_bytes = 4 * kDim;
  head.num_rows = keys.size();
  head.unseen_kind = kind;
  head.unseen_b = 1.0f;
  head.unseen_offset = sok::kServingHeadBytes;
  head.bank_rows = kind == 4 ? 2 : 0;
  head.unseen_bytes = kind == 0 ? 4 * kDim : 4 * kDim * head.bank_rows;
  head.directory_bits = 2;
  head.directory_offset = Align(head.unseen_offset + head.unseen_bytes, 8);
  head.keys_offset = head.directory_offset + (hashed ? 8 * 5 : 0);
  head.rows_offset = head.keys_offset + (hashed ? 8 * keys.size() : 0);
  head.checksums_offset = head.file_bytes = head.rows_offset + head.row_bytes * keys.size();
  std::string bytes(head.file_bytes, '\0');
  for (uint64_t i = 0; i < head.unseen_bytes / 4; ++i) {
    const float value = -1.0f - static_cast<float>(i);
    std::memcpy(&bytes[head.unseen_offset + 4 * i], &value, 4);
  }
  for (uint64_t b = 0; hashed && b < 5; ++b) {
    const auto begin = static_cast<uint64_t>(
        std::count_if(order.begin(), order.end(), [b](uint64_t key) { return b == 4 || MixKey(key) >> 62 < b; }));
    std::memcpy(&bytes[head.directory_offset + 8 * b], &begin, 8);
  }
  for (size_t i = 0; i < order.size(); ++i) {
    const uint64_t mixed = MixKey(order[i]);
    if (hashed) std::memcpy(&bytes[head.keys_offset + 8 * i], &mixed, 8);
    for (size_t j = 0; j < kDim; ++j) {
      const float value = static_cast<float>(order[i] + j);
      std::memcpy(&bytes[head.rows_offset + head.row_bytes * i + 4 * j], &value, 4);
    }
  }
  head.name_bytes = 1;
  change(&head);
  std::memcpy(&bytes[0], &head, sizeof(head));
  bytes[sizeof(head)] = 't';
  const uint32_t crc = sok::Crc32c(bytes.data(), sok::kServingHeadBytes - 4);
  std::memcpy(&bytes[sok::kServingHeadBytes - 4], &crc, 4);
  return bytes;
}

std::vector<float> Rows(const ServingTable& table, const std::vector<uint64_t>& keys) {
  const sok::SerialExecutor executor;
  sok::Scratch scratch;
  std::vector<float> rows(keys.size() * kDim, 99.0f);
  table.Lookup({executor}, &scratch, keys.data(), static_cast<int64_t>(keys.size()), rows.data());
  return rows;
}

std::vector<uint64_t> SomeKeys(uint64_t n) {
  std::vector<uint64_t> keys;
  for (uint64_t i = 0; i < n; ++i) keys.push_back(i * i);
  return keys;
}

template <class Error>
std::string Refused(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST(KeysAreFoundAndOthersReadAsUnseen) {
  const Folder folder;
  for (const uint64_t n : {0u, 1u, 2u, 17u, 400u}) {
    const std::vector<uint64_t> keys = SomeKeys(n);
    WriteFile(folder / "t", Made(keys, true, 0));
    const ServingTable table(folder / "t");
    CHECK_EQ(table.num_rows(), static_cast<int64_t>(n));
    const std::vector<float> rows = Rows(table, keys);
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < kDim; ++j) CHECK_EQ(rows[kDim * i + j], static_cast<float>(keys[i] + j));
    const std::vector<float> unseen = Rows(table, {3, ~uint64_t{0}});
    for (size_t i = 0; i < 2 * kDim; ++i) CHECK_EQ(unseen[i], -1.0f - static_cast<float>(i % kDim));
  }
}

TEST(UnseenKeysAreDrawnAsTheTableDrawsThem) {
  const Folder folder;
  for (const uint32_t kind : {1u, 2u, 3u, 4u}) {
    WriteFile(folder / "t", Made({7}, true, kind, [](ServingHead* head) { head->seed = 5; }));
    sok::Initializer init;
    init.kind = static_cast<sok::InitKind>(kind);
    init.a = 0.0f;
    init.b = 1.0f;
    init.seed = 5;
    init.bank = {-1, -2, -3, -4, -5, -6};
    init.bank_rows = 2;
    float expected[kDim];
    sok::FillRow(init, 8, kDim, expected);
    const std::vector<float> rows = Rows(ServingTable(folder / "t"), {8, 7});
    for (size_t j = 0; j < kDim; ++j) CHECK_EQ(rows[j], expected[j]);
    CHECK_EQ(rows[kDim], 7.0f);
  }
}

TEST(IdentityTablesRefuseOtherKeys) {
  const Folder folder;
  WriteFile(folder / "t", Made({0, 1, 2}, false, 0));
  const ServingTable table(folder / "t");
  CHECK_EQ(Rows(table, {2})[0], 2.0f);
  for (const uint64_t key : {uint64_t{3}, ~uint64_t{0}}) {
    CHECK(Refused<sok::InvalidArgument>([&] { Rows(table, {1, key}); }).find("is not in [0, 3)") != std::string::npos);
  }
}

TEST(FilesCutAnywhereAreRefused) {
  const Folder folder;
  const std::string bytes = Made(SomeKeys(100), true, 0);
  for (size_t n = 0; n < bytes.size(); n += n < 200 || n > bytes.size() - 20 ? 1 : 97) {
    WriteFile(folder / "t", bytes.substr(0, n));
    const std::string text = Refused<sok::DamagedFile>([&] { const ServingTable table(folder / "t"); });
    CHECK(text.find("at offset " + std::to_string(n) + ":") != std::string::npos);
  }
  WriteFile(folder / "t", bytes);
  const ServingTable table(folder / "t");
  CHECK_EQ(truncate((folder / "t").c_str(), 4096), 0);
  CHECK(!Refused<sok::DamagedFile>([&] { Rows(table, {1}); }).empty());
}

TEST(AnyNumberInAnyFieldOfTheHeadIsRefusedOrHarmless) {
  const Folder folder;
  const std::vector<uint64_t> keys = SomeKeys(50);
  int refused = 0;
  for (size_t offset = 8; offset + 8 <= sizeof(ServingHead); offset += 4) {
    for (const uint64_t value : {uint64_t{0}, uint64_t{1}, uint64_t{5}, uint64_t{4096}, uint64_t{1} << 31,
                                 uint64_t{1} << 40, uint64_t{1} << 61, uint64_t{1} << 63, ~uint64_t{0} - 7}) {
      const uint32_t kind = (offset + value) % 3 == 0 ? 0 : 4;  // a row, or a bank
      WriteFile(folder / "t", Made(keys, true, kind, [&](ServingHead* head) {
                  std::memcpy(reinterpret_cast<char*>(head) + offset, &value, 8);
                }));
      try {
        const ServingTable table(folder / "t");
        const sok::SerialExecutor executor;
        sok::Scratch scratch;
        std::vector<float> rows(keys.size() * static_cast<size_t>(table.dim()));
        table.Lookup({executor}, &scratch, keys.data(), static_cast<int64_t>(keys.size()), rows.data());
      } catch (const sok::DamagedFile&) {
        ++refused;
      } catch (const sok::InvalidArgument&) {
        ++refused;
      }
    }
  }
  CHECK(refused > 150);
}

TEST(BanksThatDoNotFitTheirFileAreRefused) {
  const Folder folder;
  auto refuses = [&](const std::function<void(ServingHead*)>& change) {
    WriteFile(folder / "t", Made({7}, true, 4, change));
    const std::string text = Refused<sok::DamagedFile>([&] { const ServingTable table(folder / "t"); });
    CHECK(text.find("at offset 56: the section of the initializer does not fit into the file") != std::string::npos);
  };
  // More rows than there are, none, so many that their bytes or floats are a small number again.
  for (const uint64_t rows : {uint64_t{100}, uint64_t{0}, uint64_t{1} << 32, uint64_t{1} << 62, ~uint64_t{0}}) {
    refuses([&](ServingHead* head) { head->bank_rows = rows; });
    refuses([&](ServingHead* head) {
      head->bank_rows = rows;
      head->unseen_bytes = 4 * kDim * rows;
    });
  }
  refuses([](ServingHead* head) { head->unseen_bytes -= 4; });
  refuses([](ServingHead* head) { head->unseen_offset = 0; });
  refuses([](ServingHead* head) { head->unseen_offset = head->file_bytes - 4; });
  refuses([](ServingHead* head) { head->unseen_offset += 2; });
}

// A file of holes says to be as large as it likes: what it says costs nothing before somebody reads it.
TEST(ABankIsReadWhereItLies) {
  const Folder folder;
  constexpr uint64_t kRows = uint64_t{1} << 32;
  WriteFile(folder / "t", Made({7}, true, 4, [](ServingHead* head) {
              head->unseen_offset = Align(head->file_bytes, 4096);
              head->bank_rows = kRows;
              head->unseen_bytes = 4 * kDim * kRows;
              head->file_bytes = head->unseen_offset + head->unseen_bytes;
            }));
  CHECK_EQ(truncate((folder / "t").c_str(), int64_t{1} << 36), 0);
  const ServingTable table(folder / "t");
  const std::vector<float> rows = Rows(table, {7, 8, 9});
  CHECK_EQ(rows[0], 7.0f);
  for (size_t j = kDim; j < rows.size(); ++j) CHECK_EQ(rows[j], 0.0f);
}

TEST(CraftedDirectoriesReadNothingOutside) {
  const Folder folder;
  std::string bytes = Made(SomeKeys(50), true, 0);
  ServingHead head;
  std::memcpy(&head, bytes.data(), sizeof(head));
  for (const uint64_t begin : {~uint64_t{0}, uint64_t{51}, uint64_t{1} << 62}) {
    for (uint64_t b = 0; b < 5; ++b) std::memcpy(&bytes[head.directory_offset + 8 * b], &begin, 8);
    WriteFile(folder / "t", bytes);
    const ServingTable table(folder / "t");
    CHECK(Refused<sok::DamagedFile>([&] { Rows(table, {1}); }).find("directory") != std::string::npos);
  }
}

TEST(SeveralThreadsLookUpAtOnce) {
  const Folder folder;
  const std::vector<uint64_t> keys = SomeKeys(1000);
  WriteFile(folder / "t", Made(keys, true, 0));
  const ServingTable table(folder / "t");
  const std::vector<float> expected = Rows(table, keys);
  std::vector<int> equal(4, 0);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < equal.size(); ++t) threads.emplace_back([&, t] { equal[t] = Rows(table, keys) == expected; });
  for (std::thread& thread : threads) thread.join();
  for (const int e : equal) CHECK_EQ(e, 1);
}

TEST(AFileThatIsNotThereIsSaid) {
  const Folder folder;
  CHECK(Refused<sok::FileError>([&] { const ServingTable table(folder / "absent"); }).find("cannot open") !=
        std::string::npos);
}
