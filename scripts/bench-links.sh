#!/usr/bin/env bash
# Compares `bench links` with UCX's own ucx_perftest and with Python's ucxx: the same two pinned
# cores, libucp, transports, kind of messages (active ones) and of endpoints (with error handling),
# small pages on both sides. They run in turns, because a machine's speed changes by the minute.
# Prints every pair of figures and the median of their ratios. The figures are means over all
# messages.
#
# ucx_perftest allocates memory in its own way: told to use the heap, it sends memory that it never
# wrote, which is a single page of zeros that stays in the cache, and appears twice as fast.
#
#   scripts/bench-links.sh [BINARY]      default: target/release/cuda-cluster
#   TURNS=5 CPUS=0,1                     how often, and where
#   ONLY=sm|tcp|idle|ucxx|async          one part alone
#
# Ends with 1 if a ratio misses its bound, with 2 if a program to compare with is missing. For ucxx,
# a Python that has it: PYTHON, or .venv/bin/python; ours then uses that Python's libucx.
set -euo pipefail
cd "$(dirname "$0")/.."
binary=${1:-target/release/cuda-cluster}
turns=${TURNS:-5}
cpus=${CPUS:-0,1}
only=${ONLY:-all}
python=${PYTHON:-.venv/bin/python}
name=bench-links-$$
scratch=$(mktemp -d)
missing=0

lacks() { echo "missing: $*" >&2; missing=1; }
wants() { [[ $only == all || $only == "$1" ]]; }

[[ -x $binary ]] || { lacks "$binary (cargo build --release)"; exit 2; }
command -v ucx_perftest >/dev/null || lacks "ucx_perftest (apt-get install ucx-utils)"
"$python" -c 'import ucxx.benchmarks.send_recv' 2>/dev/null ||
    lacks "Python's ucxx in $python (scripts/setup.sh --tests)"

finish() {
    "$binary" down "$name" >/dev/null 2>&1 || true
    rm -rf "$scratch"
}
trap finish EXIT

# shellcheck source=scripts/perftest.sh
source scripts/perftest.sh

# links OPTION...: the output of `bench links` on a new cluster, as JSON. New, because a tenth of
# the speed depends on which pages of memory it gets. Written to a file, because a reader at the
# other end of a pipe would start during the measurement and take its CPUs.
links() {
    up
    "$binary" bench links "$name" "$@" --pin "$cpus" -o json >"$scratch/links"
    down
}

# rounds SIZE MESSAGES: the rounds (of 64 MiB) that have as many messages.
rounds() { echo $((($1 * $2 + (1 << 26) - 1) >> 26)); }

# said EXPRESSION: the sum over the pairs in the output.
said() { python3 -c "import json
print(sum($1 for pair in json.load(open('$scratch/links'))['pairs']))"; }

# ours KEY SIZE MESSAGES: bandwidth in MiB/s, or latency in µs.
ours() {
    links --from gpu0 --to gpu1 --size "$2" --rounds "$(rounds "$2" "$3")"
    if [[ $1 == latency ]]; then said "pair['mean_latency_us']"
    else said "pair['mean_gb_per_s'] * 1e9 / 2**20"; fi
}

median() { sort -n | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

status=0
# judge LABEL BOUND KEY RIVAL OURS-COMMAND RIVAL-COMMAND: runs both in turns.
judge() {
    local label=$1 bound=$2 key=$3 rival=$4 mine=$5 theirs=$6 ratios=() a b ratio
    for turn in $(seq "$turns"); do
        # Alternate which goes first.
        if ((turn % 2)); then b=$($theirs); a=$($mine); else a=$($mine); b=$($theirs); fi
        [[ -n $a && -n $b ]] || { lacks "a figure of $label"; return; }
        ratio=$(awk -v a="$a" -v b="$b" 'BEGIN {printf "%.3f", a / b}')
        printf '%-18s ours %10.2f   %s %10.2f   ratio %s\n' "$label" "$a" "$rival" "$b" "$ratio"
        ratios+=("$ratio")
    done
    local middle good
    middle=$(printf '%s\n' "${ratios[@]}" | median)
    good=$(awk -v m="$middle" -v b="$bound" -v k="$key" \
        'BEGIN {print (k == "latency" ? m <= b : m >= b) ? "ok" : "MISSED"}')
    printf '%-18s median ratio %s, bound %s: %s\n\n' "$label" "$middle" "$bound" "$good"
    [[ $good == ok ]] || status=1
}

# Ours would use huge pages for large buffers, which is faster, but a different comparison.
pages='import os, sys; os.execvp(sys.argv[1], sys.argv[1:])'
small_pages='import ctypes, os, sys
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])'

