#include "sok/serving_table.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "sok/crc32c.h"
#include "sok/error.h"
#include "sok/file_error.h"
#include "sok/table_store.h"

namespace sok {
namespace {

constexpr int64_t kUnseen = -1;
constexpr int64_t kDamaged = -2;
constexpr uint64_t kMaxTableName = 1024;
// Buckets above this are searched by halves: MixKey keeps them at 16 keys or so unless keys were chosen to defeat it.
constexpr uint64_t kScannedKeys = 64;
constexpr int64_t kTogether = 16;  // searches at a time, so that their cache misses overlap

// The upper half of a product.
uint64_t MulHigh(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
}

float AsFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Not by way of subnormal floats, which TensorFlow's threads take for zeros.
float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = half & 0x7C00u, mantissa = half & 0x03FFu;
  const uint32_t widened = (static_cast<uint32_t>(half & 0x7FFFu) << 13) + (112u << 23);
  const uint32_t not_finite = widened + (112u << 23);
  const float small = AsFloat((113u << 23) | (mantissa << 13)) - AsFloat(113u << 23);
  uint32_t bits;
  std::memcpy(&bits, &small, sizeof(bits));
  bits = exponent == 0 ? bits : (exponent == 0x7C00u ? not_finite : widened);
  return AsFloat(bits | sign);
}

// Whether [offset, offset + count * size) lies in a file of so many bytes, the head left out, at a multiple of `align`.
bool Fits(uint64_t offset, uint64_t count, uint64_t size, uint64_t align, uint64_t file_bytes) {
  if (offset < static_cast<uint64_t>(kServingHeadBytes) || offset % align != 0 || offset > file_bytes) return false;
  return size == 0 || count <= (file_bytes - offset) / size;
}

}  // namespace

ServingTable::ServingTable(const std::string& path) : path_(path) {
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) throw FileError(errno, "open", path_);
  try {
    ReadHead();
    void* data = mmap(nullptr, head_.file_bytes, PROT_READ, MAP_SHARED, file_, 0);
    if (data == MAP_FAILED) throw FileError(errno, "map", path_);
    data_ = static_cast<const char*>(data);
  } catch (...) {
    close(file_);
    throw;
  }
  unseen_ = {static_cast<InitKind>(head_.unseen_kind),
             head_.unseen_a,
             head_.unseen_b,
             head_.seed,
             At<float>(head_.unseen_offset),
             static_cast<int64_t>(head_.bank_rows)};
}

ServingTable::~ServingTable() {
  munmap(const_cast<char*>(data_), head_.file_bytes);
  close(file_);
}

void ServingTable::Refuse(int64_t offset, const std::string& what) const {
  throw DamagedFile(path_ + ": at offset " + std::to_string(offset) + ": " + what +
                    ". Export the model again, or copy it again from where it is whole.");
}

void ServingTable::ReadHead() {
  char page[kServingHeadBytes];
  int64_t n = 0;
  while (n < kServingHeadBytes) {
    const ssize_t got = pread(file_, page + n, static_cast<size_t>(kServingHeadBytes - n), n);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw FileError(errno, "read", path_);
    if (got == 0) Refuse(n, "the file ends inside its head of " + std::to_string(kServingHeadBytes) + " bytes");
    n += got;
  }
  std::memcpy(&head_, page, sizeof(head_));
  if (std::memcmp(head_.magic, "SOKSERVE", sizeof(head_.magic)) != 0) Refuse(0, "not a table of a native export");
  if (head_.version != kServingVersion) {
    Refuse(8, "version " + std::to_string(head_.version) + " of the layout, where this library knows version " +
                  std::to_string(kServingVersion));
  }
  uint32_t crc;
  std::memcpy(&crc, page + kServingHeadBytes - 4, 4);
  if (crc != Crc32c(page, kServingHeadBytes - 4)) Refuse(0, "the head does not have the CRC that it says");
  CheckHead();
  name_.assign(page + sizeof(head_), head_.name_bytes);
  if (is_remote()) {
    const char* at = page + sizeof(head_) + head_.name_bytes;
    uint32_t length;
    std::memcpy(&length, at, sizeof(length));
    if (length > kServingHeadBytes - 8 - sizeof(head_) - head_.name_bytes)
      Refuse(0, "the source does not fit in the head");
    source_.assign(at + sizeof(length), length);
  }
  CheckStillWhole();
}

