// A table whose rows lie in Redis, as docs/redis.md lays them out. Its file among the model's assets says what it is, as
// every file of an export does, and where its rows are: one version of them, written by one export, that never changes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sok/device.h"
#include "sok/scratch.h"
#include "sok/serving_table.h"

namespace sok {

// Opens the file of a table of an export, wherever its rows lie. Of one in Redis, asks whether all of them are there.
// Throws what ServingTable's constructor does; FailedPrecondition where this version is gone from Redis, where Redis
// refuses, or where this library was built without hiredis; DeadlineExceeded where nobody answers.
std::shared_ptr<const ServingTable> OpenServingTable(const std::string& path);

// What a lookup asks of one table.
struct ServingAsk {
  const ServingTable* table;
  const uint64_t* keys;  // [n]
  int64_t n;
  float* rows;  // [n, dim] of the answer
};

// Answers what is asked of tables that are remote: all of it at once, each key once. Throws what ServingTable::Lookup
// does; FailedPrecondition and DeadlineExceeded as above; DamagedFile for a record that is not what was
// written; InvalidArgument where the answer would be larger than the model allows.
void LookupRemote(const Cpu& cpu, Scratch* scratch, const std::vector<ServingAsk>& asks);

}  // namespace sok
