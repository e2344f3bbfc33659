#!/bin/sh
# Fuzzes each reader of topology texts, and that of the native engine's messages, for a short time,
# starting from the seeds in fuzz/seeds.
# usage: scripts/fuzz.sh [SECONDS]      seconds for each reader, 20 by default
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-20}

if ! cargo fuzz --version >/dev/null 2>&1; then
    echo "cargo-fuzz is missing; install it with: cargo install cargo-fuzz" >&2
    exit 2
fi

# The fuzzer's instrumentation needs flags that a stable compiler takes only this way.
RUSTC_BOOTSTRAP=1
export RUSTC_BOOTSTRAP

for reader in document matrix nccl hwloc wire; do
    echo "== $reader, ${seconds}s"
    mkdir -p "fuzz/corpus/$reader" "fuzz/seeds/$reader"
    # Without a sanitizer: the readers have no unsafe code, and it would slow them down.
    cargo fuzz run --sanitizer none "$reader" "fuzz/corpus/$reader" "fuzz/seeds/$reader" -- \
        -max_total_time="$seconds" -timeout=10 -max_len=65536 -print_final_stats=1
done
