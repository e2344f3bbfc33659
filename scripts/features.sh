#!/usr/bin/env bash
# Builds the parts that are features of the crate without those above them, and what decides without
# any feature.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part() { cargo check --locked --quiet --lib --no-default-features "$@"; }
part --profile test
part
for features in probe cuda ucx launch native; do
    part --features "$features"
done
echo "every part builds without those above it"