void ServingTable::CheckHead() const {
  const ServingHead& h = head_;
  const bool is_known = h.flags < 8 && (h.key_bytes == 4 || h.key_bytes == 8) && h.row_type <= 2 && h.unseen_kind <= 4;
  if (!is_known) Refuse(12, "flags, key size, row type or initializer is none that there is");
  if (h.dim < 1 || h.dim > uint64_t{kMaxDim} || h.name_bytes > kMaxTableName)
    Refuse(24, "dim or the length of the name is too large");
  const uint64_t needed = h.row_type == 0 ? 4 * h.dim : (h.row_type == 1 ? 2 * h.dim : 4 + h.dim);
  if (h.row_bytes < needed || h.row_bytes % 4 != 0 || h.row_bytes > 8 * uint64_t{kMaxDim})
    Refuse(32, "rows have another size");
  const uint64_t unseen = h.unseen_kind == 0 ? h.dim : (h.unseen_kind == 4 ? h.bank_rows * h.dim : 0);
  const bool is_bank_right = h.unseen_kind != 4 || (h.bank_rows >= 1 && h.bank_rows <= (uint64_t{1} << 32));
  if (!is_bank_right || h.unseen_bytes != 4 * unseen || !Fits(h.unseen_offset, unseen, 4, 4, h.file_bytes)) {
    Refuse(56, "the section of the initializer does not fit into the file");
  }
  if (!Fits(h.checksums_offset, h.num_checksums, 4, 4, h.file_bytes)) Refuse(104, "checksums do not fit into the file");
  if (is_remote()) return;
  if (hashed()) {
    if (h.directory_bits > 40 || !Fits(h.directory_offset, (uint64_t{1} << h.directory_bits) + 1, 8, 8, h.file_bytes)) {
      Refuse(72, "the directory does not fit into the file");
    }
    if (!Fits(h.keys_offset, h.num_rows, 8, 8, h.file_bytes)) Refuse(88, "the keys do not fit into the file");
  }
  if (!Fits(h.rows_offset, h.num_rows, h.row_bytes, 4, h.file_bytes)) Refuse(96, "the rows do not fit into the file");
}

void ServingTable::CheckStillWhole() const {
  struct stat status;
  if (fstat(file_, &status) != 0) throw FileError(errno, "look at", path_);
  if (static_cast<uint64_t>(status.st_size) < head_.file_bytes) {
    Refuse(status.st_size, "the file ends here, where its head says " + std::to_string(head_.file_bytes) + " bytes");
  }
}

void ServingTable::Lookup(const Cpu& cpu, Scratch* scratch, const uint64_t* keys, int64_t n, float* rows) const {
  CheckStillWhole();
  int64_t* at = scratch->Get<int64_t>(n);
  std::atomic<bool> is_right{true};
  // 300 cycles: a miss for the directory, the keys and the row each, of which those of neighbours overlap.
  cpu.executor.For(n, 300 + dim(), [&](int64_t begin, int64_t end) {
    hashed() ? FindHashed(keys, begin, end, at) : FindIdentity(keys, begin, end, at);
    for (int64_t i = begin; i < end; ++i) {
      if (at[i] == kDamaged) is_right.store(false, std::memory_order_relaxed);
      if (at[i] != kDamaged) ReadRow(at[i], keys[i], rows + i * dim());
    }
  });
  if (is_right.load()) return;
  const int64_t i = std::find(at, at + n, kDamaged) - at;
  if (hashed()) {
    const uint64_t mixed = MixKey(keys[i]);
    const uint64_t bucket = head_.directory_bits == 0 ? 0 : mixed >> (64 - head_.directory_bits);
    Refuse(static_cast<int64_t>(head_.directory_offset + 8 * bucket), "the directory makes no sense");
  }
  RefuseKey(keys[i]);
}

void ServingTable::RefuseKey(uint64_t key) const {
  const std::string text = is_unsigned() ? std::to_string(key) : std::to_string(static_cast<int64_t>(key));
  throw InvalidArgument("table '" + name_ + "': key " + text + " is not in [0, " + std::to_string(num_rows()) + ").");
}

