"""direct:// over several hosts, which are networks of this machine: right bytes, a link that is lost,
and strangers who do not know the secret."""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import MACHINE, eventually
from cuda_cluster.dask import LocalCUDACluster
from distributed import Client, wait
from hosts import another_host, needs_network
from known import workers_of

pytestmark = [needs_network, pytest.mark.usefixtures("nothing_is_left")]

SEED = int(os.environ.get("CHAOS_SEED", "1"))
FAULTS = int(os.environ.get("CHAOS_FAULTS", "3"))
SIZES = [1_000, 300_000, 8_000_000]


@contextlib.contextmanager
def cluster_of_two_hosts(timeout="30s"):
    """A scheduler and a worker here, how to start a worker there, and the host."""
    with (
        another_host() as host,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP", timeout)
        patch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "1000")
        with (
            LocalCUDACluster(
                protocol="direct",
                host=host.here,
                n_workers=1,
                memory_limit="1 GB",
                device_memory_limit=None,
                dashboard_address=None,
                **MACHINE,
            ) as cluster,
            Client(cluster) as client,
        ):
            yield host, cluster, client


@contextlib.contextmanager
def worker_there(host, cluster, secret=True):
    """Dask's own command, which knows the secret as the guide says."""
    told = cluster._attached.env() if secret else {}
    key = "DASK_DISTRIBUTED__COMM__DIRECT__SECRET_FILE"
    assert key in told or not secret
    command = host.command(
        sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address,
        "--host", host.there, "--name", "far", "--no-dashboard", "--memory-limit", "1GB",
        "--death-timeout", "30",
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.update({key: told[key]} if secret else {})
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout))
    reader.start()
    try:
        yield process, said
    finally:
        process.terminate()
        process.wait(60)
        reader.join()
        process.stdout.close()


def array(seed, size):
    return np.random.default_rng(seed).integers(0, 255, size, dtype="u1")


def reversed_bytes(data):
    return data[::-1].copy()


def crosswise(client, chance, where):
    """Each array is made on one of the workers and looked at on another, if both are there."""
    futures, expected = [], []
    for at in range(6):
        seed, size = chance.randrange(1 << 30), chance.choice(SIZES)
        placed = [
            dict(workers=[where[(at + by) % 2]], allow_other_workers=True, pure=False, retries=20)
            for by in (0, 1)
        ]
        made = client.submit(array, seed, size, **placed[0])
        futures.append(client.submit(reversed_bytes, made, **placed[1]))
        expected.append(reversed_bytes(array(seed, size)))
    return futures, expected


def right(client, futures, expected):
    wait(futures, timeout=300)
    assert all(map(np.array_equal, client.gather(futures), expected)), "wrong bytes"


def workers(client):
    return {worker["host"]: address for address, worker in workers_of(client).items()}


def test_arrays_arrive_and_a_link_that_fails_for_a_moment_is_not_noticed():
    chance = random.Random(SEED)
    with cluster_of_two_hosts() as (host, cluster, client), worker_there(host, cluster):
        client.wait_for_workers(2, timeout=120)
        there = workers(client)
        assert set(there) == {host.here, host.there}, there
        where = list(there.values())
        for _ in range(FAULTS):
            work = crosswise(client, chance, where)
            time.sleep(chance.random() / 10)
            host.set("down")
            time.sleep(chance.random() * 1.5)
            host.set("up")
            right(client, *work)
            assert workers(client) == there
        received = client.run(lambda: __import__("cuda_cluster.comm").comm.received())
        print(f"\ndirect: seed {SEED}: {FAULTS} faults: the link failed for a moment: {received}")
        assert all(one["socket"] > 0 and not one["copied"] for one in received.values()), received


def test_work_ends_right_when_the_link_is_lost_and_another_worker_there_may_join_later():
    chance = random.Random(SEED)
    with cluster_of_two_hosts("3s") as (host, cluster, client):
        with worker_there(host, cluster) as (process, said):
            client.wait_for_workers(2, timeout=120)
            work = crosswise(client, chance, list(workers(client).values()))
            host.set("down")
            right(client, *work)
            eventually(lambda: set(workers(client)) == {host.here}, "the other is gone")
            host.set("up")
            # It comes back, or it has ended: Dask's workers do when they lose their scheduler.
            ended = lambda: process.poll() is not None or host.there in workers(client)
            eventually(ended, "who lost the scheduler knows", 120)
        with worker_there(host, cluster):
            client.wait_for_workers(2, timeout=120)
            right(client, *crosswise(client, chance, list(workers(client).values())))


def test_who_does_not_know_the_secret_is_not_let_in_from_another_host():
    with cluster_of_two_hosts() as (host, cluster, client):
        with worker_there(host, cluster, secret=False) as (process, said):
            eventually(lambda: any("secret" in line for line in said), "it is told why", 120)
            assert set(workers(client)) == {host.here}
            right(client, *crosswise(client, random.Random(SEED), list(workers(client).values()) * 2))
