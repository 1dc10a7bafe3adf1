#!/usr/bin/env bash
# Runs tests/device: TensorFlow's kernels for GPUs on the emulator's device. Further arguments go to pytest. Where there is nvcc, the
# C++ tests that scripts/gpu_test.sh runs on a device are compiled as well.
set -euo pipefail
source "$(dirname "$0")/common.sh"
source scripts/cmake.sh
need_modules pytest xdist

scripts/build_native.sh >/dev/null
"$CMAKE" --build build/native --target sok_ops_emulated -j "${SOK_BUILD_JOBS:-$(nproc)}" >build/native/emulated.log 2>&1 || {
  tail -40 build/native/emulated.log
  exit 1
}
status=0
if [[ -f build/native/libsok_cuda.so ]]; then
  if "$CMAKE" --build build/native --target device_tests -j "${SOK_BUILD_JOBS:-$(nproc)}" >build/native/device_tests.log 2>&1; then
    echo "C++ tests of the CUDA kernels compile for a device (none is needed for that)."
    build/native/tests/cuda/test_traced || status=1
    "$CTEST" --test-dir build/native -L without_sanitizers --parallel "${SOK_BUILD_JOBS:-$(nproc)}" --output-on-failure --no-tests=error ||
      status=1
  else
    tail -40 build/native/device_tests.log
    status=1
  fi
fi
export SOK_NATIVE_DIR=$PWD/build/native/emulated_ops
touch "$SOK_NATIVE_DIR/emulated"
jobs=${SOK_TEST_JOBS:-$(($(nproc) < 4 ? $(nproc) : 4))}
mkdir -p build/test
# TensorFlow's own ops are not reliable on such a device (docs/gpu.md, "Test"): what fails twice has failed, and so has all if
# more than two tests had to be repeated.
scripts/repeat_failed.sh 2 "$jobs" build/test/device_repeats.log tests/device "$@" || status=1
((status == 0)) || echo "Something failed: it is said above." >&2
exit $status
