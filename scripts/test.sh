#!/usr/bin/env bash
# Sets up and runs the tests, with everything they need installed first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --tests
# shellcheck disable=SC1091
[ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"
exec cargo test --locked "$@"
