#!/usr/bin/env bash
# `make setup`: finds a Python that TensorFlow supports ($PYTHON, or else python3 and its relatives) and lets it do the rest.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -n "${PYTHON:-}" ]]; then
  candidates=("$PYTHON")
else
  candidates=(python3 python3.13 python3.12 python3.11 python3.10)
fi

seen=""
for candidate in "${candidates[@]}"; do
  command -v "$candidate" >/dev/null || continue
  if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
    exec "$candidate" scripts/setup_env.py "$@"
  fi
  seen+="  $candidate is $("$candidate" --version 2>&1 || true)"$'\n'
done

{
  echo "sok needs Python 3.10 to 3.13, and found none of: ${candidates[*]}"
  echo -n "$seen"
  echo "What to do:  sudo apt-get install python3 python3-venv     or name one:  PYTHON=/path/to/python3.12 make setup"
} >&2
exit 1
