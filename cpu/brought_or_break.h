// What must not be done by halves to a table.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "sok/embedding_table.h"

namespace sok {

template <class Body>
void EmbeddingTable::ForBroughtOrBreak(const Cpu& cpu, const uint32_t* rows, int64_t n, bool is_begun,
                                       const Body& body) {
  if (rows_.tier() == nullptr) return body(int64_t{0}, n);  // nothing can fail
  try {
    ForBrought(cpu, rows, n, RowUse::kWrite, [&](int64_t begin, int64_t end) {
      is_begun = true;
      body(begin, end);
    });
  } catch (const std::exception& error) {
    if (!is_begun) throw;
    is_broken_ = true;
    try {
      broken_ = error.what();
    } catch (const std::bad_alloc&) {  // then nobody hears why
    }
    throw;
  }
}

}  // namespace sok
