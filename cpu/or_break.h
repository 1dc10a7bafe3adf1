// What must not be done by halves to a table.
#pragma once

#include <exception>
#include <string>

#include "sok/embedding_table.h"

namespace sok {

template <class Body>
void EmbeddingTable::OrBreak(const Body& body) {
  if (rows_.tier() == nullptr) return body();  // nothing in it can fail
  try {
    body();
  } catch (const std::exception& error) {
    broken_ = Label() + ": an error has left it half changed: " + error.what() + ". Restore it from a checkpoint.";
    throw;
  }
}

}  // namespace sok
