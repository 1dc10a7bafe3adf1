// What the ops of the exchange share: the layout of the messages, and a group's tables and features as attributes say.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "input_limits.h"
#include "op.h"
#include "output_pool.h"
#include "sok/exchange.h"
#include "sok/float_type.h"
#include "sok/profile.h"
#include "table_resource.h"

namespace sok {

// The words before the counts and keys of a message. All ranks get the same from one.
enum HeaderWord {
  kMagicWord,    // kMagic
  kProgramWord,  // the group's tables, as one number
  kCallWord,     // which call this is
  kModeWord,     // ModeOf
  kStatusWord,   // KeyStatus
  kFeatureWord,  // whose input it is about
  kDetailWord,
  kHeaderWords
};
constexpr int64_t kMagic = 0x534f4b33;  // "SOK3": changes when the layout does

// How a call is made: whether unseen keys get rows, and what rows and gradients travel in.
inline int64_t ModeOf(bool insert, FloatType type) { return (insert ? 1 : 0) + 2 * static_cast<int64_t>(type); }
inline bool InsertOf(int64_t mode) { return mode % 2 != 0; }

// First float of an answer. The second is the length of a text that follows the header: one float for each byte.
enum AnswerStatus { kServed, kFull, kNoMemory, kBadRequest, kBadState, kInternal };
constexpr int64_t kMaxErrorBytes = 2000;

// What fits a message, of a text about what is wrong.
inline std::string Cut(const std::string& text) { return text.substr(0, kMaxErrorBytes); }

inline bool IsWide(tensorflow::DataType key) { return key == tensorflow::DT_INT64 || key == tensorflow::DT_UINT64; }

// Not an output yet: what goes wrong on the way is answered with other outputs, or only part of it becomes one. Memory of
// the host, also for an op that runs on a GPU.
inline Tensor AllocateTemp(OpKernelContext* ctx, tensorflow::DataType dtype, const TensorShape& shape) {
  const int64_t bytes = shape.num_elements() * tensorflow::DataTypeSize(dtype);
  if (bytes >= int64_t{1} << 20) return TensorInBlock(PooledBlock::Take(bytes), 0, dtype, shape);
  tensorflow::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  Tensor tensor;
  Check(ctx->allocate_temp(dtype, shape, &tensor, on_host));
  return tensor;
}

// A tensor for SharedAllToAll to send: in memory that peers map, so that it is written once, if the workers share memory and
// it is large; else one of AllocateTemp. Throws OutOfMemory.
Tensor AllocateToSend(OpKernelContext* ctx, tensorflow::DataType dtype, const TensorShape& shape);

// Which of a group's tables are copies of rows that all ranks have: the attribute `copy_of`.
class Copies {
 public:
  // ranks: for each table the rank whose copy it is, or -1; empty: there are none.
  Copies(std::vector<int64_t> ranks, int64_t num_tables) : ranks_(std::move(ranks)) {
    if (!ranks_.empty() && static_cast<int64_t>(ranks_.size()) != num_tables) {
      throw InvalidArgument("`copy_of` must have one value per table, or none.");
    }
  }
  Copies(OpKernelConstruction* ctx, int64_t num_tables) : Copies(Attribute(ctx), num_tables) {}
  Copies() = default;

  int64_t rank_of(int64_t table) const { return ranks_.empty() ? -1 : ranks_[table]; }
  bool is_copy(int64_t table) const { return rank_of(table) >= 0; }
  // Whether rows of the table come home to a rank.
  bool AnswersTo(int64_t rank, int64_t table) const { return !is_copy(table) || rank_of(table) == rank; }

 private:
  static std::vector<int64_t> Attribute(OpKernelConstruction* ctx) {
    std::vector<int64_t> ranks;
    Check(ctx->GetAttr("copy_of", &ranks));
    return ranks;
  }

  std::vector<int64_t> ranks_;
};

// Where the answer to each of the counts begins in all answers, or its gradient in all gradients, which go to all copies;
// counts: [world, CountsPerRank], not negative.
class AnswerLayout {
 public:
  enum Kind { kAnswers, kGradients };

  AnswerLayout(const int64_t* counts, int64_t world, const std::vector<int64_t>& dims,
               const std::vector<int64_t>& table_of, const Copies& copies, Kind kind)
      : width_(CountsPerRank(static_cast<int64_t>(dims.size()), static_cast<int64_t>(table_of.size()))),
        begin_(static_cast<size_t>(world * width_)) {
    const int64_t num_tables = static_cast<int64_t>(dims.size());
    int64_t at = 0;
    for (int64_t r = 0; r < world; ++r) {
      at += kAnswerHeader;
      for (const bool of_copies : {false, true}) {
        if (of_copies) copies_.push_back(at);
        for (int64_t c = 0; c < width_; ++c) {
          const int64_t table = c < num_tables ? c : table_of[(c - num_tables) / 2];
          if (copies.is_copy(table) != of_copies) continue;
          begin_[r * width_ + c] = at;
          // Counts and dims have bounds, their sum over many features and ranks has not.
          if (at > int64_t{1} << 60) throw InvalidArgument("`counts` say more floats than there can be.");
          const bool has_rows = c < num_tables || (c - num_tables) % 2 == 0;
          if (has_rows && (kind == kGradients || copies.AnswersTo(r, table)))
            at += counts[r * width_ + c] * dims[table];
        }
      }
      end_.push_back(at);
    }
  }
  int64_t begin(int64_t rank, int64_t count) const { return begin_[rank * width_ + count]; }
  int64_t begin(int64_t rank) const { return rank == 0 ? 0 : end_[rank - 1]; }
  // Where what is of copies begins.
  int64_t copies(int64_t rank) const { return copies_[rank]; }
  int64_t end(int64_t rank) const { return end_[rank]; }

