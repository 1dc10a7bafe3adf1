#!/usr/bin/env bash
# Builds the sdist, and from it the wheel for the TensorFlow of $PYTHON, into dist/ or the folder that is its argument.
#   SOK_PREBUILT   an absolute folder with libraries to take (sok/_native) instead of compiling
set -euo pipefail
# A wheel has kernels wherever they can be built: it runs on other machines.
export SOK_CUDA=${SOK_CUDA:-NVCC}
dist=$(realpath -m "${1:-$(dirname "$0")/../dist}")
source "$(dirname "$0")/common.sh"
need_modules setuptools wheel pip auditwheel

rm -rf "$dist"
mkdir -p "$dist"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Runs a command, of which only a failure is worth reading.
quietly() {
  "$@" >"$work/log" 2>&1 || {
    tail -40 "$work/log" >&2
    exit 1
  }
}
# The backend of pyproject.toml, called as pip calls it; an sdist needs neither TensorFlow nor a compiler.
quietly "$PYTHON" -c 'import sys; sys.path.insert(0, "cmake"); import build_backend; build_backend.build_sdist(sys.argv[1])' "$dist"
# From the sdist and not from here, so that a file forgotten in MANIFEST.in is noticed.
quietly "$PYTHON" -m pip wheel -v --no-build-isolation --no-deps --wheel-dir "$work" "$dist"/*.tar.gz
# Which systems it runs on: auditwheel reads it from the versions of the symbols of libc and libstdc++ that the libraries
# need. That of TensorFlow is in each process that loads them; the driver's comes with the driver.
PATH="$(dirname "$PYTHON"):$PATH" quietly "$PYTHON" -m auditwheel repair --exclude 'libtensorflow*' --exclude 'libcuda.so.*' \
  --wheel-dir "$dist" "$work"/*.whl
ls -l "$dist"
