#!/usr/bin/env bash
# Everything that can only be seen on a GPU, in one command, what would spoil the rest first: builds; says what the machine has and
# does one lookup of TensorFlow's; runs the C++ tests and the tests marked `gpu`; runs tests/device on /GPU:0; looks for missing
# barriers, memory that nobody wrote and stray accesses; takes a profile of some training steps; then times everything.
# Needs nvcc, g++, and a Python with NumPy, CuPy and pytest; cmake only if it is there. Without TensorFlow, or without nsys, what
# needs them is left out, and says so. Results also go to $OUT, if that is set.
#   PYTHON   default: python3      SOK_CUDA_ARCHITECTURES   default: that of the first GPU, as in 90
#   GPU_TEST_STEPS   default: "build look test tensorflow sanitize profile benchmark"
#   GPU_BUILD        default: build/cuda
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
steps=${GPU_TEST_STEPS:-build look test tensorflow sanitize profile benchmark}
out=${OUT:-build/gpu}
build=${GPU_BUILD:-build/cuda}
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
    [[ $source == *_avx2.cc ]] && extra="-mavx2 -mf16c"
    [[ $source == *_avx512.cc ]] && extra="-mavx512f -mf16c -mavx512vl -mavx512dq -mprefer-vector-width=512"
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
export SOK_CUDA_LIBRARY
SOK_CUDA_LIBRARY=$(realpath -m "$build/libsok_cuda.so")

# What runs ops of TensorFlow's.
with_tensorflow() {
  "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("tensorflow") is None)' || { echo "left out, since $PYTHON has no TensorFlow: $1" && return 1; }
}

if wants build && with_tensorflow "kernels of its ops"; then
  CUDAARCHS=$arch SOK_CUDA=ON PYTHON=$PYTHON scripts/build_native.sh >"$out/build_ops.log" 2>&1 || {
    tail -60 "$out/build_ops.log"
    exit 1
  }
fi

if wants look && with_tensorflow "sok doctor and a first lookup"; then
  "$PYTHON" -m sok doctor 2>&1 | tee "$out/doctor.txt" || failed=1
  "$PYTHON" - 2>&1 <<'LOOKUP' | tee "$out/lookup.txt" || failed=1
import sok
import tensorflow as tf

sok.Init(global_batch_size=8)
with tf.device("/GPU:0"):
    table = sok.EmbeddingVariable(64, 1000, name="first")
    rows = sok.group_embedding_lookup([table], [tf.constant([1, 2, 1], tf.int64)])[0]
assert "GPU" in table.handle.device and bool(tf.reduce_all(rows[0] == rows[2])), (table.handle.device, rows)
print("a table on", table.handle.device, "gives its rows")
LOOKUP
fi

if wants test; then
  for program in "$build"/tests/cuda/test_*_on_device; do
    timeout 300 "$program" >>"$out/cpp.log" 2>&1 && echo "passed $(basename "$program")" ||
      { echo "FAILED $(basename "$program"), see $out/cpp.log" && failed=1; }
  done
  "$PYTHON" -m pytest -q -rs -p no:cacheprovider -m gpu tests/contracts 2>&1 | tee "$out/pytest.log" || failed=1
fi

if wants tensorflow && with_tensorflow "tests/device"; then
  # Nothing is repeated here: a missing wait between streams looks like chance.
  SOK_DEVICE_TESTS=GPU "$PYTHON" -m pytest -q -rs -p no:cacheprovider tests/device 2>&1 | tee "$out/device.log" || failed=1
fi

# Warp functions whose lanes do not meet; memory that nobody wrote; stray accesses, and memory of one stream that another uses too
# early. (Next to no kernel uses shared memory, which is all that racecheck looks at.)
if wants sanitize; then
  for tool in synccheck initcheck "memcheck --track-stream-ordered-races all"; do
    log=${tool%% *}
    for stem in hash_table table_group sparse_update sum_rows; do
      # shellcheck disable=SC2086  # a tool has options
      timeout 600 compute-sanitizer --tool $tool --error-exitcode 9 "$build/tests/cuda/test_cuda_${stem}_on_device" \
        >>"$out/cpp_$log.log" 2>&1 && echo "$log: clean test_cuda_$stem" ||
        { echo "$log: FAILED test_cuda_$stem, see $out/cpp_$log.log" && failed=1; }
    done
    # Of the suites in Python a part; the whole would take an hour.
    # shellcheck disable=SC2086
    compute-sanitizer --tool $tool --error-exitcode 9 --target-processes all \
      "$PYTHON" -m pytest -q -x -p no:cacheprovider -m "gpu and sanitize" tests/contracts 2>&1 |
      tee "$out/$log.log" | tail -15 || failed=1
  done
fi

if wants profile && with_tensorflow "a profile of training steps"; then
  if command -v nsys >/dev/null; then
    nsys profile --force-overwrite true --trace cuda,osrt --output "$out/step" "$PYTHON" -m tests.device.counting \
      >"$out/profile.log" 2>&1 && nsys stats "$out/step.nsys-rep" >"$out/profile.txt" 2>&1 || failed=1
  else
    echo "left out, since there is no nsys: a profile of training steps"
  fi
fi

if wants benchmark; then
  "$PYTHON" -m benchmarks.cuda 2>&1 | tee "$out/benchmarks.txt" || failed=1
fi

((failed == 0)) && echo "gpu_test.sh: all passed; results in $out" || echo "gpu_test.sh: FAILED; see $out" >&2
exit $failed
