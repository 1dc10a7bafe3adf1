#!/usr/bin/env bash
# Compiles the CUDA kernels by clang, a second compiler of CUDA, down to machine code: second_compiler.sh [ARCHITECTURE] (default sm_80).
# What it warns of is an error, but for __grid_constant__, which it does not know. Nothing is linked, and nothing runs. Needs clang++ 19 or newer (apt-get install clang-19).
#   CLANG       the compiler; default: the newest clang++-N there is
#   CUDA_PATH   a toolkit; without it the headers, libdevice and ptxas of CUDA 12.9, from the package index, in build/second_compiler
set -euo pipefail
source "$(dirname "$0")/common.sh"
architecture=${1:-sm_80} build=build/second_compiler
clang=${CLANG:-$(compgen -c clang++- | grep -E '^clang\+\+-[0-9]+$' | sort -t- -k2 -n | tail -1 || true)}
version=$("${clang:-clang++}" -dumpversion 2>/dev/null | cut -d. -f1 || true)
if ((${version:-0} < 19)); then
  echo "clang++ 19 or newer is needed (apt-get install clang-19). Found: ${clang:-none}." >&2
  exit 1
fi
toolkit=${CUDA_PATH:-$PWD/$build/toolkit}
if [[ -z ${CUDA_PATH:-} && ! -x $toolkit/bin/ptxas ]]; then
  wheels=$PWD/$build/wheels
  mkdir -p "$toolkit/include" "$toolkit/bin"
  # clang's own header includes that of curand.
  "$PYTHON" -m pip install -q --no-deps --upgrade --target "$wheels" "nvidia-cuda-nvcc-cu12==12.9.*" "nvidia-cuda-runtime-cu12==12.9.*" \
    "nvidia-cuda-cccl-cu12==12.9.*" "nvidia-curand-cu12==10.3.10.*"
  for package in cuda_nvcc cuda_runtime cuda_cccl curand; do
    cp -rsn "$wheels/nvidia/$package/include/." "$toolkit/include/"
  done
  cp -rs "$wheels/nvidia/cuda_nvcc/nvvm" "$toolkit/"
  cp -s "$wheels/nvidia/cuda_nvcc/bin/"* "$toolkit/bin/"
fi
mkdir -p "$build/objects"
compile() { # FILE
  "$clang" -x cuda --cuda-path="$toolkit" --cuda-gpu-arch="$architecture" --cuda-device-only -std=c++17 -O2 -ffp-contract=off -Wall -Wextra \
    -Werror -Wno-unknown-cuda-version -Wno-unknown-attributes -Iinclude -Icuda -c -o "$build/objects/$(basename "$1" .cu).o" "$1" || return 1
  echo "ok     $1"
}
export -f compile
export clang toolkit architecture build
printf '%s\n' cuda/*.cu | xargs -P "${SOK_BUILD_JOBS:-$(nproc)}" -I{} bash -c 'compile {}' || {
  echo "clang does not compile all kernels, see above" >&2
  exit 1
}
