#!/usr/bin/env bash
# Trains a click model on two workers with generated data: demo.sh [flags of examples/criteo/train.py]
#   PYTHON   an environment that is ready; without it, .venv is used and set up first
set -euo pipefail
[[ -n "${PYTHON:-}" ]] || "$(dirname "$0")/setup.sh"
source "$(dirname "$0")/common.sh"
need_modules sok tqdm

export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}
mkdir -p out/demo
train=("$PYTHON" examples/criteo/train.py --cache out/criteo --report out/demo --json out/demo/result.json "$@")

# What TensorFlow says before its log level counts, and the name of the first worker before each of its lines.
filter=(sed -u -E -e '/absl::InitializeLog|oneDNN custom operations are on|Could not find cuda drivers/d' -e 's/^\[0\]<std(out|err)>://')

echo
if "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("horovod") is None)'; then
  echo "Training on two workers: horovodrun -np 2 python ${train[*]:1}"
  launch=("$(dirname "$PYTHON")/horovodrun" -np 2)
else
  echo "Horovod is not installed, so this trains on one worker: python ${train[*]:1}"
  launch=()
fi
"${launch[@]}" "${train[@]}" 2> >("${filter[@]}" >&2) | "${filter[@]}" || {
  status=$?
  echo "The training failed (exit status $status). What to do: see the message above; then $PYTHON -m sok doctor --horovod" >&2
  exit $status
}
