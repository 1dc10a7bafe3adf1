#include "input_limits.h"

#include <algorithm>
#include <string>

#include "guard.h"
#include "sok/error.h"
#include "tensor_args.h"

namespace sok {

using tensorflow::Tensor;

bool IsReport(const Tensor& row_splits) {
  return row_splits.dims() == 1 && row_splits.NumElements() == 2 && Int64(row_splits)[0] > kReport &&
         Int64(row_splits)[0] <= kReport + kLastStatus;
}

void WriteReport(tensorflow::OpKernelContext* ctx, int output, const InputStatus& bad) {
  Tensor* report;
  Check(ctx->allocate_output(output, tensorflow::TensorShape({2}), &report));
  report->flat<int64_t>()(0) = kReport + bad.status;
  report->flat<int64_t>()(1) = bad.detail;
}

void WriteTextReport(tensorflow::OpKernelContext* ctx, int output, const std::string& text) {
  Tensor* report;
  Check(ctx->allocate_output(output, tensorflow::TensorShape({1 + static_cast<int64_t>(text.size())}), &report));
  auto out = report->flat<int64_t>();
  out(0) = kReport;
  for (size_t i = 0; i < text.size(); ++i) out(static_cast<int64_t>(i) + 1) = static_cast<unsigned char>(text[i]);
}

std::string ReportedText(const Tensor& row_splits) {
  std::string text;
  if (row_splits.dims() != 1 || row_splits.NumElements() < 1 || Int64(row_splits)[0] != kReport) return text;
  for (int64_t i = 1; i < row_splits.NumElements(); ++i) text += static_cast<char>(Int64(row_splits)[i]);
  return text;
}

Splits ReadSplits(const Tensor& row_splits, int64_t n) {
  CheckRank(row_splits, 1, "row_splits");
  Splits splits;
  if (row_splits.NumElements() == 0) return splits;
  if (IsReport(row_splits)) {
    splits.status = {Int64(row_splits)[0] - kReport, Int64(row_splits)[1]};
    return splits;
  }
  splits.segments = CheckRowSplits(row_splits, n);
  splits.begin = Int64(row_splits);
  return splits;
}

InputStatus InputLimits::Inspect(const Splits& row_splits) const {
  if (row_splits.status.status != kFine) return row_splits.status;
  const int64_t* begin = row_splits.begin;
  for (int64_t s = 0; max_nnz > 0 && s < row_splits.segments; ++s)
    if (begin[s + 1] - begin[s] > max_nnz) return {kTooManyInSegment, s};
  for (int64_t s = 0; max_feature_num > 0 && s < row_splits.segments; s += slot_num)
    if (begin[std::min(s + slot_num, row_splits.segments)] - begin[s] > max_feature_num) {
      return {kTooManyInSample, s / slot_num};
    }
  return {};
}

std::string InputLimits::Describe(const InputStatus& bad) const {
  const std::string at = std::to_string(bad.detail);
  switch (bad.status) {
    case kTooManyInSegment:
      return "sample " + std::to_string(bad.detail / slot_num) + ", feature " + std::to_string(bad.detail % slot_num) +
             " has more than max_nnz = " + std::to_string(max_nnz) + " keys. Raise max_nnz, or cut the input.";
    case kTooManyInSample:
      return "sample " + at + " has more than max_feature_num = " + std::to_string(max_feature_num) +
             " keys. Raise max_feature_num, or cut the input.";
    case kBadSplits:
      return "`row_splits` must start with 0, never fall, and end with the number of keys.";
    case kRowOutOfRange:
      return "the row index of key number " + at +
             " is outside the dense_shape. Check the SparseTensor's indices and dense_shape.";
    case kBadNumRows:
      return "the dense_shape of the input says that it has " + at +
             " rows: less than none, 2^31 or more, or more than there is memory for. Check the SparseTensor's "
             "dense_shape.";
    case kRowsNotWhole:
      return "the number of rows must be batch * slot_num, a multiple of " + std::to_string(slot_num) +
             ". Received: " + at + ".";
    case kWrongSlotNum:
      return "every sample must have slot_num = " + std::to_string(slot_num) + " features. Received: " + at + ".";
    case kUneven:
      return "every feature must have the same number of ids (nnz_per_slot), without gaps.";
    case kWeightsDiffer:
      return "there must be one weight for each id, at the same places as the ids.";
    case kSlotKeyTooLarge:
      return "id " + at +
             " is too large for distinct_slots: id * slot_num + slot, with slot_num = " + std::to_string(slot_num) +
             ", must fit into the key dtype. Take key_dtype int64, or smaller ids.";
  }
  return "unknown status " + std::to_string(bad.status) +
         ". All workers must run the same version of sok and the same program.";
}

void InputLimits::Raise(const TableConfig& table, int from, const InputStatus& bad) const {
  const std::string who = table.world_size == 1 ? "" : "input of rank " + std::to_string(from) + ": ";
  if (bad.status == kKeyOutOfRange) {
    try {
      table.CheckKey(static_cast<uint64_t>(bad.detail));
    } catch (const InvalidArgument& e) {
      throw InvalidArgument(who.empty() ? e.what() : who + e.what());
    }
  }
  throw InvalidArgument(table.Label() + ": " + who + Describe(bad));
}

}  // namespace sok
