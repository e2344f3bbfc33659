#!/usr/bin/env bash
# Runs the Python package's tests with another Dask, file by file: clusters, scale, adapt, verify,
# restarts, direct://. Skipped is what needs distributed-ucxx or dask-cuda, each release of which requires
# one Dask.
#
#   scripts/oldest-dask.sh            every file, with the oldest Dask that we claim (.venv-oldest)
#   scripts/oldest-dask.sh --short    what `cargo test` runs
#   DASK=2026.8.0 scripts/oldest-dask.sh    another version, or `newest`: installed into target/dask-VERSION
#   PYTHON=…/bin/python               another Python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv-oldest/bin/python}
if [ -n "${DASK:-}" ]; then
    python=target/dask-$DASK/bin/python
    [ "$DASK" = newest ] && wanted=(dask distributed) || wanted=("dask==$DASK" "distributed==$DASK")
    [ -x "$python" ] || python3 -m venv "target/dask-$DASK"
    # The other packages as for the usual Dask, but for those that require it.
    grep -Ev '^(#|dask|distributed|libucx|nvidia)' tests/python/requirements.txt |
        "$python" -m pip install --quiet --disable-pip-version-check --upgrade "${wanted[@]}" -r /dev/stdin
fi
[ -x "$python" ] || { echo "$python is not here: scripts/setup.sh --tests"; exit 2; }
"$python" -c 'import distributed; print("Dask", distributed.__version__)'

status=0
pytest() {
    echo "$*"
    "$python" -m pytest -q -rs -p no:cacheprovider --timeout 900 "$@" || status=1
}
if [ "${1:-}" = --short ]; then
    pytest tests/python/test_dask_surface.py
    pytest tests/python/test_cluster.py
    pytest tests/python/test_work.py -k direct
    pytest tests/python/test_kinds.py
    pytest tests/python/test_comm.py -k cluster
    # Where there is no dask-cuda.
    pytest tests/python/test_as_dask_cuda.py -k without
else
    for file in tests/python/test_*.py; do
        [ "$file" = tests/python/test_comm_device.py ] || pytest "$file"
    done
    # Device memory, on a made-up machine.
    scripts/made-up.sh 2 "$(realpath --no-symlinks "$python")" -m pytest -q -rs -p no:cacheprovider --timeout 900 \
        "$PWD/tests/python/test_comm_device.py" || status=1
fi
exit "$status"
