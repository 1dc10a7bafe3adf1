// What is counted of collectives, for the ops that perform them (trace_ops.cc).
#pragma once

#include <string>

namespace sok {

// The collective is done, or has failed: nobody waits for it any longer.
void TraceWaitsNoMore(const std::string& collective);

}  // namespace sok
