"""What deaths of workers and of the scheduler mean to those who use the cluster meanwhile."""

import time

import pytest
from conftest import QUIET
from cuda_cluster.dask import LocalCUDACluster
from distributed import Client
from distributed.scheduler import KilledWorker


def fill_memory():
    taken = []
    for _ in range(40):
        taken.append(bytearray(b"x" * 50_000_000))
        time.sleep(0.01)


def test_a_task_beyond_the_memory_limit_is_given_up_and_the_reason_names_memory():
    limits = {"n_workers": 1, "memory_limit": "500MB"}
    with LocalCUDACluster(**QUIET, **limits, protocol="tcp") as cluster, Client(cluster) as client:
        with pytest.raises(KilledWorker):
            client.submit(fill_memory).result(timeout=60)
        worker = cluster._attached.state().workers[0]
        reason = worker.json["last_exit"]["reason"]
        assert reason.startswith("reached 95 % of its memory limit of 500 MB ("), reason
