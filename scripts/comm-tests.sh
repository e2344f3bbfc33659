#!/usr/bin/env bash
# The tests of python/comm, without Python: with it, a test program would need libpython.
#
#   scripts/comm-tests.sh [ARGUMENTS OF cargo test]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec cargo test --locked --package cuda-cluster-comm --no-default-features --features plane --lib --test engine "$@"
