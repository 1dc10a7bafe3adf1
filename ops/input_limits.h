// What the input of a lookup may be, and what is said when it is not.
#pragma once

#include <cstdint>
#include <string>

#include "input_status.h"
#include "sok/embedding_table.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace sok {

struct InputStatus {
  int64_t status = kFine;
  int64_t detail = 0;
};

// What row_splits hold: segments, nothing (shape [0]: keys are not grouped), or a report that the input is bad.
struct Splits {
  const int64_t* begin = nullptr;
  int64_t segments = 0;
  InputStatus status;
};

// Throws InvalidArgument for splits that are none of these.
Splits ReadSplits(const tensorflow::Tensor& row_splits, int64_t n);

// A report is [kReport + status, detail], written in place of splits that make no sense. The op that reads it raises, on
// every rank where there are several; to raise at once would leave the other ranks waiting. Its first number is none
// that splits gone wrong are likely to have.
constexpr int64_t kReport = INT64_MIN;

bool IsReport(const tensorflow::Tensor& row_splits);

// Makes a report the output.
void WriteReport(tensorflow::OpKernelContext* ctx, int output, const InputStatus& bad);

// The same of what has no status: [kReport, a number for each byte of the text]. ExchangeRoute alone reads it.
void WriteTextReport(tensorflow::OpKernelContext* ctx, int output, const std::string& text);

// The text of such a report; empty where row_splits are none.
std::string ReportedText(const tensorflow::Tensor& row_splits);

struct InputLimits {
  int64_t slot_num = 1;
  int64_t max_nnz = 0;          // keys per segment; 0: unlimited
  int64_t max_feature_num = 0;  // keys per sample; 0: unlimited

  // The first limit that the segments break, if any.
  InputStatus Inspect(const Splits& row_splits) const;

  // What a status other than kKeyOutOfRange says.
  std::string Describe(const InputStatus& bad) const;

  // Throws InvalidArgument that says what is wrong with the input of rank `from`.
  [[noreturn]] void Raise(const TableConfig& table, int from, const InputStatus& bad) const;
};

}  // namespace sok
