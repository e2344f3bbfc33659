#!/bin/sh
# Fuzzes each reader of topology texts, that of the native engine's messages, and those of direct://,
# for a short time, starting from the seeds in fuzz/seeds.
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

# fuzz FOLDER READER SANITIZER
fuzz() {
    echo "== $2, ${seconds}s"
    mkdir -p "$1/corpus/$2" "$1/seeds/$2"
    cargo fuzz run --fuzz-dir "$1" --sanitizer "$3" "$2" "$1/corpus/$2" "$1/seeds/$2" -- \
        -max_total_time="$seconds" -timeout=10 -max_len=65536 -print_final_stats=1
}

# Without a sanitizer: these readers have no unsafe code, and it would slow them down.
for reader in document matrix nccl hwloc wire; do
    fuzz fuzz "$reader" none
done
fuzz python/comm/fuzz comm address
