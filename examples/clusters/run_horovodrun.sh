#!/usr/bin/env bash
# Hosts that reach one another by ssh without a password, with the same paths on all: HOSTS=name:workers,name:workers
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
HOSTS=${HOSTS:-node1:4,node2:4}
FOLDER=${FOLDER:-/shared/model}  # that all hosts see

workers=0
for host in ${HOSTS//,/ }; do workers=$((workers + ${host##*:})); done
# Leave the interface out, and Horovod searches for those by which all hosts reach one another (some seconds more).
interface=${INTERFACE:+--network-interface $INTERFACE}
# shellcheck disable=SC2086  # two words
exec horovodrun --gloo -np "$workers" $interface -H "$HOSTS" python "$here/train.py" "$FOLDER"
