// What an all-to-all by mail (sok/mail.h) sends and gets. On one host what is large lies in shared memory, and small
// envelopes travel that say where and when; to other hosts data go in their envelopes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "op.h"
#include "sok/mail.h"
#include "sok/shared_memory.h"

namespace sok {

constexpr int64_t kInlineBytes = 16 << 10;  // below, opening a region costs more than a socket

SharedPool& PoolToSend();
SharedReader& ReaderOfSent();

// The mail of the job that is now; null if ranks do not share a host. That of jobs before is closed and stays: kernels may
// still be in it, and at the end of the process, too.
class TheMail {
 public:
  static Mail* Get();
  static void Set(std::unique_ptr<Mail> mail);
};

// One exchange of a collective, of values of one dtype.
//   collective   its name
//   values       which all ranks must have alike beside the name and the dtype: of sums, how many numbers
class Parcels {
 public:
  Parcels(std::string collective, int64_t rank, tensorflow::DataType dtype, int64_t values = 0);

  // What goes to each rank: the first counts[0] values to rank 0, those behind them to rank 1, and so on; or to each the
  // same counts[0] values. Throws InvalidArgument unless there is one count for each rank.
  std::vector<Mail::Words> Pack(const Mail& mail, const char* data, const std::vector<int64_t>& counts,
                                bool same_for_all = false) const;

  // How many values each rank has sent. Throws FailedPrecondition where a rank was in another call.
  std::vector<int64_t> Counts(const std::vector<Mail::Words>& envelopes) const;

  // Writes what came in the order of ranks, after Counts has looked at it. `own`: what this rank sent to itself.
  void Unpack(const std::vector<Mail::Words>& envelopes, const char* own, char* to) const;

 private:
  int64_t Number() const;

  const std::string collective_;
  const int64_t rank_;
  const tensorflow::DataType dtype_;
  const int64_t values_, width_;
};

}  // namespace sok
