#!/usr/bin/env bash
# What is wrong without running anything: format and lints of Rust, documentation, Python, shell.
#
#   scripts/lint.sh      after scripts/setup.sh --tests
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
status=0
lint() { "$@" || { status=1 && echo "lint: $1 $2 found something" >&2; }; }
lint cargo fmt --check
lint cargo clippy --locked --quiet --workspace --all-targets -- -D warnings
lint env RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --quiet --workspace
lint .venv/bin/ruff check --quiet python tests/python scripts crates/cluster/src/python
lint .venv/bin/ruff format --check --quiet python crates/cluster/src/python
lint .venv/bin/python -m mypy --no-error-summary
mapfile -t scripts < <(git ls-files '*.sh' .ci/run)
lint shellcheck --severity=warning "${scripts[@]}"
exit "$status"
