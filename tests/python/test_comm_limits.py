"""direct://, Dask's memory limits: workers that hold more than they need would be paused, or ended."""

import asyncio
import gc
import os
import time

import dask
import numpy as np
import psutil
import pytest
from conftest import MACHINE, ROOT
from distributed import Client, LocalCluster, Scheduler, Worker
from known import workers_of
from test_comm import comm, in_a_loop, pair, travelling
from test_comm_memory import moved, until

MB = 1_000_000
SIZE = 20 * MB
LIMIT = 500 * MB


def crosswise(client, factor):
    """Every second array is made on one of two workers and looked at on the other."""
    workers = sorted(workers_of(client))
    processes = client.run(os.getpid)

    def array(seed):
        return np.full(SIZE, seed, dtype="u1")

    def look(array, seed):
        from cuda_cluster.comm import metrics

        held = metrics(None)
        return bool((array == seed).all()), max(held[of] for of in ("kept", "shared", "written"))

    arrays, looks = [], []
    for seed in range(int(factor * LIMIT / SIZE)):
        here, there = (dict(workers=[workers[(seed + at) % 2]], pure=False) for at in (0, 1))
        arrays.append(client.submit(array, seed, **here))
        looks.append(client.submit(look, arrays[-1], seed, **there))
    right, most = zip(*(look.result(timeout=300) for look in looks), strict=True)
    assert all(right)
    assert client.run(os.getpid) == processes, "a worker was ended"
    return max(most)


@pytest.mark.parametrize("factor", [0.5, 1, 2])
@pytest.mark.parametrize("protocol", ["direct", "tcp"])
def test_workers_with_little_memory_move_as_much_and_more_and_none_is_ended(protocol, factor, tmp_path):
    with (
        LocalCluster(
            protocol=protocol,
            n_workers=2,
            threads_per_worker=1,
            memory_limit=LIMIT,
            dashboard_address=None,
            local_directory=str(tmp_path),
        ) as cluster,
        Client(cluster) as client,
    ):
        assert crosswise(client, factor) <= LIMIT // 8


def test_a_cluster_of_ours_with_little_memory_does_so_too(tmp_path, nothing_is_left):
    from cuda_cluster.dask import LocalCUDACluster

    with (
        LocalCUDACluster(
            n_workers=2,
            protocol="direct",
            memory_limit=LIMIT,
            device_memory_limit=None,
            dashboard_address=None,
            local_directory=str(tmp_path),
            **MACHINE,
        ) as cluster,
        Client(cluster) as client,
    ):
        assert crosswise(client, 2) <= LIMIT // 8


@pytest.mark.parametrize("device_memory_limit", ["default", None], ids=["dask-cuda's", "dask's"])
@pytest.mark.parametrize("protocol", ["direct", "tcp"])
def test_a_cluster_of_ours_that_must_spill_most_of_its_data_finishes_and_no_worker_is_ended(
    protocol, device_memory_limit, tmp_path, nothing_is_left
):
    """16 arrays of 32 MiB, each of which is needed twice, on two workers of 256 MB: with what a
    process has of its own, there is room for the two of a task, one that comes and one that goes."""
    from cuda_cluster.dask import LocalCUDACluster

    count, length = 16, 4 << 20
    with (
        LocalCUDACluster(
            n_workers=2,
            protocol=protocol,
            memory_limit="256MB",
            dashboard_address=None,
            device_memory_limit=device_memory_limit,
            local_directory=str(tmp_path),
            **MACHINE,
        ) as cluster,
        Client(cluster) as client,
    ):
        processes = client.run(os.getpid)
        arrays = client.map(lambda seed: np.full(length, seed, dtype="f8"), range(count), pure=False)
        sums = client.map(
            lambda one, other: float(one[0] + other[-1] + one.sum()), arrays, arrays[::-1], pure=False
        )
        assert client.gather(sums) == [count - 1 + seed * length for seed in range(count)]
        assert client.run(os.getpid) == processes, "a worker was ended"


async def while_used(ours, theirs, data, holds):
    """Moves data until something holds soon afterwards: what is idle goes after ten seconds anyway."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        await moved(ours, theirs, data)
        gc.collect()
        # Time to come back, and to be looked at.
        await asyncio.sleep(0.5)
        if holds():
            return
    raise AssertionError((comm._comm.shared_memory(), comm._comm.kept_memory()))


@pytest.mark.parametrize("route", ["copied", "mapped"])
@in_a_loop
async def test_the_limit_of_a_worker_is_heeded_as_it_is_now(route, monkeypatch):
    """Whatever the worker was started with: a limit, "auto" or none."""
    metrics = comm._comm
    has, plenty = psutil.Process().memory_info().rss, 1 << 40
    data = np.ones(4 * MB, dtype="u1")

    async def holds(anything):
        """Whether something is held after messages have come."""
        async with pair() as (ours, theirs):
            held = lambda: metrics.kept_memory() + metrics.shared_memory()[1]
            await while_used(ours, theirs, data, lambda: (held() > 0) == anything)

    async with Scheduler(protocol="direct", host="127.0.0.1", port=0, dashboard=False) as scheduler:
        for given, limited in [(has // 2, True), ("auto", False), (0, False), (has, True)]:
            with travelling(route, monkeypatch):
                async with Worker(scheduler.address, nthreads=1, memory_limit=given) as worker:
                    await holds(not limited)
                    for now, limited in [(plenty, False), (has // 2, True), (None, False)]:
                        worker.memory_manager.memory_limit = now
                        await until(lambda: comm._limits._told == comm._limits._bounds())
                        await holds(not limited)
    # A worker that is closed limits nobody.
    await holds(True)


@in_a_loop
async def test_what_is_held_goes_before_dask_acts():
    """A worker's own data grow, without any message."""
    async with Scheduler(protocol="direct", host="127.0.0.1", port=0, dashboard=False) as scheduler:
        limit = 2 * psutil.Process().memory_info().rss + 400 * MB
        async with Worker(scheduler.address, nthreads=1, memory_limit=limit) as worker:
            async with pair() as (ours, theirs):
                data = np.ones(20 * MB, dtype="u1")
                await while_used(ours, theirs, data, lambda: comm._comm.kept_memory() >= 20 * MB)
                own = []
                while psutil.Process().memory_info().rss < limit * dask.config.get(
                    "distributed.worker.memory.target"
                ):
                    own.append(np.ones(MB, dtype="u1"))
                await while_used(ours, theirs, data, lambda: comm._comm.kept_memory() == 0)
                assert worker.status.name == "running" and own


