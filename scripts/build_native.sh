#!/usr/bin/env bash
# Builds sok/_native (libsok_ops.so and libsok_serving.so) for the TensorFlow of $PYTHON (default: .venv's, or else python3).
# Needs: g++, make. cmake is taken from beside $PYTHON, or else from PATH. Incremental.
#   CUDAARCHS  CUDA architectures, as CMake's variable of that name; default: those that a wheel has
#   SOK_CUDA   sok/_native/libsok_cuda.so too: ON, OFF, NVCC: where nvcc is found, or (default) AUTO: where nvcc and a GPU are
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON="$PWD/.venv/bin/python"
fi
PYTHON=$(command -v "$PYTHON")

source scripts/cmake.sh

build=build/native
cuda=${SOK_CUDA:-AUTO}
# What was built with kernels keeps them: `make demo` after `make test` builds nothing anew.
[[ $cuda == AUTO && -f $build/identity && -f sok/_native/libsok_cuda.so ]] && cuda=NVCC
# Another Python or TensorFlow means other headers: configure again. (Metadata only, so this takes no time.)
# So does hiredis, where it comes or goes: it is looked for then.
hiredis=$(echo '#include <hiredis/hiredis.h>' | g++ -E -x c++ - >/dev/null 2>&1 && echo hiredis || true)
identity="$PYTHON $("$PYTHON" -c 'from importlib.metadata import version; print(version("tensorflow"))' 2>/dev/null || echo none) cuda $cuda ${CUDAARCHS:-} $hiredis"
if [[ ! -f $build/CMakeCache.txt || "$(cat $build/identity 2>/dev/null)" != "$identity" ]]; then
  mkdir -p $build
  rm -f $build/CMakeCache.txt
  "$CMAKE" -S . -B $build -DPython3_EXECUTABLE="$PYTHON" -DSOK_CUDA="$cuda"
  echo "$identity" > $build/identity
fi

# The last step of a build puts a library in place; make it happen again if someone deleted the result.
for library in libsok_ops.so libsok_serving.so; do
  [[ -f sok/_native/$library ]] || rm -f "$build/$library"
done

# One TensorFlow op file takes about 1.5 GB to compile.
jobs=${SOK_BUILD_JOBS:-$(nproc)}
memory_gb=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
limit=$((memory_gb * 2 / 3))
((limit < 1)) && limit=1
((jobs > limit)) && jobs=$limit
"$CMAKE" --build $build -j "$jobs"
echo "built $(pwd)/sok/_native"
