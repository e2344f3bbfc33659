#!/usr/bin/env bash
# Everything that must pass before a change lands: format, lints, tests, documentation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/lint.sh
scripts/features.sh
scripts/comm-tests.sh --quiet
cargo test --locked --quiet --package tidy
cargo test --locked --quiet --workspace --exclude bindgen --exclude tidy
