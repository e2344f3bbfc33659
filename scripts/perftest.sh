# shellcheck shell=bash
# To be sourced: figures of `ucx_perftest` between the two CPUs that $cpus names.

: "${cpus:?two of them, with a comma between}"

# The variables that our workers set for themselves, for the same protocols on all sides.
export UCX_POSIX_ERROR_HANDLING=y UCX_CMA_MEMORY_INVALIDATE=y
export UCX_CMA_TX_QUOTA=4 UCX_WARN_UNUSED_ENV_VARS=n

# A line of ucx_perftest's figures; UCX's own log lies between them on standard output.
figures='^ *[0-9]+( +[0-9.]+)+$'

# perftest TEST SIZE ITERATIONS: bandwidth in MiB/s, or latency in µs; the mean of all messages.
# Nothing if there is no figure.
perftest() {
    local port=$((20000 + RANDOM % 20000)) column=6 line=
    [[ $1 != *_lat ]] || column=4
    taskset -c "${cpus#*,}" ucx_perftest -p "$port" >/dev/null 2>&1 &
    local server=$!
    for _ in 1 2 3 4 5; do
        sleep 0.3
        line=$(taskset -c "${cpus%,*}" ucx_perftest -p "$port" 127.0.0.1 -t "$1" -s "$2" -n "$3" -e \
            -w $(($3 / 5 + 1)) -f 2>/dev/null | grep -E "$figures" | tail -1) && break
    done
    wait "$server" || true
    awk -v c="$column" '{print $c}' <<<"$line"
}
