#!/usr/bin/env bash
# Runs distributed's own tests of its scheduler as they are, with tasks placed by wires that are all as Dask
# assumes, and by wires of which every second is ten times as fast as the others; says which fail with these alone.
# Ends with 1 if any. With the last, tests that say on which worker equal wires put a task are expected to fail
# (`tests/python/wires/distributed_by_wires.py` names them).
#
#   scripts/distributed-by-wires.sh REPOSITORY [ARGUMENTS OF pytest]
#
# REPOSITORY is a clone of dask/distributed that has the tag of the installed version: its tests are in no
# package. Without arguments: test_scheduler, test_steal, test_scheduler_bulk_operations, test_priorities,
# test_resources, test_active_memory_manager and test_failed_workers (ten minutes for all).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
repository=${1:?the path of a clone of dask/distributed}
shift
python=${PYTHON:-$here/.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONDONTWRITEBYTECODE=1
"$here/scripts/distributed-source.sh" "$repository" "$scratch"
cd "$scratch"
if [ $# -eq 0 ]; then
    for name in scheduler steal scheduler_bulk_operations priorities resources active_memory_manager failed_workers; do
        [ ! -e "distributed/tests/test_$name.py" ] || set -- "$@" "distributed/tests/test_$name.py"
    done
fi
# The names of those that failed, and the last line.
tests() {
    PYTHONPATH=$scratch:$here/crates/cluster/src/python:$here/tests/python/wires "$python" -m pytest -q --no-header \
        -rfE -p no:cacheprovider -o addopts="-p no:asyncio -p no:legacypath" --timeout 120 -o timeout_method=signal "$@" >"$scratch/said" || true
    tail -1 "$scratch/said" | grep ' passed' | sed 's/^/  /' >&2 || {
        echo "  the tests did not come to their end:" >&2
        tail -20 "$scratch/said" >&2
        return 1
    }
    sed -En 's/^(FAILED|ERROR) ([^[ ]+(\[.*\])?).*/\2/p' "$scratch/said" | sort -u
}
status=0
by_wires() {
    echo "$1:" >&2
    CUDA_CLUSTER_TEST_WIRES_ARE=$2 tests -p distributed_by_wires "${@:3}" >"$scratch/with"
    grep -q '[1-9][0-9]* schedulers placed by wires' "$scratch/said" || { echo "no scheduler placed by wires" >&2; exit 1; }
    comm -13 "$scratch/without" "$scratch/with" >"$scratch/more"
    echo "$1: $(wc -l <"$scratch/more") fail by wires alone"
    sed 's/^/  /' "$scratch/more"
    [ ! -s "$scratch/more" ] || status=1
}
echo "as they are:" >&2
tests "$@" >"$scratch/without"
by_wires "wires as Dask assumes" alike "$@"
by_wires "wires that differ" unlike "$@"
exit "$status"
