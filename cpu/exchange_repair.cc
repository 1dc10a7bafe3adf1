#include "sok/exchange_repair.h"

#include <algorithm>
#include <cstring>

#include "sok/error.h"

namespace sok {
namespace {

constexpr int64_t kFloatsPerBlock = int64_t{1} << 14;
constexpr int64_t kRunWords = 2;

struct Block {
  int64_t of = 0, first = 0, last = 0;  // of the `of`th rows those from first to last
};

void Add(RepairRun run, std::vector<RepairRun>* runs) {
  if (!runs->empty() && runs->back().begin + runs->back().size == run.begin) {
    runs->back().size += run.size;
  } else {
    runs->push_back(run);
  }
}

int64_t Compare(const AnswerTwice& answer, const AnswerRows& rows, const Block& block, std::vector<RepairRun>* runs) {
  const size_t bytes = static_cast<size_t>(rows.dim) * sizeof(float);
  int64_t changed = 0;
  for (int64_t row = block.first; row < block.last; ++row) {
    const int64_t at = rows.begin + row * rows.dim;
    if (std::memcmp(answer.now + at, answer.ahead + at, bytes) == 0) continue;
    Add({static_cast<int32_t>(at), static_cast<int32_t>(rows.dim)}, runs);
    ++changed;
  }
  return changed;
}

}  // namespace

std::vector<std::vector<RepairRun>> FindChanges(const Cpu& cpu, const std::vector<AnswerTwice>& answers,
                                                std::vector<AnswerRows>* rows) {
  std::vector<Block> blocks;
  for (size_t i = 0; i < rows->size(); ++i) {
    const AnswerRows& of = (*rows)[i];
    const int64_t per_block = std::max<int64_t>(1, kFloatsPerBlock / of.dim);
    for (int64_t first = 0; first < of.rows; first += per_block) {
      blocks.push_back({static_cast<int64_t>(i), first, std::min(first + per_block, of.rows)});
    }
  }
  std::vector<std::vector<RepairRun>> of_block(blocks.size());
  std::vector<int64_t> changed(blocks.size());
  cpu.executor.For(static_cast<int64_t>(blocks.size()), kFloatsPerBlock / 2, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const AnswerRows& of = (*rows)[static_cast<size_t>(blocks[b].of)];
      changed[b] = Compare(answers[static_cast<size_t>(of.answer)], of, blocks[b], &of_block[b]);
    }
  });
  std::vector<std::vector<RepairRun>> found(answers.size());
  for (size_t b = 0; b < blocks.size(); ++b) {
    AnswerRows& of = (*rows)[static_cast<size_t>(blocks[b].of)];
    of.changed += changed[b];
    for (const RepairRun& run : of_block[b]) Add(run, &found[static_cast<size_t>(of.answer)]);
  }
  return found;
}

int64_t RepairSize(const std::vector<RepairRun>& runs) {
  int64_t size = kAnswerHeader + kRunWords * static_cast<int64_t>(runs.size());
  for (const RepairRun& run : runs) size += run.size;
  return size;
}

void WriteRepair(const float* now, const std::vector<RepairRun>& runs, float* out) {
  std::fill_n(out, kAnswerHeader, 0.0f);
  out[kRepairMark] = 1.0f;
  out += kAnswerHeader;
  for (const RepairRun& run : runs) {
    const int32_t words[kRunWords] = {run.begin, run.size};
    std::memcpy(out, words, sizeof(words));
    std::memcpy(out + kRunWords, now + run.begin, static_cast<size_t>(run.size) * sizeof(float));
    out += kRunWords + run.size;
  }
}

void ApplyRepair(const float* repair, int64_t size, float* answer, int64_t answer_size) {
  int64_t at = kAnswerHeader;
  while (at < size) {
    int32_t words[kRunWords] = {0, 0};
    if (size - at >= kRunWords) std::memcpy(words, repair + at, sizeof(words));
    at += kRunWords;
    const int64_t begin = words[0], floats = words[1];
    if (floats < 1 || begin < kAnswerHeader || begin + floats > answer_size || floats > size - at) {
      throw InvalidArgument("the repair of rows that went ahead does not fit them.");
    }
    std::memcpy(answer + begin, repair + at, static_cast<size_t>(floats) * sizeof(float));
    at += floats;
  }
}

}  // namespace sok
