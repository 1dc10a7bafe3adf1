#!/usr/bin/env bash
# Builds Horovod with Gloo for the TensorFlow of $PYTHON from its sdist, and installs it there.
# Needs: g++, make, cmake<4 beside $PYTHON, and requirements/build.txt and horovod.txt installed.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-$PWD/.venv/bin/python}
version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
work=build/horovod
# Horovod looks for cmake on PATH.
PATH="$(dirname "$PYTHON"):$PATH"

mkdir -p $work
rm -rf "$work/horovod-$version"
if [[ ! -f $work/horovod-$version.tar.gz ]]; then
  "$PYTHON" -m pip download --no-deps --no-binary=:all: --no-build-isolation -d $work "horovod==$version"
fi
echo "$sha256  $work/horovod-$version.tar.gz" | sha256sum --check --status || {
  echo "$work/horovod-$version.tar.gz is not the release that this was tried with. Delete it and try again." >&2
  exit 1
}
tar -xf "$work/horovod-$version.tar.gz" -C $work

source=$work/horovod-$version
# FILE REGEX COMMAND: changes the one line of FILE that REGEX matches by COMMAND of sed.
change() {
  [[ $(grep -c "$2" "$source/$1") == 1 ]] || {
    echo "$source/$1 has not exactly one line with $2; it is not the file that this script knows how to change." >&2
    exit 1
  }
  sed -i "/$2/$3" "$source/$1"
}
# XLA's headers moved: this source no longer compiles with TensorFlow 2.21. It only serves HOROVOD_ENABLE_XLA_OPS.
change horovod/tensorflow/CMakeLists.txt 'xla_mpi_ops\.cc' d
# g++ 14 looks into templates that nobody uses: one of them assigns to a member that is const.
change third_party/flatbuffers/include/flatbuffers/stl_emulation.h '^ *const size_type count_;' 's/const //'

# The rest is for time alone. Horovod compiles Gloo twice, for two C++ standards; TensorFlow takes that of C++17.
change CMakeLists.txt 'add_subdirectory(third_party\/gloo)' 's/)$/ EXCLUDE_FROM_ALL)/'
# The file that takes longest first, so that no core waits for it at the end.
change horovod/tensorflow/CMakeLists.txt '\${SOURCES} \${TF_SOURCES})' 's/\(\${SOURCES}\) \(\${TF_SOURCES}\)/\2 \1/'
# Without debug symbols, 45 MB.
change CMakeLists.txt '"-O2" "-O3" CMAKE_CXX_FLAGS' 's/"-O2"/"-O2 -g"/'

# A caller may set these to get MPI or NCCL; the default needs nothing that pip does not bring.
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=${HOROVOD_WITH_GLOO-1}
[[ -n "${HOROVOD_WITH_MPI:-}" ]] || export HOROVOD_WITHOUT_MPI=1
# Its headers use std::logic_error without naming where that comes from, which g++ 14 no longer lets pass.
export CXXFLAGS="${CXXFLAGS:-} -include stdexcept -include cstdint"
unset MAKELEVEL MFLAGS
export MAKEFLAGS="-j${SOK_BUILD_JOBS:-$(nproc)}"
# -v: the build takes minutes, and its log shows where it is.
"$PYTHON" -m pip install -v --no-build-isolation --no-deps --force-reinstall "./$source"
"$PYTHON" -c 'import horovod.tensorflow as hvd; assert hvd.gloo_built() or hvd.mpi_built()'
