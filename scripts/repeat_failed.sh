#!/usr/bin/env bash
# Runs pytest side by side, and what fails once more, one after the other: repeat_failed.sh MOST JOBS LOG ARGUMENTS...
# Repeats are counted, named and written to LOG. More than MOST tests are not repeated: then it has failed.
set -euo pipefail
source "$(dirname "$0")/common.sh"
most=$1 jobs=$2 log=$3
shift 3
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
: >"$log"
tests=("$PYTHON" -m pytest -o "cache_dir=$cache" "$@")
"${tests[@]}" -n "$jobs" --dist loadgroup && exit
[[ -f $cache/v/cache/lastfailed ]] || exit 1 # it did not get as far as a test
# pytest-xdist adds their groups to the names of tests, by which one process would not know them again.
"$PYTHON" - "$cache/v/cache/lastfailed" >"$log" <<'END'
import json, pathlib, re, sys

path = pathlib.Path(sys.argv[1])
failed = [re.sub(r"@[^\]]*$", "", name) for name in json.loads(path.read_text())]
path.write_text(json.dumps(dict.fromkeys(failed, True)))
print(*failed, sep="\n")
END
count=$(wc -l <"$log")
echo "== $count test(s) failed, at most $most are repeated:"
cat "$log"
((count <= most)) || exit 1
"${tests[@]}" -n 0 --last-failed --last-failed-no-failures none
echo "== $count test(s) passed when they were repeated. That is counted, and not well."
