#!/usr/bin/env bash
# Bad days of the hosts of one Dask cluster: faults at random seconds (a host without power or network, a slow
# line, unknown names, a full disk, a scheduler killed, SIGTERM, a frozen host) under work whose results are
# known; prints each round and what was seen. Ends with 1 if a result was wrong, something waited for more
# than a minute beyond its fault, an end had no cause, or something was left.
#
#   scripts/hosts-lab.sh [SEED [FAULTS [HOSTS [FAULT@HOST...]]]]      default: the time, 300, 4; two hours
#
# FAULT@HOST (frozen@1 "full disk@2"): in each round these, instead of what the seed draws.
#
# Hosts are namespaces of this machine: networks, processes, mounts, names and /dev/shm of their own, one
# kernel. Their wire is tests/python/lab_wire.py, because many kernels have no netem. Needs root. The same seed
# gives the same work and the same faults. tests/python/test_bad_days.py is the short form.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "$(id -u)" -eq 0 ] || { echo "hosts-lab: needs root, to make hosts" >&2; exit 2; }
[ -x target/debug/cuda-cluster ] || { echo "hosts-lab: there is no program: cargo build" >&2; exit 2; }
seed=${1:-$(date +%s)}
echo "hosts-lab: seed $seed"
exec scripts/own-network.sh "${PYTHON:-.venv/bin/python}" tests/python/bad_days.py "$seed" "${2:-300}" "${3:-4}" "${@:4}"
