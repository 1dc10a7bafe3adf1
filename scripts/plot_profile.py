#!/usr/bin/env python3
"""The old name of `sok profile plot`: plot_profile.py OUT.png FIRST_STEP NUM_STEPS TRACE.json [TRACE.json ...]"""

import sys

from sok.tools import timeline

if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    out, first, number, *paths = sys.argv[1:]
    timeline.plot(paths, out, int(first), int(number))
