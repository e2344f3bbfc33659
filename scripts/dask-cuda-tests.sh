#!/usr/bin/env bash
# Runs dask-cuda's own tests, those of its released package, over our LocalCUDACluster, on a made-up
# machine of nine GPUs. Those that cannot pass are listed with their reasons
# (tests/python/dask_cuda_expected.py); anything else that fails, fails.
#
#   scripts/dask-cuda-tests.sh [--short] [ARGUMENTS OF pytest]
#
# PYTHON names a Python with the packages of tests/python/requirements.txt (default: that of .venv).
set -euo pipefail
export PYTHONDONTWRITEBYTECODE=1 DASK_CUDA_WAIT_WORKERS_MIN_TIMEOUT=${DASK_CUDA_WAIT_WORKERS_MIN_TIMEOUT:-60}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || "$here/setup.sh" --tests
tests=$("$python" -c 'import dask_cuda; print(dask_cuda.__path__[0])')/tests
exec "$here/made-up.sh" 9 \
    python -m cuda_cluster.as_dask_cuda -m pytest -p dask_cuda_expected -p no:cacheprovider \
    -q -rxs --timeout 300 "$tests" "$@"
