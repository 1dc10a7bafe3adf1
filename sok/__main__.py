"""`python -m sok` is the `sok` command."""

import sys

from sok.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
