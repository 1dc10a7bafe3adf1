#!/usr/bin/env bash
# Builds and runs the C++ tests: test_cpp.sh plain|address|undefined|address,undefined|thread|yields [build: runs none]
#   yields   those of the CUDA kernels, whose threads give way at each load and store; needs clang++. SOK_EMULATOR_SEED=N: in another order
#   SOK_TEST_SLOW=1   also those that take minutes under the thread sanitizer
set -euo pipefail
source "$(dirname "$0")/common.sh"
source scripts/cmake.sh

kind=${1:?plain, address, undefined, both of these with a comma, thread, or yields}
build=build/cpp-${kind/,/-}
sanitize=$kind targets=(all) choice=(-LE slow) options=()
[[ $kind == plain || $kind == yields ]] && sanitize=""
if [[ $kind == yields ]]; then
  targets=(emulated_tests) choice=(-R "test_cuda|test_emulator")
  options=(-DCMAKE_CXX_COMPILER=clang++ -DSOK_WERROR=OFF -DSOK_EMULATOR_YIELDS=ON)
fi
mkdir -p "$build"
"$CMAKE" -S . -B "$build" -DSOK_OPS=OFF -DSOK_CUDA=OFF -DSOK_TESTS=ON -DSOK_SANITIZE="$sanitize" "${options[@]}" \
  >"$build/configure.log" || {
  cat "$build/configure.log"
  exit 1
}
[[ -n ${SOK_TEST_SLOW:-} ]] && targets=(all slow_tests) choice=()
"$CMAKE" --build "$build" --target "${targets[@]}" -j "${SOK_BUILD_JOBS:-$(nproc)}" >"$build/build.log" 2>&1 || {
  tail -40 "$build/build.log"
  exit 1
}
[[ ${2:-} != build ]] || exit 0
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
# ThreadSanitizer's shadow memory does not fit the address layout of kernels that randomise many bits. (Some containers
# forbid to ask for another; there it has to go as it is.)
run=()
[[ $kind == thread ]] && setarch "$(uname -m)" -R true 2>/dev/null && run=(setarch "$(uname -m)" -R)
"${run[@]}" "$CTEST" --test-dir "$build" "${choice[@]}" --parallel "${SOK_BUILD_JOBS:-$(nproc)}" --output-on-failure --no-tests=error
