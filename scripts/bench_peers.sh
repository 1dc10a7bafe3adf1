#!/usr/bin/env bash
# Sets up the peers of the benchmarks, each in an environment of its own under build/bench-peers (6 GB, minutes):
# bench_peers.sh [torch] [tfra]. Goes on if one does not install; the benchmarks name it as absent then.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
[[ -x .venv/bin/python && $PYTHON == python3 ]] && PYTHON=.venv/bin/python
folder=${SOK_BENCH_PEERS:-build/bench-peers}
mkdir -p "$folder"
failed=()

install() {
  local name=$1 python=$folder/$1/bin/python
  shift
  echo "== $name"
  [[ -x $python ]] || "$PYTHON" -m venv "$folder/$name" || return 1
  "$python" -m pip install --disable-pip-version-check -q "$@"
}

for peer in "${@:-torch tfra}"; do
  for name in $peer; do
    case $name in
      torch)
        # The build without CUDA, a tenth of the size: from the index that pip knows, or else from PyTorch's own.
        install torch -r requirements/bench-torch.txt ||
          install torch -r requirements/bench-torch.txt --extra-index-url https://download.pytorch.org/whl/cpu ||
          failed+=(torch)
        ;;
      tfra) install tfra -r requirements/bench-tfra.txt || failed+=(tfra) ;;
      *)
        echo "bench_peers.sh knows torch and tfra. Received: '$name'." >&2
        exit 2
        ;;
    esac
  done
done

if ((${#failed[@]})); then
  echo "not installed: ${failed[*]}; the benchmarks run without" >&2
  exit 1
fi
echo "the peers are in $folder"
