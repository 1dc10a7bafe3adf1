#!/usr/bin/env bash
# Everything that can only be seen on a GPU, in one command: builds the kernels and their C++ tests, runs these and the tests
# marked `gpu`, looks for races and stray accesses, then times everything. Needs nvcc, g++, and a Python with NumPy, CuPy and pytest;
# no TensorFlow, and cmake only if it is there. Results also go to $OUT, if that is set.
#   PYTHON   default: python3      SOK_CUDA_ARCHITECTURES   default: that of the first GPU, as in 90
#   GPU_TEST_STEPS   default: "build test sanitize benchmark"
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
steps=${GPU_TEST_STEPS:-build test sanitize benchmark}
out=${OUT:-build/gpu}
build=build/cuda
mkdir -p "$out" "$build"
rm -f "$out"/cpp*.log  # which programs add to, one after the other
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

wants() { [[ " $steps " == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv >"$out/gpu.txt" 2>&1 || {
  cat "$out/gpu.txt"
  echo "No GPU answers. This script is for a machine that has one; the same tests run on the emulator in make test." >&2
  exit 2
}
cat "$out/gpu.txt"

# What cmake/cuda.cmake does, file by file, for machines without cmake.
build_by_hand() {
  local objects=$build/objects include="-Iinclude -Icuda -Icpu"
  mkdir -p "$objects"
  local host="-std=c++17 -O3 -DNDEBUG -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math $include"
  local device="-std=c++17 -O3 -DNDEBUG -fmad=false --expt-relaxed-constexpr -Xcompiler=-fPIC,-ffp-contract=off $include"
  device+=" -gencode arch=compute_$arch,code=[compute_$arch,sm_$arch]"
  for source in cuda/*.cu; do
    echo "nvcc $device -c $source -o $objects/$(basename "$source").o"
  done >"$build/commands"
  for source in cuda/*.cc cpu/*.cc storage/*.cc; do
    local extra=""
    [[ $source == cuda/*.cc ]] && extra="-isystem $(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")/include"
    [[ $source == *_avx2.cc ]] && extra="-mavx2"
    [[ $source == *_avx512.cc ]] && extra="-mavx512f -mavx512vl -mavx512dq -mprefer-vector-width=512"
    echo "g++ $host $extra -c $source -o $objects/$(basename "$source").o"
  done >>"$build/commands"
  tr '\n' '\0' <"$build/commands" | xargs -0 -P "$(nproc)" -I{} bash -c '{}' &&
    nvcc -shared -cudart static -arch="sm_$arch" -o "$build/libsok_cuda.so" "$objects"/*.o || return 1
  mkdir -p "$build/tests/cuda"
  for source in tests/cuda/test_cuda_*.cc; do
    local name
    name=$(basename "$source" .cc)_on_device
    echo "nvcc $device -UNDEBUG -Itests/cpp -Itests/cuda -x cu -c $source -o $build/tests/cuda/$name.o &&" \
      "nvcc -cudart static $build/tests/cuda/$name.o $objects/*.o -o $build/tests/cuda/$name"
  done >"$build/commands"
  tr '\n' '\0' <"$build/commands" | xargs -0 -P "$(nproc)" -I{} bash -c '{}'
}

if wants build; then
  arch=${SOK_CUDA_ARCHITECTURES:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)}
  if command -v cmake >/dev/null; then
    { cmake -S . -B "$build" -DSOK_OPS=OFF -DSOK_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$arch" &&
      cmake --build "$build" -j "$(nproc)" --target sok_cuda device_tests; } >"$out/build.log" 2>&1 || failed=1
  else
    build_by_hand >"$out/build.log" 2>&1 || failed=1
  fi
  ((failed == 0)) || {
    tail -60 "$out/build.log"
    exit 1
  }
fi
export SOK_CUDA_LIBRARY=$PWD/$build/libsok_cuda.so

if wants test; then
  for program in "$build"/tests/cuda/test_*_on_device; do
    timeout 300 "$program" >>"$out/cpp.log" 2>&1 && echo "passed $(basename "$program")" ||
      { echo "FAILED $(basename "$program"), see $out/cpp.log" && failed=1; }
  done
  "$PYTHON" -m pytest -q -rs -p no:cacheprovider -m gpu tests/contracts 2>&1 | tee "$out/pytest.log" || failed=1
fi

if wants sanitize; then
  for tool in memcheck racecheck; do
    for program in "$build"/tests/cuda/test_*_on_device; do
      timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 "$program" >>"$out/cpp_$tool.log" 2>&1 &&
        echo "$tool: clean $(basename "$program")" ||
        { echo "$tool: FAILED $(basename "$program"), see $out/cpp_$tool.log" && failed=1; }
    done
    # Of the suites in Python a part; the whole would take an hour.
    compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      "$PYTHON" -m pytest -q -x -p no:cacheprovider -m "gpu and sanitize" tests/contracts 2>&1 |
      tee "$out/$tool.log" | tail -15 || failed=1
  done
fi

if wants benchmark; then
  "$PYTHON" -m benchmarks.cuda 2>&1 | tee "$out/benchmarks.txt" || failed=1
fi

((failed == 0)) && echo "gpu_test.sh: all passed; results in $out" || echo "gpu_test.sh: FAILED; see $out" >&2
exit $failed
