#!/bin/sh
# Two machines, one cluster: a frontend on machine a, workers on any machine that reaches it. ADDRESS is a's address.
#
#   a$ ADDRESS=10.0.0.5 examples/two_machines.sh frontend
#   b$ ADDRESS=10.0.0.5 examples/two_machines.sh worker sim-tiny
#   b$ ADDRESS=10.0.0.5 examples/two_machines.sh status
#
# Without ADDRESS all parts run on this machine. With it, all machines need the same key file: create it once with
# `kvolt cluster init cluster.key`, copy it, and set KEY=cluster.key.
set -eu
[ -z "${KEY:-}" ] || export KVOLT_CLUSTER_KEY="$KEY"
join="${ADDRESS:-127.0.0.1}:${JOIN_PORT:-7400}"

case "${1:-}" in
frontend)
    # Serves HTTP to all clients, and lets workers register at $join. Workers can come and go at any time.
    exec kvolt frontend --host 0.0.0.0 --discovery-join-listen "$join"
    ;;
worker)
    # Finds the frontend through $join; the frontend calls the worker back on the address that reaches $join.
    exec kvolt worker "${2:-smollm2-135m}" --name "$(hostname)-$$" --join "$join"
    ;;
status)
    exec kvolt status --join "$join"
    ;;
*)
    echo "usage: $0 frontend | worker [MODEL] | status" >&2
    exit 2
    ;;
esac
