#!/usr/bin/env bash
# Runs the tests: test.sh all|fast. Goes on after a failure, sums up at the end; exit status 0 only if all passed.
#   SOK_CRITEO_SAMPLE, SOK_AVAZU_SAMPLE, SOK_MOVIELENS_DIR   real data for the tests that can use them
#   PYTHON   an environment that is ready; without it, .venv is used and set up first
#   SOK_TEST_JOBS   test files run side by side; default: one more than there are processors, at most 4
set -euo pipefail
# Kernels are compiled wherever that can be done, to see that they compile.
export SOK_CUDA=${SOK_CUDA:-NVCC}
[[ -n "${PYTHON:-}" ]] || "$(dirname "$0")/setup.sh"
source "$(dirname "$0")/common.sh"
which=${1:-all}

need_modules pytest xdist hypothesis

# Some images set it, and then each of some hundred processes compiles what it imports of ours.
unset PYTHONDONTWRITEBYTECODE
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
mkdir -p build/test
rm -f build/test/device_repeats.log build/test/*.ended
names=() results=() begun=()

stage() {
  local name=$1 log="build/test/${1// /_}.log" start=$SECONDS result=passed
  shift
  echo
  echo "== $name"
  "$@" 2>&1 | tee "$log" || result=FAILED
  names+=("$name")
  results+=("$result ($((SECONDS - start)) s)")
}

# A stage that keeps one core busy begins beside the others. What it says comes when it is waited for.
begin() {
  local name=$1 log="build/test/${1// /_}"
  shift
  (
    SECONDS=0 status=0
    "$@" >"$log.log" 2>&1 || status=$?
    echo "$SECONDS $status" >"$log.ended"
  ) &
  begun+=("$name")
}

end_begun() {
  local name seconds=0 status
  wait
  for name in "${begun[@]}"; do
    echo
    echo "== $name"
    cat "build/test/${name// /_}.log"
    read -r seconds status <"build/test/${name// /_}.ended" || status=1
    names+=("$name")
    results+=("$([[ $status == 0 ]] && echo passed || echo FAILED) ($seconds s, beside others)")
  done
}

python_tests() {
  # Doctests of the library and the tests, in one run with one closing line. What stays in one process,
  # tests/conftest.py says; files begin in the order they are listed, and those that take long are early. One file more than
  # there are processors: jobs of several workers wait for each other, and those that lose one for a deadline.
  local jobs=${SOK_TEST_JOBS:-$(($(nproc) < 3 ? $(nproc) + 1 : 4))}
  "$PYTHON" -m pytest -n "$jobs" --dist loadgroup --no-loadscope-reorder --doctest-modules \
    --durations=40 --durations-min=5 sok sparse_operation_kit openembedding distributed_embeddings tests "$@"
}

case $which in
  all)
    begin "lint" scripts/lint.sh
    # Address and undefined in one build, which takes the time of one.
    stage "C++ tests, address+undefined" scripts/test_cpp.sh address,undefined
    begin "instruction counts" "$PYTHON" -m benchmarks.guard
    stage "C++ tests, thread sanitizer" scripts/test_cpp.sh thread
    end_begun
    stage "fuzzers" scripts/fuzz.sh 5
    stage "GPU kernels on an emulated device" scripts/test_device.sh -q
    stage "Python tests and doctests" python_tests
    ;;
  fast)
    stage "C++ tests" scripts/test_cpp.sh plain
    stage "Python tests and doctests" python_tests -m "not multiprocess"
    ;;
  *)
    echo "test.sh takes all or fast. Received: '$which'." >&2
    exit 2
    ;;
esac

echo
if [[ $which == all ]]; then
  echo "tests that passed only when they were repeated: $(wc -l <build/test/device_repeats.log 2>/dev/null || echo 0)"
fi
for i in "${!names[@]}"; do
  printf '%-34s %s\n' "${names[$i]}" "${results[$i]}"
done
# Who sees the end of the output alone sees what failed.
failed=0
for i in "${!names[@]}"; do
  [[ ${results[$i]} == FAILED* ]] || continue
  failed=1
  echo
  echo "== ${names[$i]} failed; the last lines of build/test/${names[$i]// /_}.log"
  tail -n 40 "build/test/${names[$i]// /_}.log"
done
exit $failed
