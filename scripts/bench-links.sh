#!/usr/bin/env bash
# Compares `bench links` with UCX's own ucx_perftest: the same two pinned cores, shared memory and
# TCP, in turns, because machines change from minute to minute. Prints every pair of figures and
# the median of their ratios; ends with 1 if a ratio misses its bound.
#
#   scripts/bench-links.sh [BINARY]      default: target/release/cuda-cluster
#   TURNS=5 CPUS=0,1                     how often, and where
set -euo pipefail
cd "$(dirname "$0")/.."
binary=${1:-target/release/cuda-cluster}
turns=${TURNS:-5}
cpus=${CPUS:-0,1}
name=bench-links-$$
command -v ucx_perftest >/dev/null || { echo "ucx_perftest is missing: apt-get install ucx-utils" >&2; exit 2; }
[[ -x $binary ]] || { echo "$binary is missing: cargo build --release" >&2; exit 2; }

finish() { "$binary" down "$name" >/dev/null 2>&1 || true; }
trap finish EXIT

# The variables that our workers set for themselves, for the same protocols on both sides.
export UCX_POSIX_ERROR_HANDLING=y UCX_SYSV_ERROR_HANDLING=y UCX_CMA_MEMORY_INVALIDATE=y
export UCX_WARN_UNUSED_ENV_VARS=n

# perftest TEST SIZE ITERATIONS: bandwidth in MB/s, or latency in µs.
perftest() {
    local port=$((20000 + RANDOM % 20000)) column=$([[ $1 == tag_lat ]] && echo 3 || echo 6)
    taskset -c "${cpus#*,}" ucx_perftest -p "$port" >/dev/null 2>&1 &
    local server=$!
    for _ in 1 2 3 4 5; do
        sleep 0.3
        local line
        line=$(taskset -c "${cpus%,*}" ucx_perftest -p "$port" 127.0.0.1 -t "$1" -s "$2" -n "$3" -w 100 -f 2>/dev/null | tail -1) && [[ -n $line ]] && break
    done
    wait "$server" || true
    awk -v c="$column" '{print $c}' <<<"$line"
}

# ours KEY SIZE: bandwidth in MB/s (2^20 bytes, as ucx_perftest counts), or latency in µs.
ours() {
    "$binary" bench links "$name" --from gpu0 --to gpu1 --size "$2" --rounds 9 --pin "$cpus" -o json |
        python3 -c "import json, sys
pair = json.load(sys.stdin)['pairs'][0]
print(pair['latency_us'] if '$1' == 'latency' else pair['gb_per_s'] * 1e9 / 2**20)"
}

status=0
# compare LABEL BOUND SIZE TEST ITERATIONS
compare() {
    local label=$1 bound=$2 size=$3 test=$4 iterations=$5 key=bandwidth ratios=()
    [[ $test == tag_lat ]] && key=latency
    for _ in $(seq "$turns"); do
        local theirs mine ratio
        theirs=$(perftest "$test" "$size" "$iterations")
        mine=$(ours "$key" "$size")
        ratio=$(awk -v a="$mine" -v b="$theirs" 'BEGIN {printf "%.3f", a / b}')
        printf '%-22s ours %10.2f   ucx_perftest %10.2f   ratio %s\n' "$label" "$mine" "$theirs" "$ratio"
        ratios+=("$ratio")
    done
    local median
    median=$(printf '%s\n' "${ratios[@]}" | sort -n | sed -n "$((turns / 2 + 1))p")
    local good
    good=$(awk -v m="$median" -v b="$bound" -v k="$key" \
        'BEGIN {print (k == "latency" ? m <= b : m >= b) ? "ok" : "MISSED"}')
    printf '%-22s median ratio %s, bound %s: %s\n\n' "$label" "$median" "$bound" "$good"
    [[ $good == ok ]] || status=1
}

for transport in sm tcp; do
    if [[ $transport == sm ]]; then export UCX_TLS=sm,self; else export UCX_TLS=tcp,self; fi
    export UCX_NET_DEVICES=lo
    [[ $transport == sm ]] && unset UCX_NET_DEVICES
    "$binary" up --topology dgx-h100 --simulate --n-workers 2 --name "$name" --detach >/dev/null
    compare "$transport 8 B latency" 1.5 8 tag_lat 20000
    compare "$transport 64 KiB" 0.95 65536 tag_bw 20000
    compare "$transport 1 MiB" 0.95 1048576 tag_bw 2000
    compare "$transport 64 MiB" 0.95 67108864 tag_bw 50
    finish
done
exit "$status"
