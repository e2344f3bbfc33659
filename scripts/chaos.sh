#!/usr/bin/env bash
# Runs the chaos tests with many faults of each kind, those of direct:// too, and prints the faults
# and the longest time to end: scripts/chaos.sh [SEED [FAULTS]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
export CHAOS_SEED="${1:-$(date +%s)}" CHAOS_FAULTS="${2:-400}"
cargo test --locked --test chaos --no-fail-fast -- --nocapture | tee "$log" || status=$?
cargo build --locked --lib --package cuda-cluster --package cuda-cluster-comm
pytest=("${PYTHON:-.venv/bin/python}" -m pytest -q -s -p no:cacheprovider)
"${pytest[@]}" tests/python/test_comm_chaos.py | tee -a "$log" || status=$?
# In a network of its own, where it makes links.
own=()
[ "$(id -u)" -ne 0 ] || own=(scripts/own-network.sh)
"${own[@]}" "${pytest[@]}" tests/python/test_comm_hosts.py | tee -a "$log" || status=$?
echo
grep -E '^[a-z]+: (seed|after)' "$log"
exit "$status"
