# Sourced by the other scripts: $ROOT, $PYTHON, and what they say when something is missing.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
export PYTHON=${PYTHON:-$ROOT/.venv/bin/python}

# What the script needs in $PYTHON's environment, as module names.
need_modules() {
  local missing=()
  [[ -x "$(command -v "$PYTHON")" ]] || {
    echo "$PYTHON does not exist. Run: make setup" >&2
    exit 1
  }
  for module in "$@"; do
    "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" ||
      missing+=("$module")
  done
  ((${#missing[@]} == 0)) || {
    echo "$PYTHON lacks: ${missing[*]}. Run: make setup, or $PYTHON -m pip install -r requirements/dev.txt" >&2
    exit 1
  }
}

# The C++ files that git knows or could know.
cpp_files() {
  git ls-files --cached --others --exclude-standard -- 'include/*.h' 'cpu/*' 'cuda/*' 'storage/*' 'ops/*' 'tests/cpp/*' 'tests/cuda/*' 'tests/fuzz/*' 'tests/kills/*' 'benchmarks/*' |
    grep -E '\.(h|cc|cu|cuh)$'
}
