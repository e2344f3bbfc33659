#!/usr/bin/env bash
# Runs the tests of the UCX layer and of the data plane under valgrind, and says what it found that
# is not UCX's own. Then opens and closes connections over and over, and prints what is held before
# and after. Takes minutes.
#
#   scripts/soundness.sh                 CYCLES=100000 connections, PART=valgrind|cycles for one
#
# Ends with 1 if something was found, with 2 if valgrind is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
cycles=${CYCLES:-100000}
part=${PART:-all}
status=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# UCX's own: it sends structures with padding, hands its own pools out, and keeps some to the end.
cat >"$scratch/ucx.supp" <<'SUPP'
{
   UCX sends padding over sockets and shared memory
   Memcheck:Param
   ...
   obj:*/libuc?.so*
}
{
   UCX reads what the other side wrote into memory that both share
   Memcheck:Cond
   ...
   obj:*/libuc?.so*
}
{
   UCX likewise
   Memcheck:Value8
   ...
   obj:*/libuc?.so*
}
{
   UCX copies from other processes, which valgrind does not see
   Memcheck:Param
   process_vm_readv(...)
   ...
}
SUPP

# program TEST: the test program that cargo builds.
program() {
    cargo test --locked --no-run --test "$1" --message-format=json 2>/dev/null |
        python3 -c "import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get('executable') and message['target']['name'] == '$1': print(message['executable'])"
}

# memcheck TEST ARGUMENTS...: fails on an invalid access or a leak that our code is in.
memcheck() {
    local test=$1; shift
    local binary; binary=$(program "$test")
    local log=$scratch/$test.log
    echo "== $test under valgrind: $*"
    # One thread of the interpreter at a time, in fair turns: threads here spin.
    if CUDA_CLUSTER_PATIENCE=600 valgrind --quiet --fair-sched=yes --error-exitcode=9 \
        --suppressions="$scratch/ucx.supp" --gen-suppressions=all --num-callers=30 \
        --undef-value-errors=yes --leak-check=full --show-leak-kinds=definite \
        --errors-for-leak-kinds=none --log-file="$log" \
        "$binary" --test-threads=1 "$@" >"$scratch/$test.out" 2>&1; then
        grep "test result" "$scratch/$test.out" || true
    else
        status=1; tail -20 "$scratch/$test.out"
    fi
    local ours
    ours=$(grep -c "Invalid \(read\|write\|free\)\|Mismatched\|uninitialised" "$log" || true)
    echo "invalid or uninitialised accesses outside UCX: $ours"
    [[ $ours == 0 ]] || { status=1; head -60 "$log"; }
    awk '/definitely lost/ {n++; bytes = $0} END {printf "definitely lost records (workers that had peers stay to the end of the process): %d\n", n}' "$log"
}

if [[ $part != cycles ]]; then
    command -v valgrind >/dev/null || { echo "valgrind is missing: apt-get install valgrind" >&2; exit 2; }
    memcheck ucx --skip every_libucp
    memcheck native_plane --skip every_libucp --skip dropped_futures --skip a_stranger
fi
if [[ $part != valgrind ]]; then
    echo "== $cycles connections opened and closed"
    # In two processes: after 65536 connections between the same two UCX workers, UCX (1.13 and 1.21)
    # does not let go of the peer's shared memory. A restarted worker is another UCX worker.
    for half in 1 2; do
        cargo bench --quiet --locked --bench plane -- cycles $((cycles / 2)) || status=1
    done
fi
exit "$status"
