// A table as a file that is searched where it lies: mapped read-only, nothing is built or copied when it is opened, and all
// processes of a machine share one copy. The layout: docs/design/serving_table.md.
//
// Errors are FileError and DamagedFile, which name the file, and InvalidArgument.
#pragma once

#include <cstdint>
#include <string>

#include "sok/device.h"
#include "sok/initializer.h"
#include "sok/scratch.h"

namespace sok {

constexpr int64_t kServingHeadBytes = 4096;         // at the front, its CRC in the last four
constexpr int64_t kServingChecksumBytes = 1 << 20;  // each checksum is of so many bytes behind the head
constexpr uint32_t kServingVersion = 1;

enum class ServingRowType : uint32_t { kFloat32 = 0, kFloat16 = 1, kInt8 = 2 };

// As it stands at the front of the file, little-endian.
struct ServingHead {
  char magic[8];  // "SOKSERVE"
  uint32_t version;
  uint32_t flags;  // bit 0: hashed; bit 1: unsigned keys; bit 2: the rows lie elsewhere
  uint32_t key_bytes;
  uint32_t row_type;
  uint64_t dim;
  uint64_t row_bytes;  // from one row to the next
  uint64_t num_rows;
  uint64_t file_bytes;
  uint64_t unseen_offset;  // f32: a row [dim] for kind constant, [bank_rows, dim] for kind bank, else nothing
  uint64_t unseen_bytes;
  uint64_t
      directory_offset;  // u64 [2^directory_bits + 1]: where among the keys those of each bucket begin; last: num_rows
  uint32_t directory_bits;
  uint32_t unseen_kind;  // InitKind: what a key without a row reads as
  uint64_t keys_offset;  // u64 [num_rows]: MixKey of each key, rising
  uint64_t rows_offset;
  uint64_t checksums_offset;  // u32 [num_checksums]: CRCs of the bytes from the head to here, in pieces
  uint64_t num_checksums;
  uint32_t checksums_crc;
  float unseen_a;
  float unseen_b;
  uint32_t name_bytes;  // the table's name follows the head
  uint64_t seed;
  uint64_t bank_rows;
};
static_assert(sizeof(ServingHead) == 152, "the layout of the file");

// What keys are sorted by, so that they lie evenly whatever they are. One to one: each step can be undone. Source: the
// mixer that C. Wellons' "Prospecting for hash functions" (2018) lists as degski64.
inline uint64_t MixKey(uint64_t key) {
  constexpr uint64_t kFactor = 0xD6E8FEB86659FD93u;
  key = (key ^ (key >> 32)) * kFactor;
  key = (key ^ (key >> 32)) * kFactor;
  return key ^ (key >> 32);
}

// Thread-safe: nothing changes after the constructor.
class ServingTable {
 public:
  // Maps the file. Reads and checks the head, and what of it must fit the file's size; the rest is not read.
  explicit ServingTable(const std::string& path);
  virtual ~ServingTable();
  ServingTable(const ServingTable&) = delete;
  ServingTable& operator=(const ServingTable&) = delete;

  // rows[i] = the row of keys[i] (64-bit words, as in embedding_table.h), or what a key without a row reads as. Throws
  // InvalidArgument for a key outside an identity table, DamagedFile where the directory makes no sense, or where the
  // file is shorter than it was: to read on would end the process.
  virtual void Lookup(const Cpu& cpu, Scratch* scratch,
                      const uint64_t* keys,  // [n]
                      int64_t n,
                      float* rows) const;  // [n, dim]

  const std::string& path() const { return path_; }
  const std::string& name() const { return name_; }
  int64_t dim() const { return static_cast<int64_t>(head_.dim); }
  int64_t num_rows() const { return static_cast<int64_t>(head_.num_rows); }
  int64_t bytes() const { return static_cast<int64_t>(head_.file_bytes); }
  bool hashed() const { return (head_.flags & 1) != 0; }
  bool is_unsigned() const { return (head_.flags & 2) != 0; }
  int key_bytes() const { return static_cast<int>(head_.key_bytes); }
  // Whether the rows lie elsewhere: `source` says where (redis_table.h), and this class has no rows of its own.
  bool is_remote() const { return (head_.flags & 4) != 0; }
  const std::string& source() const { return source_; }

 protected:
  int64_t row_bytes() const { return static_cast<int64_t>(head_.row_bytes); }
  // A row [dim] of the row_bytes that are stored of it, at a multiple of 4.
  void ReadStored(const char* stored, float* row) const;
  // What a key without a row reads as.
  void ReadUnseen(uint64_t key, float* row) const;
  // Of a key outside an identity table.
  [[noreturn]] void RefuseKey(uint64_t key) const;

 private:
  void ReadHead();
  void CheckHead() const;
  void CheckStillWhole() const;
  void FindHashed(const uint64_t* keys, int64_t begin, int64_t end, int64_t* at) const;
  void FindIdentity(const uint64_t* keys, int64_t begin, int64_t end, int64_t* at) const;
  void ReadRow(int64_t at, uint64_t key, float* row) const;
  template <class T>
  const T* At(uint64_t offset) const {
    return reinterpret_cast<const T*>(data_ + offset);
  }
  [[noreturn]] void Refuse(int64_t offset, const std::string& what) const;

  std::string path_, name_, source_;
  int file_ = -1;
  ServingHead head_ = {};
  const char* data_ = nullptr;   // [file_bytes]
  InitializerView unseen_ = {};  // its bank lies in the file
};

}  // namespace sok
