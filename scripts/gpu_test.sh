#!/usr/bin/env bash
# Everything that can only be seen on a GPU, in one command: builds the kernels, runs the tests marked `gpu`, looks for races
# and stray accesses in a few of them, then times everything. Needs nvcc, cmake, and a Python with NumPy, CuPy and pytest; no
# TensorFlow. Results also go to $OUT, if that is set.
#   PYTHON   default: python3      SOK_CUDA_ARCHITECTURES   default: native
#   GPU_TEST_STEPS   default: "build test sanitize benchmark"
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
steps=${GPU_TEST_STEPS:-build test sanitize benchmark}
out=${OUT:-build/gpu}
build=build/cuda
mkdir -p "$out" "$build"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

wants() { [[ " $steps " == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv >"$out/gpu.txt" 2>&1 || {
  cat "$out/gpu.txt"
  echo "No GPU answers. This script is for a machine that has one; the same tests run on the emulator in make test." >&2
  exit 2
}
cat "$out/gpu.txt"

if wants build; then
  cmake -S . -B "$build" -DSOK_OPS=OFF -DSOK_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${SOK_CUDA_ARCHITECTURES:-native}" \
    >"$out/configure.log" 2>&1 || {
    tail -30 "$out/configure.log"
    exit 1
  }
  cmake --build "$build" -j "$(nproc)" --target sok_cuda >"$out/build.log" 2>&1 || {
    tail -60 "$out/build.log"
    exit 1
  }
fi
export SOK_CUDA_LIBRARY=$PWD/$build/libsok_cuda.so

if wants test; then
  "$PYTHON" -m pytest -q -rs -p no:cacheprovider -m gpu tests/contracts 2>&1 | tee "$out/pytest.log" || failed=1
fi

if wants sanitize; then
  for tool in memcheck racecheck; do
    # What allocates and inserts at once; the whole suite would take an hour under these.
    compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      "$PYTHON" -m pytest -q -x -p no:cacheprovider -m gpu tests/contracts -k "sanitize" 2>&1 |
      tee "$out/$tool.log" | tail -15 || failed=1
  done
fi

if wants benchmark; then
  "$PYTHON" -m benchmarks.cuda 2>&1 | tee "$out/benchmarks.txt" || failed=1
fi

((failed == 0)) && echo "gpu_test.sh: all passed; results in $out" || echo "gpu_test.sh: FAILED; see $out" >&2
exit $failed
