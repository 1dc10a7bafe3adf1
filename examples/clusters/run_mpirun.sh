#!/usr/bin/env bash
# Open MPI, with a Horovod that was built with it (HOROVOD_WITH_MPI=1 make setup): HOSTS=name:workers,name:workers
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
HOSTS=${HOSTS:-node1:4,node2:4}
FOLDER=${FOLDER:-/shared/model}  # that all hosts see
INTERFACE=${INTERFACE:-eth0}     # by which hosts reach one another

workers=0
for host in ${HOSTS//,/ }; do workers=$((workers + ${host##*:})); done
exec mpirun -np "$workers" -H "$HOSTS" --bind-to none --map-by slot \
  --mca btl_tcp_if_include "$INTERFACE" --mca oob_tcp_if_include "$INTERFACE" -x NCCL_SOCKET_IFNAME="$INTERFACE" \
  -x PATH -x LD_LIBRARY_PATH -x PYTHONPATH python "$here/train.py" "$FOLDER"
