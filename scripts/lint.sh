#!/usr/bin/env bash
# Says what is not formatted or looks wrong, and changes nothing. `make format` repairs the formatting.
set -euo pipefail
source "$(dirname "$0")/common.sh"
need_modules ruff clang_format mypy

failed=0
"$PYTHON" -m ruff check . || failed=1
"$PYTHON" -m ruff format --check . || failed=1
"$PYTHON" -m mypy || failed=1
cpp_files | xargs -r "$(dirname "$PYTHON")/clang-format" --dry-run -Werror || failed=1
for script in scripts/*.sh .ci/run; do
  bash -n "$script" || failed=1
done
((failed == 0)) || echo "lint failed; make format repairs formatting" >&2
exit $failed
