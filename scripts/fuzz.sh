#!/usr/bin/env bash
# Fuzzes what reads files, each reader for so many seconds: fuzz.sh [SECONDS] (default 60). Exit status 1 if anything was found.
#   tests/fuzz/corpus/TARGET   inputs to begin with; kept small, and tried in every run of the tests without a fuzzer, too
#   build/fuzz/new/TARGET      inputs that reach something new, kept between runs
#   build/fuzz/found           inputs that broke a promise: repair, and put them into the corpus
# Shards and exported tables are read by C++: libFuzzer with the address and undefined sanitizers, which needs clang++. The readers in Python are
# fuzzed with Atheris. What is not installed is skipped, and said.
set -euo pipefail
source "$(dirname "$0")/common.sh"
source scripts/cmake.sh
seconds=${1:-60}
mkdir -p build/fuzz/found build/fuzz/new

failed=0 running=()
# As many at once as there are processors: what they say comes in the order in which they began.
jobs=${SOK_BUILD_JOBS:-$(nproc)}
fuzz() { # TARGET COMMAND...
  ((${#running[@]} < jobs)) || finish
  local target=$1
  shift
  mkdir -p "build/fuzz/new/$target"
  "$@" -seed=1 -max_total_time="$seconds" -max_len=4096 -timeout=25 -rss_limit_mb=2048 -malloc_limit_mb=256 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/found/$target-" "build/fuzz/new/$target" "tests/fuzz/corpus/$target" \
    >"build/fuzz/$target.log" 2>&1 &
  running+=("$target $!")
}
finish() { # waits for the one that began first
  local target pid
  read -r target pid <<<"${running[0]}"
  running=("${running[@]:1}")
  echo "-- $target"
  wait "$pid" || {
    failed=1
    tail -60 "build/fuzz/$target.log"
  }
  grep -E "^Done|INITED|cov:" "build/fuzz/$target.log" | tail -2 || true
}

clang=$(command -v clang++ || true)
# Some distributions have the runtime of the fuzzer in a package of its own.
probe='extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
if [[ -n $clang ]] && "$clang" -x c++ -fsanitize=fuzzer,address,undefined - -o build/fuzz/probe <<<"$probe" 2>/dev/null; then
  "$CMAKE" -S . -B build/fuzz -DCMAKE_CXX_COMPILER="$clang" -DSOK_OPS=OFF -DSOK_FUZZ=ON \
    -DSOK_WERROR=OFF >build/fuzz/configure.log
  "$CMAKE" --build build/fuzz -j "${SOK_BUILD_JOBS:-$(nproc)}" --target fuzz_shard fuzz_serving >build/fuzz/build.log 2>&1 || {
    tail -40 build/fuzz/build.log
    exit 1
  }
  export UBSAN_OPTIONS=print_stacktrace=1
  fuzz shard build/fuzz/tests/fuzz/fuzz_shard
  fuzz serving build/fuzz/tests/fuzz/fuzz_serving
else
  echo "-- shard, serving: skipped, there is no clang++ with libFuzzer (apt-get install clang libclang-rt-dev)"
fi
if "$PYTHON" -c 'import atheris' 2>/dev/null; then
  for target in manifest v1 v2 npy openembedding; do
    fuzz "$target" env PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m tests.fuzz.fuzz_readers "$target"
  done
else
  echo "-- manifest, v1, v2, npy, openembedding: skipped, there is no atheris (pip install -r requirements/dev.txt)"
fi
while ((${#running[@]})); do finish; done
exit $failed
