#!/usr/bin/env bash
# What the page costs: CPU time of the supervisor and of the dashboard, in percent of one core, with
# eight workers and no, one and three viewers (curl, which reads what a page reads); and how long the page keeps a
# browser from answering with 1 GiB of logs (bench_page.py), which is to be less than 100 ms: of one process, and of 72
# beside as many workers that run a million tasks.
#
#   scripts/bench-page.sh [SECONDS] [MIB] [TASKS]     CUDA_CLUSTER names the program; 30 seconds for each by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:-30}
program=${CUDA_CLUSTER:-target/release/cuda-cluster}
[ -x "$program" ] || { echo "$program is missing; build it with: cargo build --release --locked" >&2; exit 2; }
scratch=$(mktemp -d)
export XDG_RUNTIME_DIR=$scratch
viewers=()
dashboard=
end() {
    for viewer in "${viewers[@]}"; do kill "$viewer" 2>/dev/null || true; done
    [ -z "$dashboard" ] || kill "$dashboard" 2>/dev/null || true
    for name in page many; do "$program" down "$name" 2>/dev/null || true; done
    rm -rf "$scratch"
}
trap end EXIT

"$program" up --topology dgx-h100 --simulate --name page --detach >/dev/null 2>&1
"$program" dashboard --no-browser --token-file "$scratch/token" >"$scratch/link" 2>/dev/null &
dashboard=$!
while [ ! -s "$scratch/link" ]; do sleep 0.1; done
base=$(sed 's|/?token.*||' "$scratch/link")
supervisor=$("$program" ps page -o json | sed -n 's/.*"supervisor_pid": \([0-9]*\).*/\1/p')

# CPU time of a process in milliseconds (clock ticks are 10 ms).
used() { awk '{ print ($14 + $15) * 10 }' "/proc/$1/stat"; }

measure() {
    sleep 3
    local before_s before_d after_s after_d
    before_s=$(used "$supervisor") before_d=$(used "$dashboard")
    sleep "$seconds"
    after_s=$(used "$supervisor") after_d=$(used "$dashboard")
    awk -v what="$1" -v s=$((after_s - before_s)) -v d=$((after_d - before_d)) -v t="$seconds" \
        'BEGIN { printf "%-12s supervisor %.2f %%, dashboard %.2f %%\n", what, s / t / 10, d / t / 10 }'
}

measure "no viewer"
for count in 1 2 3; do
    curl --silent --no-buffer --header "Authorization: Bearer $(cat "$scratch/token")" \
        "$base/api/clusters/page/live" >/dev/null &
    viewers+=($!)
    [ "$count" = 2 ] || measure "$count viewer(s)"
done

for viewer in "${viewers[@]}"; do kill "$viewer" 2>/dev/null || true; done
viewers=()
if command -v chromedriver >/dev/null; then
    mib=${2:-1024} link=$(cat "$scratch/link") failed=0
    echo "8 workers, logs of one process:"
    python3 scripts/bench_page.py "$link" "$scratch/cuda-cluster/page/logs" "$mib" || failed=1
    "$program" down page >/dev/null 2>&1
    "$program" up --topology dgx-h100 --simulate --workers-per-gpu 9 --name many --detach >/dev/null 2>&1
    echo "72 workers, logs of 72 processes:"
    python3 scripts/bench_page.py "$link&cluster=many" "$scratch/cuda-cluster/many/logs" "$mib" \
        "$program" many 72 "${3:-1000000}" || failed=1
    exit "$failed"
else
    echo "skipped: the logs in a browser; there is no chromedriver (scripts/setup.sh --tests)" >&2
fi
