#!/usr/bin/env bash
# Builds the sdist, and from it the wheel for the TensorFlow of $PYTHON, into dist/. Says what is in them.
set -euo pipefail
# A wheel has kernels wherever they can be built: it runs on other machines.
export SOK_CUDA=${SOK_CUDA:-NVCC}
source "$(dirname "$0")/common.sh"
need_modules setuptools wheel pip

rm -rf dist
mkdir -p dist build/wheel
# The backend of pyproject.toml, called as pip calls it; an sdist needs neither TensorFlow nor a compiler.
"$PYTHON" - >build/wheel/sdist.log 2>&1 <<'PY' || { tail -20 build/wheel/sdist.log; exit 1; }
import sys

sys.path.insert(0, "cmake")
import build_backend

build_backend.build_sdist("dist")
PY
sdist=$(ls dist/*.tar.gz)
# From the sdist and not from here, so that a file forgotten in MANIFEST.in is noticed.
"$PYTHON" -m pip wheel -v --no-build-isolation --no-deps --wheel-dir dist "$sdist" >build/wheel/wheel.log 2>&1 || {
  tail -40 build/wheel/wheel.log
  exit 1
}
ls -l dist
