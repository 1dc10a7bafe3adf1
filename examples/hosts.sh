#!/usr/bin/env bash
# A job over several hosts, on one machine: each host is a set of Linux namespaces with an address and a name of its own.
#   examples/hosts.sh --hosts 2 --check            compares it with one worker, then takes a host's link down: a line of JSON
#   examples/hosts.sh --hosts 4 --workers 2 COMMAND...   runs a program on them by horovodrun
# Needs root; says what is missing where it cannot be done. docs/clusters.md explains.
exec "${PYTHON:-python}" "$(dirname "$0")/hosts/main.py" "$@"
