"""What the history has of Dask's workers."""

from collections import deque
from pathlib import Path

import pytest
from conftest import QUIET, ROOT, RUNTIME, eventually
from cuda_cluster import program
from cuda_cluster.dask import LocalCUDACluster
from distributed import Client, wait

MOVED = 5_000_000


def made(size):
    return b"\0" * size


@pytest.mark.parametrize("protocol", ["direct", "tcp"])
def test_what_went_from_which_worker_to_which(protocol):
    asked = {} if protocol == "direct" else {"protocol": protocol}
    with LocalCUDACluster(**QUIET, **asked, n_workers=3) as cluster, Client(cluster) as client:
        assert cluster.scheduler_address.startswith(f"{protocol}://")
        client.wait_for_workers(3, timeout=120)

        def at(number):
            return {"workers": [cluster.workers[number].address], "pure": False}

        def moved():
            program.ask(["ps", cluster.name])
            pairs = program.ask(["history", cluster.name])["pairs"]
            return {(pair["from"], pair["to"]): pair["bytes"] for pair in pairs}

        data = client.submit(made, MOVED, **at(0))
        copies = [client.submit(len, data, **at(number)) for number in (1, 2)]
        assert client.gather(copies) == [MOVED, MOVED]
        again = client.submit(made, MOVED, **at(0))
        wait(again)
        assert client.submit(len, again, **at(2)).result() == MOVED

        file = Path(RUNTIME) / "cuda-cluster" / cluster.name / "history-pairs"
        # To be asked for their state has the workers answer.
        eventually(lambda: program.ask(["ps", cluster.name]) and file.exists(), "a first answer")

        # Dask sizes a result with what Python needs for it.
        def is_told():
            told = {pair: round(size / MOVED, 2) for pair, size in moved().items()}
            return told == {("gpu0", "gpu1"): 1, ("gpu0", "gpu2"): 2}

        eventually(is_told, moved, 120)


def test_transfers_count_once_though_dask_forgets_them(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "crates/cluster/src/python")
    from cuda_cluster_dask.received import MOST, Received

    received, log = Received(), deque(maxlen=3)
    for number in range(10):
        log.append({"who": f"tcp://a:{number % 2}", "total": 1})
        log.append({"who": "tcp://a:2", "total": 0})
        received.count(log)
        received.count(log)
    assert received.total == 10
    assert received.by_sender == {"tcp://a:0": 5, "tcp://a:1": 5}

    log = deque({"who": f"tcp://b:{number}", "total": 1} for number in range(5000))
    received.count(log)
    assert received.total == 5010 and len(received.by_sender) == MOST
    assert "tcp://b:4999" in received.by_sender and "tcp://a:0" not in received.by_sender
