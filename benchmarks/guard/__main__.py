import sys

from benchmarks.guard import main

sys.exit(main(sys.argv[1:]))
