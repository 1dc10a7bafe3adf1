// How much memory this process may still take, as the system says it.
#pragma once

#include <cstdint>
#include <string>

namespace sok {

// What is free or can be freed, within the limits of this process' control groups (a container, a job): from PROC/meminfo, and from
// the groups of PROC/self/cgroup under GROUPS, version 1 or 2. INT64_MAX if nobody says. Other processes may take it meanwhile.
int64_t AvailableBytesIn(const std::string& proc, const std::string& groups);
int64_t AvailableHostBytes();  // of this machine

}  // namespace sok
