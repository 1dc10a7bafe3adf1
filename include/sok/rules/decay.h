// What many missed steps do to a row at once, for the rules that decay: the sums that adam_decay.h keeps.
#pragma once

#include "sok/rules/rule.h"

namespace sok {

// What k missed steps do to any row.
struct Decay {
  float a[4] = {};  // A_0 .. A_3
  float fade_m = 1.0f;
  float fade_v = 1.0f;
  float keep = 1.0f;   // what shrinking leaves of a weight
  float extra = 0.0f;  // the sum, of rules that want it
};

// How far one weight moves whose denominator is s + epsilon.
SOK_HOST_DEVICE float DecayedBy(const Decay& decay, float epsilon, float m, float s) {
  const float inverse = 1.0f / (s + epsilon);
  const float u = epsilon * inverse;
  const float sum = decay.a[0] - u * (decay.a[1] - u * (decay.a[2] - u * decay.a[3]));
  // A row that never had a gradient has no momentum, and with epsilon 0 no inverse either.
  return m == 0.0f ? 0.0f : m * inverse * sum;
}

}  // namespace sok
