#!/usr/bin/env bash
# Runs distributed-ucxx's own tests, those of its released package, over direct://: their scheme is
# replaced, and the fixture that looks after UCX's context is left out. Those that cannot pass are
# listed with their reasons (tests/python/distributed_ucxx_expected.py); anything else that fails,
# fails. Takes a minute.
#
#   scripts/distributed-ucxx-tests.sh [--ucxx] [TESTS AND OTHER ARGUMENTS OF pytest]
#
# --ucxx runs them as they are, over UCX, to compare. PYTHON names a Python with the packages of
# tests/python/requirements.txt (default: that of .venv).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
direct=1
if [ "${1:-}" = --ucxx ]; then direct=; shift; fi
python=${PYTHON:-$here/.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONDONTWRITEBYTECODE=1

installed=$("$python" -c 'import distributed_ucxx; print(distributed_ucxx.__path__[0])')
cp -r "$installed/tests" "$scratch/ucxx_tests"
# The configuration of distributed-ucxx, which one test looks for beside the tests.
cp "$installed"/*.yaml "$scratch"
cd "$scratch"
expected=()
if [ -n "$direct" ]; then
    expected=(-p distributed_ucxx_expected)
    sed -i -E 's#"(ucxx?|tcp)://#"direct://#g; s#f"ucxx?://#f"direct://#g
        s#\["ucx", "ucxx"\]#["direct"]#; s#(scheme ==|protocol=|get_backend\() ?"ucx"#\1 "direct"#
        s#ucxx\.get_address\(\)#"127.0.0.1"#; /^import ucxx$/d
        s#\bucxx_loop, ##; s#\(ucxx_loop\)#()#; /^ +ucxx_loop,$/d
        s#^import distributed_ucxx .*#import cuda_cluster_as_ucxx as distributed_ucxx#
        s#^from distributed_ucxx.ucxx import UCXXListener#from cuda_cluster_as_ucxx import UCXXListener#
        s#^from distributed_ucxx.utils_test import#from cuda_cluster_as_ucxx import#' ucxx_tests/*.py
    if grep -nE '"ucxx?:|(=|\[) ?"ucx|ucxx_loop' ucxx_tests/*.py; then
        echo "these lines still name UCX; hint: the tests are of another version" >&2
        exit 2
    fi
    cat >cuda_cluster_as_ucxx.py <<'END_OF_MODULE'
"""What distributed-ucxx's tests import of it, from direct://."""
from cuda_cluster.comm import DirectBackend as UCXXBackend  # noqa: F401
from cuda_cluster.comm import DirectListener as UCXXListener  # noqa: F401
from distributed.utils_test import check_thread_leak, cleanup, loop, loop_in_thread  # noqa: F401
from distributed.utils_test import gen_test as _gen_test


def gen_test(timeout=None):
    # A busy machine may take its time.
    return _gen_test(timeout=600, clean_kwargs={"threads": False})
END_OF_MODULE
fi
[ $# -gt 0 ] || set -- ucxx_tests
PYTHONPATH=$scratch:$here/python:$here/tests/python "$python" -m pytest -q --no-header -rfExs \
    -p no:cacheprovider "${expected[@]}" -o addopts="-p no:asyncio -p no:legacypath" \
    -o markers="slow\nignore_alive_references" --runslow --timeout 700 "$@"
