#!/usr/bin/env bash
# Runs distributed's own tests over direct://. Their addresses are rewritten from tcp:// to direct://;
# what is about TCP itself then fails, and is listed with its reason in
# tests/python/distributed_expected.py. Anything else that fails, fails.
#
#   scripts/distributed-tests.sh REPOSITORY [ARGUMENTS OF pytest]
#
# REPOSITORY is a clone of dask/distributed that has the tag of the installed version: its tests are
# in no package. Without arguments: test_comms, test_core, test_failed_workers and test_stress, which
# take some minutes; distributed/tests/test_client.py, test_worker.py, test_scheduler.py and
# distributed/shuffle/tests take half an hour. PYTHON names a Python with the packages of
# tests/python/requirements.txt (default: that of .venv).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
repository=${1:?the path of a clone of dask/distributed}
shift
python=${PYTHON:-$here/.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONDONTWRITEBYTECODE=1 DASK_DISTRIBUTED__COMM__DEFAULT_SCHEME=direct

"$python" "$here/scripts/source_tree.py"
"$here/scripts/distributed-source.sh" "$repository" "$scratch"
cd "$scratch"
mapfile -t tests < <(find distributed -path '*/tests/*.py')
sed -i 's#tcp://#direct://#g; s#setitem(backends, "tcp"#setitem(backends, "direct"#
    s#import distributed.comm.tcp as tcp#import cuda_cluster_as_tcp as tcp#
    /setitem(backends, "tls", tcp\.TLS/d
    s#from distributed.comm.tcp import TCP#from cuda_cluster_as_tcp import TCP#' "${tests[@]}"
# Bare addresses are TCP's, and helpers of the tests look for its class and its memory.
sed -i 's#addr = f"tcp://{addr}"#addr = f"direct://{addr}"#' distributed/comm/core.py
sed -i 's#isinstance(comm, TCP)#comm#' distributed/utils_test.py
sed -i 's#elif isinstance(o, (bytes, bytearray)):#elif isinstance(o, (bytes, bytearray)) or "_comm" in type(o).__module__:#' \
    distributed/protocol/utils_test.py
cat >cuda_cluster_as_tcp.py <<'END'
from cuda_cluster.comm import Direct as TCP  # noqa: F401
from cuda_cluster.comm import DirectBackend as TCPBackend  # noqa: F401
from cuda_cluster.comm import DirectConnector as TCPConnector  # noqa: F401
from cuda_cluster.comm import DirectListener as TCPListener  # noqa: F401
END
if [ $# -eq 0 ]; then
    set -- distributed/comm/tests/test_comms.py -k "not tls and not inproc" \
        distributed/tests/test_core.py distributed/tests/test_failed_workers.py \
        distributed/tests/test_stress.py
fi
PYTHONPATH=$scratch:$here/python:$here/tests/python "$python" -m pytest -q --no-header -rfEx \
    -p no:cacheprovider -p distributed_expected -o addopts="-p no:asyncio -p no:legacypath" \
    --timeout 120 "$@"
