#!/usr/bin/env bash
# Runs tests/device: TensorFlow's kernels for GPUs on the emulator's device. Further arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/common.sh"
unset MAKEFLAGS MAKELEVEL MFLAGS
need_modules pytest xdist

cmake=$(dirname "$(command -v "$PYTHON")")/cmake
[[ -x $cmake ]] || cmake=cmake
scripts/build_native.sh >/dev/null
"$cmake" --build build/native --target sok_ops_emulated -j "${SOK_BUILD_JOBS:-$(nproc)}" >build/native/emulated.log 2>&1 || {
  tail -40 build/native/emulated.log
  exit 1
}
export SOK_NATIVE_DIR=$PWD/build/native/emulated_ops
touch "$SOK_NATIVE_DIR/emulated"
tests=("$PYTHON" -m pytest tests/device "$@")
jobs=${SOK_TEST_JOBS:-$(($(nproc) < 4 ? $(nproc) : 4))}
"${tests[@]}" -n "$jobs" --dist loadgroup && exit
# TensorFlow's own ops are not reliable on such a device (docs/gpu.md, "Test"): what fails twice has failed.
echo "== once more, one after the other: what has failed"
"${tests[@]}" -n 0 --last-failed --last-failed-no-failures none
