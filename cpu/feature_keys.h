// Keys of a feature as 64-bit words, whatever their dtype.
#pragma once

#include <cstdint>

#include "sok/exchange.h"

namespace sok {

// use(key_at), where key_at(i) is key i: once, so that the loop inside does not ask for the dtype.
template <class Use>
void WithKeys(const RouteFeature& f, bool is_unsigned, const Use& use) {
  if (f.is_wide) {
    use([keys = static_cast<const uint64_t*>(f.keys)](int64_t i) { return keys[i]; });
  } else if (is_unsigned) {
    use([keys = static_cast<const uint32_t*>(f.keys)](int64_t i) { return uint64_t{keys[i]}; });
  } else {
    use([keys = static_cast<const int32_t*>(f.keys)](int64_t i) { return static_cast<uint64_t>(int64_t{keys[i]}); });
  }
}

// Calls use(i, key) for each key.
template <class Use>
void ForEachKey(const RouteFeature& f, bool is_unsigned, const Use& use) {
  WithKeys(f, is_unsigned, [&](auto key_at) {
    for (int64_t i = 0; i < f.n; ++i) use(i, key_at(i));
  });
}

}  // namespace sok