options=()
up() {
    python3 -c "$pages" "$binary" up --topology dgx-h100 --simulate --n-workers 2 --name "$name" \
        --detach "${options[@]}" >/dev/null 2>"$scratch/up" || { cat "$scratch/up" >&2; exit 1; }
}
down() { "$binary" down "$name" >/dev/null 2>&1; }

over() {
    local transport=$1 pages=$small_pages
    judge "$transport 8 B" 1.5 latency ucx_perftest "ours latency 8 20000" "perftest ucp_am_lat 8 20000"
    for size in 65536:20000 1048576:2000 67108864:50; do
        local bytes=${size%:*} messages=${size#*:}
        judge "$transport $((bytes / 1024)) KiB" 0.95 bandwidth ucx_perftest \
            "ours bandwidth $bytes $messages" "perftest ucp_am_bw $bytes $messages"
    done
}

if command -v ucx_perftest >/dev/null; then
    if wants sm; then UCX_TLS=sm,self over sm; fi
    if wants tcp; then UCX_TLS=tcp,self UCX_NET_DEVICES=lo over tcp; fi
fi

# both SIZE MESSAGES: MiB/s of both ways together.
both() {
    links --bidirectional --size "$1" --rounds "$(rounds "$1" "$2")"
    said "pair['mean_gb_per_s'] * 1e9 / 2**20"
}

# ucxx SIZE ITERATIONS: MiB/s of messages both ways at the same time, which is what its benchmark
# does: one message at a time each way, without asyncio, both sides polling. Its memory is numpy's,
# which asks for huge pages as ours does. Its server sends from the buffer that it receives into, so
# it has three buffers and ours has four, which matters for the caches at 64 MiB.
ucxx() {
    local each
    IFS=, read -ra each <<<"$cpus"
    "$python" -m ucxx.benchmarks.send_recv -l ucxx-core --progress-mode polling -n "$1" \
        --n-iter "$2" --n-warmup-iter 20 -s 127.0.0.1 -b "${each[1]}" -c "${each[0]}" \
        --reuse-alloc --no-detailed-report 2>/dev/null |
        awk -F'|' '/^Bandwidth \(median\)/ {split($2, f, " ")
            factor["B/s"] = 2^-20; factor["kiB/s"] = 2^-10; factor["MiB/s"] = 1
            factor["GiB/s"] = 1024; print f[1] * factor[f[2]]}'
}

if wants ucxx && "$python" -c 'import ucxx.benchmarks.send_recv' 2>/dev/null; then
    library=$("$python" -c 'import libucx, os; print(os.path.dirname(libucx.__file__) + "/lib")')
    export UCX_TLS=sm,self,tcp UCX_NET_DEVICES=lo
    options=(--ucx "$library")
    for size in 65536:5000 1048576:1000 67108864:30; do
        bytes=${size%:*}
        judge "ucxx $((bytes / 1024)) KiB" 0.95 bandwidth ucxx \
            "both $bytes ${size#*:}" "ucxx $bytes ${size#*:}"
    done
    unset UCX_TLS UCX_NET_DEVICES
fi

# Eight connected workers with nothing to do: CPU time of all processes in ten seconds.
if wants idle; then
    "$binary" up --topology dgx-h100 --simulate --name "$name" --detach >/dev/null 2>&1
    sleep 1
    mapfile -t pids < <("$binary" ps "$name" -o json | python3 -c "import json, sys
state = json.load(sys.stdin)
print(*['/proc/%d' % p['pid'] for p in [state['scheduler']] + state['workers']], sep='\n')")
    ticks() { cat "${pids[@]/%//stat}" | awk '{sum += $14 + $15} END {print sum}'; }
    before=$(ticks); sleep 10; after=$(ticks)
    awk -v t=$((after - before)) -v hz="$(getconf CLK_TCK)" 'BEGIN {
        printf "idle: scheduler and 8 workers used %.2f s of CPU in 10 s (%.2f %% of a core)\n", t / hz, t / hz * 10}'
    down
fi

if wants async; then "$(scripts/built.sh bench plane)"; fi

((missing == 0)) || exit 2
exit "$status"
