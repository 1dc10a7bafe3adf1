// How many kernels have been started.
#pragma once

#include <cstdint>

struct Launches {
  int64_t ours, of_cub;
};
Launches LaunchesSoFar();
