#!/bin/sh
# Runs the chaos tests with many faults of each kind, and prints the figures: scripts/chaos.sh [SEED [FAULTS]]
set -eu
cd "$(dirname "$0")/.."
CHAOS_SEED="${1:-$(date +%s)}" CHAOS_FAULTS="${2:-400}" \
    exec cargo test --test chaos -- --nocapture
