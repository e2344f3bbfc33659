"""The workloads of `examples/dask` at a small size: each result is that of the same work without Dask."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from conftest import QUIET, ROOT, others
from distributed import Client

from cuda_cluster.dask import LocalCUDACluster

EXAMPLES = ROOT / "examples/dask"
#: Each small enough for seconds, and large enough for every worker to have something.
SCALES = {
    "svd": 0.001, "transpose": 0.003, "merge": 0.004, "groupby": 0.002, "rechunk": 0.003, "boosting": 0.002,
    "grid_search": 0.002, "taxi": 0.002, "futures": 0.02,
}  # fmt: skip

sys.path.insert(0, str(EXAMPLES))


def workload(name):
    module = importlib.import_module(name)
    # Workers have no examples.
    cloudpickle.register_pickle_by_value(module)
    return module.WORKLOAD


def test_results_are_right_where_memory_is_smaller_than_the_data():
    work, scale = workload("transpose"), 0.08
    with LocalCUDACluster(n_workers=2, memory_limit="500MB", **QUIET) as cluster, Client(cluster) as client:
        processes = sorted(client.run(os.getpid).values())
        data = work.make(client, scale)
        on_disk = sum(client.run(lambda dask_worker: _bytes_below(dask_worker.local_directory)).values())
        assert on_disk > 100e6, "1,024 MB are more than both workers may have"
        work.check(work.run(client, data), work.expected(scale))
        assert sorted(client.run(os.getpid).values()) == processes, "no worker was restarted"
    assert others() == []


def _bytes_below(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def test_an_example_is_a_program():
    command = [sys.executable, str(EXAMPLES / "futures.py"), "--simulate", "--scale", "0.02"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "and the result is right" in done.stderr, done.stderr
    assert others() == []


@pytest.fixture(scope="module")
def client():
    with LocalCUDACluster(n_workers=2, **QUIET) as cluster, Client(cluster) as client:
        yield client
    assert others() == []


def test_each_example_is_tried():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCALES, "workload"}


@pytest.mark.parametrize("name", SCALES)
def test_its_result_is_right(client, name):
    work, scale = workload(name), SCALES[name]
    found = work.run(client, work.make(client, scale))
    work.check(found, work.expected(scale))
    # A check that takes everything for right would be none.
    with pytest.raises(AssertionError):
        work.check(np.asarray(found) * 1.1, work.expected(scale))
