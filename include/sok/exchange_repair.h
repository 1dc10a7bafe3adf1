// Rows that went home ahead of their step, and what is sent again of them in it (docs/design/exchange.md).
//
// The owner keeps what it has sent. In the step it makes the answer anew and compares: a *repair* has the rows that differ
// in a bit. It is a header of kAnswerHeader floats, then run by run the bits of two int32, where in the answer it begins and
// how many floats it has, and these floats.
#pragma once

#include <cstdint>
#include <vector>

#include "sok/device.h"
#include "sok/exchange.h"

namespace sok {

// Of the header: 1 in a repair, 0 in an answer that is whole. What other answers have in the header stays.
inline constexpr int64_t kRepairMark = 2;

// What one rank was sent, and would be sent now: floats, header included. Equally long.
struct AnswerTwice {
  const float* now = nullptr;
  const float* ahead = nullptr;
};

// Rows side by side in an answer.
struct AnswerRows {
  int64_t answer = 0;  // its number
  int64_t begin = 0;   // in it
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t changed = 0;  // written by FindChanges: how many of the rows differ
};

struct RepairRun {
  int32_t begin = 0, size = 0;  // floats of the answer
};

// For each answer the runs of rows that differ. `rows` are those of answer after answer, each from front to back; answers
// have less than 2^31 floats. Does not depend on the number of threads.
std::vector<std::vector<RepairRun>> FindChanges(const Cpu& cpu, const std::vector<AnswerTwice>& answers,
                                                std::vector<AnswerRows>* rows);

// Floats of a repair, header included.
int64_t RepairSize(const std::vector<RepairRun>& runs);

// Writes it: out [RepairSize].
void WriteRepair(const float* now, const std::vector<RepairRun>& runs, float* out);

// Puts the rows of a repair [size] into what went ahead. Throws InvalidArgument for one that does not fit.
void ApplyRepair(const float* repair, int64_t size, float* answer, int64_t answer_size);

}  // namespace sok