void ServingTable::FindHashed(const uint64_t* keys, int64_t begin, int64_t end, int64_t* at) const {
  const uint64_t* directory = At<uint64_t>(head_.directory_offset);
  const uint64_t* mixed_keys = At<uint64_t>(head_.keys_offset);
  const char* rows = data_ + head_.rows_offset;
  const int bits = static_cast<int>(head_.directory_bits);
  struct Search {
    uint64_t mixed, bucket, first, last, guess;
  } searches[kTogether];
  for (int64_t i = begin; i < end; i += kTogether) {
    const int64_t count = std::min(kTogether, end - i);
    for (int64_t j = 0; j < count; ++j) {
      Search& s = searches[j];
      s.mixed = MixKey(keys[i + j]);
      s.bucket = bits == 0 ? 0 : s.mixed >> (64 - bits);
      __builtin_prefetch(directory + s.bucket);
    }
    for (int64_t j = 0; j < count; ++j) {
      Search& s = searches[j];
      s.first = directory[s.bucket];
      s.last = directory[s.bucket + 1];
      if (s.first > s.last || s.last > head_.num_rows) {
        s.first = s.last = UINT64_MAX;
        continue;
      }
      // Mixed keys lie evenly, so the rest of the bits says how far into the bucket.
      s.guess = s.first + MulHigh(s.mixed << bits, s.last - s.first);
      if (s.first < s.last) __builtin_prefetch(mixed_keys + s.guess);
    }
    for (int64_t j = 0; j < count; ++j) {
      const Search& s = searches[j];
      int64_t* found = at + i + j;
      if (s.first == s.last) {
        *found = s.first == UINT64_MAX ? kDamaged : kUnseen;
        continue;
      }
      uint64_t g = s.guess;
      if (s.last - s.first > kScannedKeys) {
        g = static_cast<uint64_t>(std::lower_bound(mixed_keys + s.first, mixed_keys + s.last, s.mixed) - mixed_keys);
        if (g == s.last) --g;
      } else if (mixed_keys[g] < s.mixed) {
        while (g + 1 < s.last && mixed_keys[g] < s.mixed) ++g;
      } else {
        while (g > s.first && mixed_keys[g] > s.mixed) --g;
      }
      *found = mixed_keys[g] == s.mixed ? static_cast<int64_t>(g) : kUnseen;
      if (*found >= 0) __builtin_prefetch(rows + g * head_.row_bytes);
    }
  }
}

void ServingTable::FindIdentity(const uint64_t* keys, int64_t begin, int64_t end, int64_t* at) const {
  // A negative key is a large word.
  for (int64_t i = begin; i < end; ++i) at[i] = keys[i] < head_.num_rows ? static_cast<int64_t>(keys[i]) : kDamaged;
}

void ServingTable::ReadRow(int64_t at, uint64_t key, float* row) const {
  if (at == kUnseen) return ReadUnseen(key, row);
  ReadStored(data_ + head_.rows_offset + static_cast<uint64_t>(at) * head_.row_bytes, row);
}

void ServingTable::ReadUnseen(uint64_t key, float* row) const {
  if (unseen_.kind == InitKind::kConstant) {
    std::memcpy(row, data_ + head_.unseen_offset, 4 * head_.dim);
  } else {
    FillRow(unseen_, key, dim(), row);
  }
}

void ServingTable::ReadStored(const char* stored, float* row) const {
  switch (static_cast<ServingRowType>(head_.row_type)) {
    case ServingRowType::kFloat32:
      std::memcpy(row, stored, 4 * head_.dim);
      return;
    case ServingRowType::kFloat16: {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(stored);
      for (uint64_t j = 0; j < head_.dim; ++j) row[j] = HalfToFloat(halves[j]);
      return;
    }
    case ServingRowType::kInt8: {
      const float scale = *reinterpret_cast<const float*>(stored);
      const int8_t* steps = reinterpret_cast<const int8_t*>(stored + 4);
      for (uint64_t j = 0; j < head_.dim; ++j) row[j] = static_cast<float>(steps[j]) * scale;
      return;
    }
  }
}

}  // namespace sok
