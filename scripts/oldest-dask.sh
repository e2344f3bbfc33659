#!/usr/bin/env bash
# Runs the Python package's tests with the oldest Dask that we claim (.venv-oldest), file by file:
# clusters, scale, adapt, verify, restarts, native://. Skipped is what needs distributed-ucxx or
# dask-cuda, which .venv-oldest lacks.
#
#   scripts/oldest-dask.sh            every file
#   scripts/oldest-dask.sh --short    what `cargo test` runs
#   PYTHON=…/bin/python               another Python, such as one with the newest Dask
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv-oldest/bin/python}
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
    pytest tests/python/test_work.py -k native
    pytest tests/python/test_comm.py -k cluster
    # Where there is no dask-cuda.
    pytest tests/python/test_as_dask_cuda.py -k without
else
    for file in tests/python/test_*.py; do
        pytest "$file"
    done
fi
exit "$status"
