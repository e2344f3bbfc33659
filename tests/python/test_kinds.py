"""Tasks that need a GPU are given to workers with one: what decides is pure (`cuda_cluster_dask.kinds`), and
a plugin of the scheduler (`by_kind`) says to it what is in a task. CuPy is made up (`kinds/cupy.py`)."""

import asyncio
import contextlib
import logging
import operator
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
MADE_UP = Path(__file__).with_name("kinds")
sys.path[:0] = [str(ROOT / "crates/cluster/src/python"), str(MADE_UP)]

import cupy  # noqa: E402
import cupy as cp  # noqa: E402
import dask  # noqa: E402
import dask.array as da  # noqa: E402
from conftest import QUIET  # noqa: E402
from dask.utils import methodcaller  # noqa: E402
from distributed import Client, Scheduler, SchedulerPlugin, Worker, get_client, secede, wait  # noqa: E402

from cuda_cluster_dask import by_kind, kinds, queued  # noqa: E402
from cuda_cluster_dask.internals import task_nodes  # noqa: E402
from cuda_cluster_dask.kinds import Kind  # noqa: E402

assert Path(cupy.__file__).is_relative_to(MADE_UP), "this one has a CuPy"
Task, DataNode = task_nodes()

ANY, ON_GPU, TO_HOST = Kind(False, False), Kind(True, True), Kind(True, False)


@pytest.mark.parametrize(
    "modules, functions, dependencies, kind",
    [
        ([], [], [], ANY),
        (["numpy", "pandas.core.frame"], [], [False, False], ANY),
        (["cudf.core.dataframe"], [], [], ON_GPU),
        (["cupy._core.core", "numpy"], ["asnumpy"], [], TO_HOST),
        (["operator"], [], [False, True], ON_GPU),
        (["dask.utils"], ["to_pandas"], [True], TO_HOST),
        (["dask.utils"], ["to_pandas"], [False], ANY),
        (["numba.core.dispatcher"], [], [], ANY),
        (["numba.cuda.dispatcher"], [], [], ON_GPU),
        (["torch"], [], [], ANY),
        (["torch.cuda"], ["cpu"], [], TO_HOST),
        # Names that only begin alike.
        (["cupylike", "rmmx.y", "cudfs"], [], [], ANY),
        # Dask assigns these by itself; what they hold is still on the device.
        (["distributed.shuffle._shuffle", "cudf"], [], [True], Kind(False, True)),
    ],
)
def test_a_task_is_of_the_kind_that_its_packages_and_what_it_takes_are(
    modules, functions, dependencies, kind
):
    assert kinds.kind(modules, functions, dependencies) == kind


@pytest.mark.parametrize(
    "name, told",
    [
        ("cupy.ndarray", True),
        ("cudf.core.dataframe.DataFrame", True),
        ("numpy.ndarray", False),
        ("pandas.core.frame.DataFrame", False),
        ("float", False),
        ("list", None),
        ("mine.Frame", None),
        ("torch.Tensor", None),
        (None, None),
        ("", False),
    ],
)
def test_a_type_tells_where_a_result_is(name, told):
    assert kinds.is_on_device(name) is told


def uses_it(x):
    return cp.sqrt(x)


def imports_it(x):
    import cudf

    return cudf.DataFrame(x)


def in_a_part(xs):
    return [cp.sqrt(x) for x in xs]


def goes_and_comes_back(x):
    return cupy.asnumpy(cp.sqrt(cp.asarray(x)))


def knows_nothing(x):
    return x + 1


def of_a_package(x):
    import cupy

    return x if isinstance(x, np.ndarray) else cupy.asarray(x)


of_a_package.__code__ = of_a_package.__code__.replace(co_filename="/venv/lib/site-packages/xarray/core.py")