 private:
  const int64_t width_;
  std::vector<int64_t> begin_, copies_, end_;
};

// One thing that a rank asks of a table: keys by rows, or the pieces of a feature.
struct Asked {
  int64_t rank, table, feature;  // feature -1: by rows
  int64_t column;                // which of the counts: how many rows answer it
  int64_t rows, keys;
};

// What all ranks ask, without what is empty, in the order in which row ids are given out: table after table, by rows
// first, then feature after feature; each rank after rank.
inline std::vector<Asked> AllAsked(const int64_t* counts, int64_t world, int64_t num_tables,
                                   const std::vector<int64_t>& table_of) {
  const int64_t num_features = static_cast<int64_t>(table_of.size());
  std::vector<Asked> all;
  const auto add = [&](int64_t table, int64_t feature, int64_t column, int64_t keys_column) {
    for (int64_t r = 0; r < world; ++r) {
      const int64_t* of_rank = counts + r * CountsPerRank(num_tables, num_features);
      if (of_rank[column] == 0 && of_rank[keys_column] == 0) continue;
      all.push_back({r, table, feature, column, of_rank[column], of_rank[keys_column]});
    }
  };
  std::vector<std::vector<int64_t>> features_of(static_cast<size_t>(num_tables));
  for (int64_t f = 0; f < num_features; ++f) features_of[table_of[f]].push_back(f);
  for (int64_t t = 0; t < num_tables; ++t) {
    add(t, -1, t, t);
    for (const int64_t f : features_of[t]) add(t, f, num_tables + 2 * f, num_tables + 2 * f + 1);
  }
  return all;
}

// For the profile: the tables' names, where one runs.
inline std::string NamesOf(const std::vector<RefCountPtr<TableResource>>& tables) {
  std::string names;
  for (size_t t = 0; ProfileRuns() && t < tables.size(); ++t) {
    names += (t > 0 ? "," : "") + tables[t]->config().name;
  }
  return names;
}

// The tables and features of a group, as attributes say.
class GroupOp : public GuardedOp {
 public:
  explicit GroupOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("program", &program_));
    std::string exchange_dtype;
    Check(ctx->GetAttr("exchange_dtype", &exchange_dtype));
    exchange_type_ = ParseFloatType(exchange_dtype);
    std::vector<int64_t> slot_num, max_nnz, max_feature_num;
    int64_t num_tables;
    Check(ctx->GetAttr("T", &num_tables));
    copies_ = Copies(ctx, num_tables);
    Check(ctx->GetAttr("table_of", &table_of_));
    Check(ctx->GetAttr("slot_num", &slot_num));
    Check(ctx->GetAttr("max_nnz", &max_nnz));
    Check(ctx->GetAttr("max_feature_num", &max_feature_num));
    const size_t n = table_of_.size();
    if (slot_num.size() != n || max_nnz.size() != n || max_feature_num.size() != n) {
      throw InvalidArgument("`table_of`, `slot_num`, `max_nnz` and `max_feature_num` must have one value per feature.");
    }
    for (size_t f = 0; f < n; ++f) {
      if (slot_num[f] < 1) throw InvalidArgument("`slot_num` must be at least 1.");
      limits_.push_back({slot_num[f], max_nnz[f], max_feature_num[f]});
    }
  }

 protected:
  using Tables = std::vector<RefCountPtr<TableResource>>;

  Tables GetTables(OpKernelContext* ctx) const {
    const int num_tables = ctx->num_inputs() == 0 ? 0 : NumTables(ctx);
    Tables tables;
    bool any_wide = false;
    for (int t = 0; t < num_tables; ++t) {
      tables.push_back(TableArg(ctx, t));
      any_wide = any_wide || IsWide(tables[t]->key_dtype());
      if (tables[t]->config().world_size != tables[0]->config().world_size ||
          tables[t]->config().rank != tables[0]->config().rank) {
        throw InvalidArgument("all tables of a group must belong to the same workers.");
      }
    }
    for (const int64_t table : table_of_)
      if (table < 0 || table >= num_tables) throw InvalidArgument("`table_of` must name one of the tables.");
    if (any_wide != is_wide_) {
      throw InvalidArgument(tables[0]->config().Label() +
                            ": words must be int64 if a table of the group has 64-bit keys, else int32.");
    }
    return tables;
  }

  static int NumTables(OpKernelContext* ctx) {
    int begin, end;
    Check(ctx->op_kernel().InputRange("handles", &begin, &end));
    return end - begin;
  }

  int64_t program_ = 0;
  FloatType exchange_type_ = FloatType::kFloat32;
  bool is_wide_ = true;
  std::vector<int64_t> table_of_;  // [F]
  Copies copies_;
  std::vector<InputLimits> limits_;
};

#define SOK_POOLERS "{'sum', 'mean', 'sqrtn', 'rows'}"

#define SOK_EXCHANGE_ATTRS                                                    \
  Attr("T: int >= 1")                                                         \
      .Attr("Tword: {int64, int32}")                                          \
      .Attr("program: int = 0")                                               \
      .Attr("exchange_dtype: {'float32', 'float16', 'bfloat16'} = 'float32'") \
      .Attr("table_of: list(int)")                                            \
      .Attr("copy_of: list(int) = []")                                        \
      .Attr("slot_num: list(int)")                                            \
      .Attr("max_nnz: list(int)")                                             \
      .Attr("max_feature_num: list(int)")

}  // namespace sok
