"""What users do over the class: the same results as without a cluster, and what Dask promises."""

import os
import time

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from conftest import MACHINE, eventually
from cuda_cluster.dask import LocalCUDACluster
from distributed import Client, Event, Lock, Queue, Variable, Worker, as_completed, performance_report, wait
from distributed.diagnostics.plugin import NannyPlugin, WorkerPlugin


@pytest.fixture(scope="module", params=["direct", "tcp", "tls"])
def cluster(request):
    kwargs = {**MACHINE, "n_workers": 3, "dashboard_address": ":0", "security": request.param == "tls"}
    if request.param == "tcp":
        kwargs["protocol"] = "tcp"  # Not the default where direct:// is.
    with LocalCUDACluster(**kwargs) as cluster:
        assert cluster.scheduler_address.startswith(f"{request.param}://")
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster) as client:
        yield client


@pytest.fixture(autouse=True)
def all_workers(client):
    client.wait_for_workers(3, timeout=120)


def test_arrays(client):
    plain = np.random.default_rng(7).random((600, 600))
    x = da.from_array(plain, chunks=(200, 200))
    np.testing.assert_allclose((x @ x.T).sum().compute(), (plain @ plain.T).sum())
    y = x.rechunk((100, 600)).persist()
    wait(y)
    np.testing.assert_array_equal(y.compute(), plain)


@pytest.mark.parametrize("method", ["tasks", "p2p"])
def test_dataframes_by(client, method):
    pytest.importorskip("pyarrow")
    state = np.random.default_rng(7)
    left = pd.DataFrame({"key": state.integers(0, 99, 2000), "a": state.random(2000)})
    right = pd.DataFrame({"key": np.arange(100), "b": state.random(100)})
    with dask.config.set({"dataframe.shuffle.method": method}):
        one, two = dd.from_pandas(left, npartitions=6), dd.from_pandas(right, npartitions=3)
        found = one.merge(two, on="key").compute().sort_values(["key", "a"])
        expected = left.merge(right, on="key").sort_values(["key", "a"])
        pd.testing.assert_frame_equal(
            found.reset_index(drop=True), expected.reset_index(drop=True), check_dtype=False
        )
        by = one.shuffle("key").groupby("key").a.sum().compute()
        np.testing.assert_allclose(by.sort_index().values, left.groupby("key").a.sum().values)


def test_futures_and_what_coordinates_them(client):
    squares = client.map(lambda n: n * n, range(50))
    assert sorted(one.result() for one in as_completed(squares)) == [n * n for n in range(50)]
    [data] = client.scatter([np.arange(10)], broadcast=True)
    assert len(client.who_has(data)[data.key]) == 3
    assert sum(map(len, client.has_what().values())) >= 3
    failing = client.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    queue, variable = Queue(client=client), Variable(client=client)
    client.submit(lambda queue: queue.put(7), queue).result()
    assert queue.get(timeout=60) == 7
    variable.set(8)
    assert client.submit(lambda variable: variable.get(), variable).result() == 8

    def locked():
        with Lock("a"):
            return True

    assert client.submit(locked).result()
    event = Event("go")
    waiting = client.submit(lambda: Event("go").wait(60))
    event.set()
    assert waiting.result()


def test_actors(client):
    class Counter:
        count = 0

        def add(self, n):
            self.count += n
            return self.count

    counter = client.submit(Counter, actor=True).result()
    for _ in range(5):
        counter.add(2).result()
    assert counter.add(0).result() == 10 and counter.count == 10


def test_run_everywhere(client, cluster):
    assert len(set(client.run(os.getpid).values())) == 3
    pid = client.run_on_scheduler(os.getpid)
    assert pid != os.getpid() and pid not in client.run(os.getpid).values()
    names = client.run(lambda dask_worker: dask_worker.name)
    assert sorted(names.values()) == [0, 1, 2]
    assert client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.workers)) == 3


def test_a_workers_class_is_the_one_that_clients_know(client):
    kinds = client.run(lambda dask_worker: type(dask_worker)).values()
    assert set(kinds) == {Worker}


def test_upload_file(client, tmp_path):
    module = tmp_path / "uploaded_here.py"
    module.write_text("value = 42\n")
    client.upload_file(str(module))

    def use():
        import uploaded_here

        return uploaded_here.value

    assert set(client.run(use).values()) == {42}


def test_worker_plugins(client):
    class Mark(WorkerPlugin):
        name = "mark"

        def setup(self, worker):
            worker.mark = "set"

        def teardown(self, worker):
            worker.mark = "gone"

    client.register_plugin(Mark())
    marks = lambda: set(client.run(lambda dask_worker: dask_worker.mark).values())
    assert marks() == {"set"}
    client.unregister_worker_plugin("mark")
    assert marks() == {"gone"}


def test_nanny_plugins(client):
    class Variables(NannyPlugin):
        name = "variables"
        restart = True

        def setup(self, nanny):
            nanny.env["SET_BY_PLUGIN"] = "yes"

    client.register_plugin(Variables())
    client.wait_for_workers(3, timeout=120)
    assert set(client.run(lambda: os.environ.get("SET_BY_PLUGIN")).values()) == {"yes"}
    client.unregister_worker_plugin("variables", nanny=True)


def test_restart_gives_clean_workers_under_the_same_names(client, cluster):
    client.run(lambda: setattr(os, "dirt", 1))
    before = set(client.run(os.getpid).values())
    lost = client.submit(lambda: 1, pure=False)
    lost.result()
    client.restart(timeout="120s")
    client.wait_for_workers(3, timeout=120)
    assert not before & set(client.run(os.getpid).values())
    assert set(client.run(lambda: hasattr(os, "dirt")).values()) == {False}
    assert lost.status == "cancelled"
    eventually(lambda: cluster.observed == {0, 1, 2}, "the same names")


def test_restart_workers_restarts_those_alone(client, cluster):
    before = client.run(os.getpid)
    one = cluster.workers[1].address
    client.restart_workers([one], timeout=120)
    client.wait_for_workers(3, timeout=120)
    after = client.run(os.getpid)
    kept = {address: pid for address, pid in before.items() if address != one}
    assert kept.items() <= after.items() and before[one] not in after.values()


def test_performance_report(client, tmp_path):
    pytest.importorskip("bokeh")
    path = tmp_path / "report.html"
    with performance_report(filename=str(path)):
        client.gather(client.map(lambda n: time.sleep(0.01), range(10), pure=False))
    assert "Dask Performance Report" in path.read_text()


def test_versions_agree(client):
    versions = client.get_versions(check=True)
    assert len(versions["workers"]) == 3


def test_retired_workers_are_replaced_when_asked_for(client, cluster):
    gone = cluster.workers[2].address
    client.retire_workers([gone])
    eventually(lambda: 2 not in cluster.observed, "it has gone")
    cluster.scale(2)
    cluster.scale(3)
    client.wait_for_workers(3, timeout=120)
    assert client.submit(sum, [1, 2]).result() == 3


def test_cluster_state_and_profile_can_be_dumped(client, tmp_path):
    client.dump_cluster_state(str(tmp_path / "dump"), format="yaml")
    assert (tmp_path / "dump.yaml").stat().st_size > 1000
    assert client.profile() is not None
    assert client.get_task_stream() is not None
    assert client.nthreads() and client.processing() is not None