class Odd:
    """Whoever asks it for anything but its type regrets it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = None


def told(spec, *dependencies):
    look = by_kind.Look()
    return kinds.kind(look.into(spec), look.results_come_from(spec), dependencies)


def fused(key="b"):
    return Task.fuse(Task("a", cupy.asarray, 1), Task("b", cupy.asnumpy, Task("a", len, 1).ref()), key=key)


@pytest.mark.parametrize(
    "spec, kind",
    [
        (lambda: Task("x", cupy.asarray, 1), ON_GPU),
        (lambda: Task("x", cupy.sqrt, 1), ON_GPU),
        (lambda: Task("x", partial(map, partial(cupy.asarray)), [1]), ON_GPU),
        (lambda: Task("x", dask.utils.apply, cupy.asnumpy, [1]), TO_HOST),
        (lambda: Task("x", cupy.ndarray(1).sum), ON_GPU),
        (lambda: Task("x", knows_nothing, cupy.ndarray(1)), ON_GPU),
        (lambda: Task("x", knows_nothing, like=[{"a": (cupy.ndarray(1),)}]), ON_GPU),
        (lambda: Task("x", sum, Task(None, cupy.asarray, 1)), ON_GPU),
        (lambda: DataNode("x", cupy.ndarray(1)), ON_GPU),
        (lambda: DataNode("x", [np.ones(3), {"a": cupy.ndarray}]), ON_GPU),
        (fused, TO_HOST),
        (lambda: Task("x", uses_it, 1), ON_GPU),
        (lambda: Task("x", imports_it, 1), ON_GPU),
        (lambda: Task("x", in_a_part, 1), ON_GPU),
        (lambda: Task("x", lambda x: cp.sqrt(x), 1), ON_GPU),
        (lambda: Task("x", goes_and_comes_back, 1), TO_HOST),
        (lambda: Task("x", knows_nothing, 1), ANY),
        (lambda: Task("x", of_a_package, 1), ANY),
        (lambda: Task("x", knows_nothing, np.ones(3), "cupy"), ANY),
        (lambda: Task("x", np.sum, np.ones(3)), ANY),
        (lambda: DataNode("x", "cupy"), ANY),
        (lambda: Task("x", knows_nothing, Odd(), [Odd()], {"a": Odd()}), ANY),
        (lambda: None, ANY),
        (lambda: (sum, [1, 2]), ANY),
    ],
)
def test_what_is_in_a_task_is_found(spec, kind):
    assert told(spec()) == kind


@pytest.mark.parametrize(
    "function, kind",
    [
        (operator.add, ON_GPU),
        (knows_nothing, ON_GPU),
        (methodcaller("get"), TO_HOST),
        (methodcaller("sum"), ON_GPU),
        (operator.methodcaller("to_pandas", nullable=True), TO_HOST),
        (operator.methodcaller("get"), TO_HOST),
        (cupy.ndarray.get, TO_HOST),
        (partial(cupy.asnumpy), TO_HOST),
    ],
)
def test_what_takes_a_gpus_data_needs_one_and_may_bring_it_to_the_host(function, kind):
    before = Task("before", cupy.asarray, 1)
    assert told(Task("x", function, before.ref()), True) == kind


def test_large_tasks_are_looked_at_as_far_as_a_bound():
    assert told(Task("x", sum, [*range(by_kind.MOST // 2), cupy.ndarray(1)])) == ON_GPU
    assert told(Task("x", sum, [*range(by_kind.MOST), cupy.ndarray(1)])) == ANY
    endless = []
    endless.append([endless] * 10**6)
    assert told(Task("x", sum, endless)) == ANY


def run(story, **workers):
    """A story with a scheduler that places by kind, and workers of this process with these resources."""

    async def told():
        async with contextlib.AsyncExitStack() as stack:
            scheduler = Scheduler(dashboard=False, dashboard_address=":0", port=0, validate=True)
            await stack.enter_async_context(scheduler)
            by_kind.add(scheduler, True)
            for name, resources in workers.items():
                worker = Worker(scheduler.address, name=name, nthreads=1, resources=resources, validate=True)
                await stack.enter_async_context(worker)
            client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
            await story(client, scheduler)

    asyncio.run(told())


def at(scheduler, *futures):
    return {ws.name for future in futures for ws in scheduler.tasks[future.key].who_has}


def restricted(scheduler, future):
    return scheduler.tasks[future.key].resource_restrictions == by_kind.ON_GPU


BOTH = {"gpu": {"GPU": 1}, "cpu": {"CPU": 1}}


def slowly(x):
    time.sleep(0.02)
    return x


def test_what_an_earlier_graph_has_left_on_the_device_is_known():
    async def story(client, scheduler):
        kept = client.map(cupy.asarray, range(8))
        await wait(kept)
        assert at(scheduler, *kept) == {"gpu"}
        sums = client.map(operator.add, kept, range(8))
        await wait(sums)
        assert at(scheduler, *sums) == {"gpu"}
        host = client.map(cupy.asnumpy, sums)
        after = client.map(slowly, host)
        assert [int(one) for one in await client.gather(after)] == [2 * n for n in range(8)]
        assert at(scheduler, *host) == {"gpu"}
        assert {restricted(scheduler, one) for one in host} == {True}
        assert {restricted(scheduler, one) for one in after} == {False}

    run(story, **BOTH)


def test_what_a_worker_has_said_of_a_result_goes_before_what_was_expected():
    async def story(client, scheduler):
        there = client.submit(cupy.asarray, 1)
        # That it comes back to the host nobody sees.
        back = client.submit(lambda x: x.host, there)
        unknown = client.submit(knows_nothing, back)
        await wait(unknown)
        assert restricted(scheduler, unknown)
        known = client.submit(slowly, back)
        assert await known == 1
        assert not restricted(scheduler, known)

    run(story, **BOTH)


def test_what_the_user_says_goes_before():
    async def story(client, scheduler):
        one = client.submit(cupy.worker, resources={"CPU": 1}, pure=False)
        two = client.submit(cupy.worker, workers=["cpu"], pure=False)
        with dask.annotate(resources={}):
            three = client.compute(dask.delayed(cupy.worker)())
        four = client.submit(cupy.worker, pure=False)
        assert [await one, await two, await four] == ["cpu", "cpu", "gpu"]
        assert scheduler.tasks[three.key].resource_restrictions == {}
        # What comes of it is taken for what it looks like.
        assert scheduler.tasks[one.key] in scheduler.plugins[by_kind.ByKind.name]._on_device

    run(story, **BOTH)


class Restricted(SchedulerPlugin):
    """Which tasks are, by the packages of their functions."""

    def __init__(self):
        self.by_package = {}

    def update_graph(self, scheduler, *, tasks, **_):
        for ts in map(scheduler.tasks.get, tasks):
            package = ".".join(getattr(getattr(ts.run_spec, "func", None), "__module__", "").split(".")[:2])
            self.by_package.setdefault(package, set()).add(ts.resource_restrictions is not None)


def test_dask_assigns_the_tasks_of_its_own_shuffles():
    async def story(client, scheduler):
        restricted = Restricted()
        scheduler.add_plugin(restricted)
        plain = np.arange(144.0).reshape(12, 12)
        meta = np.empty((0, 0))
        x = da.from_array(plain, chunks=(3, 12)).map_blocks(cupy.asarray, meta=meta)
        there = x.map_blocks(cupy.from_device, meta=meta).rechunk((12, 3), method="p2p").map_blocks(slowly)
        np.testing.assert_array_equal(await client.compute(there), plain)
        assert restricted.by_package["distributed.shuffle"] == {False}
        # What they take is taken to be on a GPU. One of them may be fused with what takes its result.
        assert restricted.by_package["dask._task_spec"] == {False, True}

    run(story, **BOTH, more={"CPU": 1})


def delegates(x):
    client = get_client()
    secede()
    return client.submit(uses_it, cupy.asarray(x)).result()


def test_tasks_that_wait_for_others_keep_no_gpu_from_these():
    async def story(client, scheduler):
        futures = client.map(delegates, [4.0, 9.0])
        assert [float(one.get()) for one in await asyncio.wait_for(client.gather(futures), 60)] == [2, 3]

    run(story, **BOTH)


def test_without_a_gpu_worker_tasks_wait_and_why_says_for_what():
    async def story(client, scheduler):
        waits = client.submit(cupy.asarray, 1)
        assert await client.submit(knows_nothing, 1) == 2
        [held] = queued.told(scheduler)["held"]
        assert held["why"] == "it needs a worker with GPU, and there is none"
        async with Worker(scheduler.address, name="late", resources={"GPU": 1}):
            assert (await waits).get() == 1

    run(story, cpu={"CPU": 1})


def test_a_failure_is_told_once_and_harms_no_task(caplog, monkeypatch):
    def fails(look, spec):
        raise RuntimeError("a new kind of task")

    monkeypatch.setattr(by_kind.Look, "into", fails)

    async def story(client, scheduler):
        with caplog.at_level(logging.WARNING, "distributed.scheduler"):
            assert (await client.submit(cupy.asarray, 1)).get() == 1
            assert await client.gather(client.map(knows_nothing, range(9))) == list(range(1, 10))

    run(story, **BOTH)
    assert caplog.text.count("placed as Dask does") == 1 and "a new kind of task" in caplog.text


def test_a_dask_whose_tasks_are_not_known_is_left_alone(caplog, monkeypatch):
    def gone():
        raise ImportError("there is no Task")

    monkeypatch.setattr(by_kind.internals, "task_nodes", gone)

    async def story():
        async with Scheduler(dashboard=False, dashboard_address=":0", port=0) as scheduler:
            with caplog.at_level(logging.WARNING, "distributed.scheduler"):
                by_kind.add(scheduler, True)
            assert by_kind.ByKind.name not in scheduler.plugins

    asyncio.run(story())
    assert "there is no Task" in caplog.text


@pytest.fixture(scope="module")
def client():
    from cuda_cluster.dask import LocalCUDACluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(MADE_UP), os.environ.get("PYTHONPATH", "")]))
        two = {**QUIET, "topology": "dgx-h100", "gpus": "0-1", "cpu_workers": 2}
        with LocalCUDACluster(**two, place_by_kind=True) as cluster, Client(cluster) as client:
            client.wait_for_workers(4, timeout=120)
            yield client


def workers(client, futures):
    """The names of the workers that have results."""
    wait(futures)
    names = {at: one["name"] for at, one in client.scheduler_info(n_workers=-1)["workers"].items()}
    return {names[address] for holders in client.who_has(futures).values() for address in holders}


# Workers of `LocalCUDACluster` are called by their GPUs.
GPUS, ALL = {0, 1}, {0, 1, "cpu0", "cpu1"}


def test_workers_of_a_mixed_cluster_say_of_which_kind_they_are(client):
    info = client.scheduler_info(n_workers=-1)["workers"].values()
    assert {one["name"]: one["resources"] for one in info} == {
        **dict.fromkeys(GPUS, {"GPU": 1}),
        **dict.fromkeys(ALL - GPUS, {"CPU": 1}),
    }


def test_gpu_tasks_run_on_gpu_workers_and_others_anywhere(client):
    arrays = client.map(cupy.asarray, [np.arange(n) for n in range(40)])
    roots = client.map(cupy.sqrt, arrays)
    more = client.map(operator.add, roots, arrays)
    host = client.map(methodcaller("get"), more)
    # On a worker without a GPU none of them could even be read.
    for futures in (arrays, roots, more, host):
        assert workers(client, futures) == GPUS
    after = client.map(slowly, host)
    plain = client.map(slowly, range(100, 140))
    assert workers(client, after) | workers(client, plain) == ALL
    assert workers(client, plain) - GPUS, "CPU workers have work, too"
    for n, found in enumerate(client.gather(after)):
        np.testing.assert_allclose(found, np.sqrt(np.arange(n)) + np.arange(n))


def test_what_the_user_annotates_goes_before_in_a_cluster(client):
    assert client.submit(cupy.worker, resources={"CPU": 1}, pure=False).result().startswith("cpu")
    with dask.annotate(workers=["cpu1"]):
        [named] = dask.compute(dask.delayed(cupy.worker)())
    assert named == "cpu1"
    assert client.submit(cupy.worker, pure=False).result() in GPUS


def test_collections_that_dask_fuses_have_the_right_results(client):
    plain = np.random.default_rng(7).random((64, 64))
    x = da.from_array(plain, chunks=(8, 8))
    meta = np.empty((0, 0))
    roots = x.map_blocks(cupy.asarray, meta=meta).map_blocks(cupy.sqrt, meta=meta)
    y = roots.map_blocks(cupy.asnumpy, meta=meta).persist()
    assert workers(client, client.futures_of(y)) == GPUS
    # A reduction of what is on the host.
    np.testing.assert_allclose((y @ y.T).sum().compute(), (np.sqrt(plain) @ np.sqrt(plain).T).sum())


def test_frames_of_pandas_use_all_workers(client):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    import dask.dataframe as dd

    plain = pd.DataFrame({"key": np.arange(4000) % 7, "a": np.arange(4000.0)})
    frame = dd.from_pandas(plain, npartitions=24).map_partitions(slowly, meta=plain).persist()
    assert workers(client, client.futures_of(frame)) - GPUS
    found = frame.groupby("key").a.sum().compute().sort_index()
    np.testing.assert_allclose(found.values, plain.groupby("key").a.sum().values)