def test_results_that_a_full_disk_does_not_take_stay_in_memory_and_that_is_told_once(
    tmp_path, caplog, monkeypatch
):
    host_file = pytest.importorskip("dask_cuda.device_host_file", reason="no dask-cuda").DeviceHostFile
    monkeypatch.syspath_prepend(str(ROOT / "crates/cluster/src/python"))
    from cuda_cluster_dask import storage

    class Full(dict):
        def __setitem__(self, key, value):
            raise OSError(28, "No space left on device")

    data = storage.within_limit(host_file)(
        worker_local_directory=str(tmp_path), device_memory_limit=MB, memory_limit=1000
    )
    data.host_buffer.slow = Full()
    for number in range(5):
        data[number] = bytes([number]) * 600
    assert [data[number] for number in range(5)] == [bytes([number]) * 600 for number in range(5)]
    told = [record.getMessage() for record in caplog.records if "can't be written" in record.message]
    assert len(told) == 1 and "No space left" in told[0] and "hint: --local-directory" in told[0]


def test_a_new_worker_has_memory_for_its_first_messages_within_its_limit(tmp_path):
    def held():
        from cuda_cluster.comm import metrics

        return metrics(None)["kept"]

    def threads():
        tasks = os.listdir("/proc/self/task")
        return [open(f"/proc/self/task/{task}/comm").read() for task in tasks]

    with (
        LocalCluster(
            protocol="direct",
            n_workers=2,
            threads_per_worker=1,
            memory_limit=LIMIT,
            dashboard_address=None,
            local_directory=str(tmp_path),
        ) as cluster,
        Client(cluster) as client,
    ):
        deadline = time.monotonic() + 60
        while any("direct memory\n" in one for one in client.run(threads).values()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        before = client.run(held)
        assert all(0 < kept <= LIMIT // 16 for kept in before.values()), before
        # The first message takes of it, and gives it back.
        one, other = sorted(workers_of(client))
        array = client.submit(np.ones, 4 * MB, "u1", workers=[one], pure=False)
        assert client.submit(np.sum, array, workers=[other], pure=False).result(60) == 4 * MB
        assert all(kept <= LIMIT // 8 for kept in client.run(held).values())


def test_a_worker_touches_no_more_than_the_machine_can_spare(monkeypatch):
    from cuda_cluster import _beforehand

    kept = 512 << 20
    monkeypatch.setattr(_beforehand, "CPU_COUNT", 64)
    monkeypatch.setattr(_beforehand.psutil, "virtual_memory", lambda: type("", (), {"available": 64 << 30}))
    assert _beforehand.touched(kept) == kept // 2
    monkeypatch.setattr(_beforehand, "CPU_COUNT", 1)
    assert _beforehand.touched(kept) == 128 << 20
    monkeypatch.setattr(_beforehand.psutil, "virtual_memory", lambda: type("", (), {"available": 1 << 30}))
    assert _beforehand.touched(kept) == 16 << 20


@pytest.mark.parametrize("processes", [True, False])
def test_a_new_worker_prepares_python_for_arrays_and_its_own_process_for_long_messages(processes):
    def prepared():
        import gc
        import sys

        return "distributed.protocol.numpy" in sys.modules, gc.get_freeze_count() > 10_000

    assert gc.get_freeze_count() == 0
    with LocalCluster(
        protocol="direct", n_workers=2, threads_per_worker=1, processes=processes, dashboard_address=None
    ) as cluster, Client(cluster) as client:  # fmt: skip
        deadline = time.monotonic() + 60
        while set(client.run(prepared).values()) != {(True, processes)}:
            assert time.monotonic() < deadline, client.run(prepared)
            time.sleep(0.1)
    assert gc.get_freeze_count() == 0, "this process is no worker's own"


@pytest.mark.parametrize(
    ("host", "asked", "at_once"),
    [
        ("127.0.0.1", None, 300_000_000),
        ("127.0.0.1", "20MB", 20_000_000),
        # Others may be far away.
        ("0.0.0.0", None, 50_000_000),
    ],
)
def test_a_worker_asks_for_more_at_once_where_all_are_near(host, asked, at_once):
    async def limit():
        async with Scheduler(protocol="direct", host=host, port=0, dashboard_address=None) as scheduler:
            async with Worker(scheduler.address, host=host, protocol="direct") as worker:
                return worker.state.transfer_message_bytes_limit

    with dask.config.set({"distributed.worker.transfer.message-bytes-limit": asked or "50MB"}):
        assert asyncio.run(limit()) == at_once
