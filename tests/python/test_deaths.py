"""What deaths of workers and of the scheduler mean to those who use the cluster meanwhile."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import CancelledError

import dask
import pytest
from conftest import MACHINE, eventually
from cuda_cluster.dask import LocalCUDACluster
from distributed import Client, wait
from distributed.comm import get_address_host_port
from distributed.scheduler import KilledWorker
from known import workers_of

#: Every port is the system's choice.
ANYWHERE = {**MACHINE, "scheduler_port": 0, "dashboard_address": "127.0.0.1:0"}


HERE = os.path.dirname(__file__)
TEXT = {"capture_output": True, "text": True}


def records(cluster):
    with open(f"{cluster.run_directory}/events.jsonl") as lines:
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def without_scheduler(cluster):
    """Kills the scheduler, and afterwards waits for another one."""
    state = cluster._attached.state()
    restarts = state.scheduler.restarts
    os.kill(state.supervisor_pid, signal.SIGSTOP)
    try:
        os.kill(state.scheduler.pid, signal.SIGKILL)
        yield
    finally:
        os.kill(state.supervisor_pid, signal.SIGCONT)
    is_back = lambda state: state.state == "ready" and state.scheduler.restarts > restarts
    eventually(lambda: is_back(cluster._attached.state()), "another scheduler", 120)


def take(address):
    """Listens on a port as soon as nobody else does."""
    taken = []

    def is_free():
        with contextlib.suppress(OSError):
            taken.append(socket.create_server(get_address_host_port(address)))
        return taken

    eventually(is_free, f"{address} is free")
    return taken[0]


def fill_memory():
    taken = []
    for _ in range(40):
        taken.append(bytearray(b"x" * 50_000_000))
        time.sleep(0.01)


def test_a_task_beyond_the_memory_limit_is_given_up_and_the_reason_names_memory():
    limits = {"n_workers": 1, "memory_limit": "500MB"}
    with LocalCUDACluster(**ANYWHERE, **limits, protocol="tcp") as cluster, Client(cluster) as client:
        with pytest.raises(KilledWorker):
            client.submit(fill_memory).result(timeout=60)
        worker = cluster._attached.state().workers[0]
        reason = worker.json["last_exit"]["reason"]
        assert reason.startswith("reached 95 % of its memory limit of 500 MB ("), reason


TERMINATE = "distributed.worker.memory.terminate"


@contextlib.contextmanager
def configured(way, share, tmp_path, monkeypatch):
    """Has Dask end workers at a share of their memory; gives the keywords for that."""
    keywords = {"config": {TERMINATE: share}} if way == "keyword" else {}
    if way == "variable":
        monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE", str(share))
    if way == "file":
        text = f"distributed: {{worker: {{memory: {{terminate: {json.dumps(share)}}}}}}}\n"
        (tmp_path / "dask.yaml").write_text(text)
        monkeypatch.setenv("DASK_CONFIG", str(tmp_path))
    # A Python that is started with the variable has it, too.
    with dask.config.set({TERMINATE: share} if way in ("here", "variable") else {}):
        yield keywords


def hold(size):
    """Has so much memory for longer than the supervisor looks away."""
    taken = bytearray(b"x") * size
    time.sleep(1)
    return len(taken)


@pytest.mark.parametrize("way", ["keyword", "here", "variable", "file"])
def test_a_worker_is_ended_for_its_memory_when_dask_is_configured_to(way, tmp_path, monkeypatch):
    for share, size, lives in [(False, 500_000_000, True), (0.5, 240_000_000, False)]:
        with (
            configured(way, share, tmp_path, monkeypatch) as keywords,
            dask.config.set({"distributed.scheduler.allowed-failures": 0}),
            LocalCUDACluster(**ANYWHERE, **keywords, n_workers=1, memory_limit="400MB") as cluster,
            Client(cluster) as client,
        ):
            before = client.run(os.getpid)
            held = client.submit(hold, size, pure=False)
            if lives:
                assert held.result(timeout=60) == size
                assert client.run(os.getpid) == before
            else:
                with pytest.raises(KilledWorker):
                    held.result(timeout=60)
                assert "reached 50 % of its memory limit" in str(records(cluster))


def test_workers_that_die_of_tasks_are_back_without_delay():
    with LocalCUDACluster(**ANYWHERE, n_workers=2) as cluster, Client(cluster) as client:
        for future in client.map(lambda _: os._exit(1), range(3)):
            with pytest.raises(KilledWorker):
                future.result(timeout=120)
        waits = [record["in_ms"] for record in records(cluster) if record["event"] == "restarting"]
        assert len(waits) >= 4 and not any(waits), waits


class Unmovable:
    def __reduce__(self):
        raise TypeError("no pickle")


def test_a_worker_whose_data_cannot_be_moved_stays_and_scaling_goes_on(caplog):
    with LocalCUDACluster(**ANYWHERE, n_workers=2) as cluster, Client(cluster) as client:
        there = lambda: workers_of(client)
        last = next(at for at, one in there().items() if one["name"] == 1)
        held = client.submit(Unmovable, workers=[last])
        wait(held, timeout=60)
        cluster.scale(1)
        eventually(lambda: "keeps 1: " in caplog.text, "a warning", 120)
        cluster.scale(3)
        client.wait_for_workers(3, timeout=60)
        assert there()[last]["status"] == "running"
        # It works, and its data are there.
        assert client.submit(lambda one: type(one).__name__, held).result(timeout=60) == "Unmovable"


def test_a_worker_that_is_wanted_again_while_it_is_retired_is_there_afterwards():
    with LocalCUDACluster(**ANYWHERE, n_workers=2) as cluster, Client(cluster) as client:
        there = lambda: workers_of(client)
        last = next(at for at, one in there().items() if one["name"] == 1)
        held = client.submit(Unmovable, workers=[last])
        wait(held, timeout=60)
        # As `adapt` does that is stopped meanwhile.
        retire = lambda dask_scheduler: dask_scheduler._ongoing_background_tasks.call_soon(
            dask_scheduler.retire_workers, names=[1], close_workers=True, remove=True
        )
        client.run_on_scheduler(retire)
        eventually(lambda: there()[last]["status"] == "closing_gracefully", "it is being retired")
        cluster.scale(2)
        del held
        eventually(lambda: last not in there(), "the former one is gone")
        client.wait_for_workers(2, timeout=60)
        assert sorted(one["name"] for one in there().values()) == [0, 1]


def end_worker(number):
    os.kill(os.getpid(), number)
    time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_task_whose_worker_others_signal_is_suspected_and_the_worker_hands_over_its_data(number):
    with LocalCUDACluster(**ANYWHERE, n_workers=2) as cluster, Client(cluster) as client:
        one, _ = workers = list(workers_of(client))
        [data] = client.scatter([list(range(1000))], workers=[one], hash=False)
        client.run(os.kill, client.run(os.getpid, workers=[one])[one], number, workers=[one])
        eventually(lambda: one not in workers_of(client), "it is gone")
        assert data.result(timeout=60) == list(range(1000))
        client.wait_for_workers(len(workers), timeout=60)
        with pytest.raises(KilledWorker):
            client.submit(end_worker, number).result(timeout=120)
        reason = f"was ended by signal {number:d}"
        assert reason in str(records(cluster)), records(cluster)


@pytest.mark.parametrize("protocol", ["direct", "tcp", "ucxx"])
def test_a_scheduler_that_dies_is_back_where_it_was_and_so_are_its_clients(protocol):
    if protocol == "ucxx":
        pytest.importorskip("distributed_ucxx")
    # In a Python of its own: what UCX has begun goes on in its process, and knows of the connections that ended.
    call = f"import test_deaths; test_deaths.scheduler_dies({protocol!r})"
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", call], cwd=HERE, timeout=300, **TEXT)
    assert done.returncode == 0, done.stderr + done.stdout


def scheduler_dies(protocol):
    asked = {**ANYWHERE, "n_workers": 1, "protocol": protocol}
    with LocalCUDACluster(**asked) as cluster, Client(cluster) as client:
        before = cluster.scheduler_address, cluster.dashboard_link
        [data] = client.scatter([list(range(1000))], hash=False)
        with without_scheduler(cluster):
            pass
        assert (cluster.scheduler_address, cluster.dashboard_link) == before
        eventually(lambda: len(cluster.scheduler_info["workers"]) == 1, "the class follows")
        with Client(cluster) as another:
            assert another.submit(sum, [1, 2]).result(timeout=60) == 3
        with pytest.raises(CancelledError):
            data.result(timeout=60)
        client.wait_for_workers(1, timeout=60)
        assert client.submit(sum, [3, 4]).result(timeout=60) == 7
        assert any("scattered data" in record.get("text", "") for record in records(cluster))


def test_who_asks_for_a_scheduler_whose_port_was_taken_is_told_the_new_one():
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCUDACluster(**ANYWHERE, n_workers=1, protocol="tcp"))
        found = LocalCUDACluster.from_name(cluster.name)
        connected = [stack.enter_context(Client(one)) for one in (cluster, found)]
        before = cluster.scheduler_address
        with without_scheduler(cluster):
            taken = take(before)
        with taken:
            now = cluster._attached.env()["DASK_SCHEDULER_ADDRESS"]
            assert now != before
            with open(f"{cluster.run_directory}/scheduler.json") as file:
                assert json.load(file)["address"] == now
            eventually(lambda: cluster.scheduler_address == now, "the class follows")
            eventually(lambda: found.scheduler_address == now, "whoever found it follows")
            held = f"port {get_address_host_port(before)[1]} is held by "
            assert any(held in record.get("text", "") for record in records(cluster))
            with Client(cluster) as client, Client(found) as other:
                assert client.submit(sum, [1, 2]).result(timeout=60) == 3
                assert other.submit(sum, [3, 4]).result(timeout=60) == 7
            for client in connected:
                eventually(lambda: client.status == "running", "a client that was there moves")
                assert client.scheduler.address == now
                assert client.submit(sum, [5, 6]).result(timeout=60) == 11
        found.close()
