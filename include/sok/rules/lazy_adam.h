// Adam that changes the rows of the batch alone.
#pragma once

#include "sok/rules/adam.h"

namespace sok {

struct LazyAdam : Adam {
  static constexpr char kName[] = "lazy_adam";
  static constexpr bool kDecays = false;

  static std::string Error(const RuleSettings& settings) { return BetaError(settings); }

  using Adam::Adam;
};

}  // namespace sok
