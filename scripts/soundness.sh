#!/usr/bin/env bash
# Runs the tests of the UCX layer and of the data plane under valgrind, which must find nothing but
# memory that UCX keeps. Then those of direct:// (python/comm) with the address sanitizer, with the
# thread sanitizer, and, as far as they make no system calls that Miri does not know, under Miri. Then
# opens and closes connections repeatedly in one process, and prints what it holds before and after.
# Takes about ten minutes on two cores, plus the builds.
#
#   scripts/soundness.sh                 CYCLES=100000 connections, PART=valgrind|comm|cycles for one;
#                                        CUDA_CLUSTER_UCX for another libucp than the loader's
#
# Ends with 1 if something was found, with 2 if valgrind or the nightly compiler is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
cycles=${CYCLES:-100000}
part=${PART:-all}
status=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cat >"$scratch/kept.supp" <<'SUPP'
{
   UCX's own memory: a worker that had peers stays to the end of the process
   Memcheck:Leak
   match-leak-kinds: definite
   fun:*alloc
   obj:*/libuc?.so*
   ...
}
{
   what the dynamic loader notes about a library that is opened
   Memcheck:Leak
   match-leak-kinds: definite
   fun:malloc
   obj:*/ld-linux*
   ...
}
SUPP

# memcheck TEST ARGUMENTS...: fails on an invalid or uninitialised access, and on a leak.
memcheck() {
    local test=$1; shift
    local binary; binary=$(scripts/built.sh test "$test")
    local log=$scratch/$test.log
    echo "== $test under valgrind: $*"
    # valgrind runs one thread at a time; take fair turns, because threads here spin.
    valgrind --quiet --fair-sched=yes --error-exitcode=9 --num-callers=30 \
        --suppressions="$scratch/kept.supp" --gen-suppressions=all \
        --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
        --log-file="$log" "$binary" --test-threads=1 "$@" >"$scratch/$test.out" 2>&1 &&
        grep "test result" "$scratch/$test.out" && echo "nothing found" && return
    status=1
    tail -20 "$scratch/$test.out"
    head -100 "$log"
}

# checked NAME COMMAND...: fails if the tests do, or the sanitizer finds something.
checked() {
    local name=$1; shift
    echo "== direct:// with $name"
    if CARGO_TARGET_DIR=target/$name "$@" >"$scratch/$name.out" 2>&1; then
        grep "test result" "$scratch/$name.out" && echo "nothing found" && return
    fi
    status=1
    tail -100 "$scratch/$name.out"
}

if [[ $part == all || $part == valgrind ]]; then
    command -v valgrind >/dev/null || { echo "valgrind is missing: apt-get install valgrind" >&2; exit 2; }
    # With the loader's libucp. Under valgrind UCX has no registration cache, and without one 1.21
    # crashes when an endpoint is closed by force under a rendezvous (openucx/ucx#11467).
    # every_libucp... runs the others again, in processes that valgrind would not follow.
    memcheck ucx --skip every_libucp
    memcheck native_plane --skip every_libucp
fi
if [[ $part == all || $part == comm ]]; then
    # The thread sanitizer must see the standard library's own synchronisation, which is built for it.
    if ! cargo +nightly miri --version >/dev/null 2>&1 ||
        [[ ! -e $(rustc +nightly --print sysroot)/lib/rustlib/src/rust/library/Cargo.lock ]]; then
        echo "hint: rustup toolchain install nightly --component miri,rust-src" >&2
        exit 2
    fi
    target=$(rustc -vV | sed -n 's/^host: //p')
    tests=(-p cuda-cluster-comm -p cuda-cluster-data --no-default-features --target "$target")
    checked asan env RUSTFLAGS=-Zsanitizer=address cargo +nightly test "${tests[@]}"
    checked tsan env RUSTFLAGS=-Zsanitizer=thread cargo +nightly test -Zbuild-std "${tests[@]}"
    # Frames are addresses of another language, so pointers are made of numbers.
    checked miri env MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance" \
        PROPTEST_CASES="${PROPTEST_CASES:-4}" cargo +nightly miri test "${tests[@]}" --lib -- \
        wire:: greeting:: reader:: outbox:: memory::pool:: memory::kept::
fi
if [[ $part == all || $part == cycles ]]; then
    echo "== $cycles connections opened and closed"
    # Of one data plane, with a peer for every 60000 of them: see crates/data/src/ucx/address.rs.
    plane=$(scripts/built.sh bench plane)
    "$plane" cycles "$cycles" || status=1
fi
exit "$status"
