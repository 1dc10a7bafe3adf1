// Which device a thread of the host works on.
#pragma once

namespace sok_emulator {

constexpr int kDevices = 2;

// What every call does that makes a context where there is none. Gives the device.
int Touch();

}  // namespace sok_emulator
