#include "shared_parcels.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <utility>

namespace sok {
namespace {

// An envelope is seven words, and behind them the data themselves if they are few (filled up to whole words).
enum EnvelopeWord { kCount, kPid, kFd, kId, kOffset, kIsInline, kName, kEnvelopeWords };
constexpr double kSecondsOfLeaving = 10.0;

int64_t WordsOf(int64_t bytes) { return (bytes + 7) / 8; }

int64_t Aligned(int64_t bytes) { return (bytes + 63) & ~int64_t{63}; }

std::atomic<Mail*>& MailOfNow() {
  static std::atomic<Mail*> now{nullptr};
  return now;
}

}  // namespace

SharedPool& PoolToSend() {
  static SharedPool* pool = new SharedPool;  // leaked: kernels may run while the process ends
  return *pool;
}

SharedReader& ReaderOfSent() {
  static SharedReader* reader = new SharedReader;
  return *reader;
}

Mail* TheMail::Get() { return MailOfNow().load(); }

void TheMail::Set(std::unique_ptr<Mail> mail) {
  Mail* const before = MailOfNow().exchange(mail.release());
  if (before != nullptr) before->Leave(kSecondsOfLeaving);
}

Parcels::Parcels(std::string collective, int64_t rank, tensorflow::DataType dtype, int64_t values)
    : collective_(std::move(collective)),
      rank_(rank),
      dtype_(dtype),
      values_(values),
      width_(tensorflow::DataTypeSize(dtype)) {}

// Eager calls meet whatever their names: ranks that are out of step are in different ones.
int64_t Parcels::Number() const {
  return static_cast<int64_t>(std::hash<std::string>()(collective_)) ^ dtype_ ^
         static_cast<int64_t>(static_cast<uint64_t>(values_) * 0x9E3779B97F4A7C15u);
}

std::vector<Mail::Words> Parcels::Pack(const Mail& mail, const char* data, const std::vector<int64_t>& counts,
                                       bool same_for_all) const {
  const int64_t world = mail.size();
  if (rank_ >= world || world != static_cast<int64_t>(counts.size())) {
    throw InvalidArgument("`splits` must have one value per rank.");
  }
  auto bytes_for = [&](int64_t r) { return r == rank_ ? 0 : counts[static_cast<size_t>(r)] * width_; };
  int64_t shared_bytes = 0;
  int readers = 0;
  for (int64_t r = 0; r < world; ++r) {
    if (bytes_for(r) <= kInlineBytes || !mail.IsHere(r)) continue;
    shared_bytes = (same_for_all ? 0 : shared_bytes) + Aligned(bytes_for(r));
    ++readers;
  }
  SharedPool::Lease lease;
  bool has_memory = readers > 0;
  const bool is_there = has_memory && PoolToSend().Lend(collective_, data, readers, &lease);
  try {
    if (has_memory && !is_there) lease = PoolToSend().Take(collective_, shared_bytes, readers);
  } catch (const OutOfMemory&) {
    has_memory = false;  // the long way then: peers wait
  }
  if (same_for_all && has_memory && !is_there) std::memcpy(lease.data, data, static_cast<size_t>(counts[0] * width_));
  std::vector<Mail::Words> envelopes(static_cast<size_t>(world));
  int64_t offset = 0;
  for (int64_t r = 0; r < world; ++r) {
    const int64_t bytes = bytes_for(r);
    const bool is_inline = bytes <= kInlineBytes || !has_memory || !mail.IsHere(r);
    Mail::Words& word = envelopes[static_cast<size_t>(r)];
    word.resize(static_cast<size_t>(kEnvelopeWords + (is_inline ? WordsOf(bytes) : 0)));
    word[kCount] = counts[static_cast<size_t>(r)];
    word[kPid] = lease.region.pid;
    word[kFd] = lease.region.fd;
    word[kId] = lease.region.id;
    word[kOffset] = is_there ? data - lease.data : offset;
    word[kIsInline] = is_inline ? 1 : 0;
    word[kName] = Number();
    if (is_inline) {
      if (bytes > 0) std::memcpy(&word[kEnvelopeWords], data, static_cast<size_t>(bytes));
    } else if (!is_there && !same_for_all) {
      std::memcpy(lease.data + offset, data, static_cast<size_t>(bytes));
      offset += Aligned(bytes);
    }
    if (!same_for_all) data += counts[static_cast<size_t>(r)] * width_;
  }
  return envelopes;
}

std::vector<int64_t> Parcels::Counts(const std::vector<Mail::Words>& envelopes) const {
  std::vector<int64_t> counts;
  for (size_t r = 0; r < envelopes.size(); ++r) {
    const Mail::Words& word = envelopes[r];
    const bool is_whole = word.size() >= kEnvelopeWords;
    if (is_whole && word[kName] != Number()) {
      throw FailedPrecondition(
          "what rank " + std::to_string(r) + " sent is not of collective '" + collective_ +
          "', or has another dtype or, of a sum, another number of values: it was in another call. "
          "All workers must make the same lookups, in the same order.");
    }
    const int64_t count = !is_whole || word[kCount] > INT32_MAX ? -1 : word[kCount];
    const bool has_none = count < 0 || static_cast<int64_t>(r) == rank_ || word[kIsInline] == 0;
    if (count < 0 || static_cast<int64_t>(word.size()) != kEnvelopeWords + (has_none ? 0 : WordsOf(count * width_))) {
      throw InvalidArgument("what rank " + std::to_string(r) + " sent for collective '" + collective_ +
                            "' is no envelope.");
    }
    counts.push_back(count);
  }
  return counts;
}

void Parcels::Unpack(const std::vector<Mail::Words>& envelopes, const char* own, char* to) const {
  for (size_t r = 0; r < envelopes.size(); ++r) {
    const Mail::Words& word = envelopes[r];
    const int64_t bytes = word[kCount] * width_;
    if (static_cast<int64_t>(r) == rank_) {  // what this rank sends to itself stays where it is
      if (bytes > 0) std::memcpy(to, own, static_cast<size_t>(bytes));
    } else if (word[kIsInline] != 0) {
      if (bytes > 0) std::memcpy(to, &word[kEnvelopeWords], static_cast<size_t>(bytes));
    } else {
      ReaderOfSent().Read({word[kPid], word[kFd], word[kId]}, word[kOffset], bytes, to);
    }
    to += bytes;
  }
}

}  // namespace sok
