// Room in a vector before it is needed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace sok {

// For `more` elements that must not fail to be added later. Doubling: to the size each time, it would copy the vector for
// every call.
template <class T>
void ReserveMore(std::vector<T>* to, size_t more) {
  if (to->size() + more > to->capacity()) to->reserve(std::max(to->size() + more, 2 * to->capacity()));
}

}  // namespace sok
