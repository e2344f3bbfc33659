#!/usr/bin/env bash
# Builds the parts that are features of the library without those above them, and each crate by itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part() { cargo check --locked --quiet --lib "$@"; }
for crate in model wire data machine supervise native cluster why; do
    part --package "cuda-cluster-$crate"
done
part --no-default-features
for features in probe launch native; do
    part --no-default-features --features "$features"
done
echo "every part builds without those above it"
