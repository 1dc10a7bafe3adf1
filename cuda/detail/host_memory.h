// How much memory this process may still take, as the system says it.
#pragma once

#include <cstdint>
#include <string>

namespace sok {

// What is free or can be freed, within the limit of the container: from PROC/meminfo, and from GROUP/memory.max and its like
// where they are. INT64_MAX if nobody says. Other processes may take it meanwhile.
int64_t AvailableBytesIn(const std::string& proc, const std::string& group);
int64_t AvailableHostBytes();  // of this machine

}  // namespace sok
