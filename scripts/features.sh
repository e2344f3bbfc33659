#!/usr/bin/env bash
# Builds the parts that are features of the library without those above them.
#
#   scripts/features.sh         those that users choose
#   scripts/features.sh --all   also each crate by itself, which builds third parties' crates again and again
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part() { cargo check --locked --quiet --lib "$@"; }
if [ "${1:-}" = --all ]; then
    for crate in wire data machine supervise native cluster why; do
        part --package "cuda-cluster-$crate"
    done
fi
part --package cuda-cluster-model
part --no-default-features
for features in probe launch native; do
    part --no-default-features --features "$features"
done
echo "every part builds without those above it"
