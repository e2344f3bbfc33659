#!/usr/bin/env bash
# Everything that must pass before a change lands: format, lints, tests, documentation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo fmt --check
cargo clippy --locked --all-targets -- -D warnings
cargo clippy --locked --all-targets --package cuda-cluster-comm --package tidy -- -D warnings
scripts/features.sh
cargo test --locked --quiet --package cuda-cluster-comm --no-default-features --features plane
cargo test --locked --quiet --package tidy
RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --quiet
RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --quiet --package cuda-cluster-comm
cargo test --locked --quiet
