// What the reader of an exported table does with bytes that anybody may have made.
//
// One input is one file, without the zeros of its head: the first 256 bytes begin the head, which gets the CRC that it should
// have, and the rest follows it. Whatever comes, it is read or refused with one of the errors that serving_table.h promises;
// anything else ends the process, as do the sanitizers. A key has one row, asked for alone or with others.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "harness.h"
#include "sok/crc32c.h"
#include "sok/error.h"
#include "sok/file_error.h"
#include "sok/serving_table.h"

namespace {

constexpr size_t kHeadInput = 256;
constexpr int64_t kMaxKeys = 64, kMaxFloats = 1 << 20;  // longer answers take time and find nothing

const sok::SerialExecutor kSerial;

// False if the table refuses to answer, with the words that it should.
bool Looked(const sok::ServingTable& table, const std::string& path, const uint64_t* keys, int64_t n, float* rows) {
  sok::Scratch scratch;
  try {
    table.Lookup({kSerial}, &scratch, keys, n, rows);
    return true;
  } catch (const sok::DamagedFile& error) {
    Require(std::string(error.what()).rfind(path + ": at offset ", 0) == 0, "damage names the file");
  } catch (const sok::InvalidArgument&) {
    Require(!table.hashed(), "a hashed table takes any key");
  }
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string path = Folder() + "/table";
  const size_t front = std::min(size, kHeadInput);
  std::string file(reinterpret_cast<const char*>(data), front);
  file.resize(sok::kServingHeadBytes);
  const uint32_t crc = sok::Crc32c(file.data(), sok::kServingHeadBytes - 4);
  std::memcpy(&file[sok::kServingHeadBytes - 4], &crc, 4);
  file.append(reinterpret_cast<const char*>(data) + front, size - front);
  Write(path, file.data(), file.size());
  try {
    const sok::ServingTable table(path);
    Require(table.bytes() <= static_cast<int64_t>(file.size()), "nothing is mapped that is not there");
    if (table.is_remote()) return 0;  // its rows are not in the file, and are asked for by RedisTable alone
    const int64_t dim = table.dim(), most = std::min(kMaxKeys, kMaxFloats / dim);
    std::vector<uint64_t> keys;
    while (static_cast<int64_t>(keys.size()) < (table.hashed() ? most : std::min(most, table.num_rows())))
      keys.push_back(keys.size());
    const int64_t n = static_cast<int64_t>(keys.size());
    std::vector<float> together(static_cast<size_t>(n * dim)), alone(static_cast<size_t>(dim));
    const bool answered = Looked(table, path, keys.data(), n, together.data());
    for (int64_t i = 0; i < n && answered; ++i) {
      Require(Looked(table, path, &keys[static_cast<size_t>(i)], 1, alone.data()), "a key alone has a row, too");
      Require(std::memcmp(alone.data(), &together[static_cast<size_t>(i * dim)], alone.size() * sizeof(float)) == 0,
              "a key has one row");
    }
    for (const uint64_t key : {~uint64_t{0}, uint64_t{1} << 63, static_cast<uint64_t>(table.num_rows())})
      Looked(table, path, &key, 1, alone.data());
  } catch (const sok::DamagedFile& error) {
    Require(std::string(error.what()).rfind(path + ": at offset ", 0) == 0, "an error names the file");
  }
  return 0;
}
