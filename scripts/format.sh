#!/usr/bin/env bash
# Formats Python and C++ in place.
set -euo pipefail
source "$(dirname "$0")/common.sh"
need_modules ruff clang_format

"$PYTHON" -m ruff check --fix-only --quiet .
"$PYTHON" -m ruff format .
cpp_files | xargs -r "$(dirname "$PYTHON")/clang-format" -i
