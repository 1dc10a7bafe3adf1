# Sourced by what builds: $CMAKE and $CTEST, from beside $PYTHON or else from PATH. Where there is Ninja they build with it: it
# compiles what links to a library while that is still compiled, so that no processor waits for the last file of each.
tools=$(dirname "$(command -v "$PYTHON")")
CMAKE=$tools/cmake CTEST=$tools/ctest
if [[ ! -x $CMAKE ]]; then
  CTEST=ctest CMAKE=$(command -v cmake) || {
    echo "cmake was not found. Install it: $PYTHON -m pip install 'cmake<4'" >&2
    exit 1
  }
fi
if [[ -x $tools/ninja ]]; then
  export CMAKE_GENERATOR=Ninja PATH="$PATH:$tools"
fi
# As make says it, which what shows progress reads.
export NINJA_STATUS="[%p] "
# Under make these would change how the inner make prints and counts its jobs.
unset MAKEFLAGS MAKELEVEL MFLAGS
